"""Every family of the libraries' lists against the engine, as `benchmarks/results/families.md` has it. That the trial
can fail shows each row itself: three wrong records must be told from the right one."""

from pathlib import Path
from typing import Any

import pytest

from tests.laws import sampled

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "families.md"

IN_EVERY_RUN = (("minimax_m3", "mlx-vlm"),)
"""A class of its own, which is cut by its state."""


def cells(line: str) -> list[str]:
    """What of a line is the same on every machine: family, library, streams, cache, and whether that is exact."""
    return [cell.strip() for cell in line.strip("|").split("|")][:5]


LINES = [cells(line) for line in RESULTS.read_text("utf-8").splitlines() if line.count("|") == 7]
HELD = {(line[0], line[1]): line for line in LINES if line[1].startswith("mlx-")}
SERVED = [cell for cell, line in HELD.items() if line[2] != "-" and not line[4].startswith("no")]
"""What cannot be computed here may end the process."""


@pytest.mark.parametrize("cell", sampled(SERVED, IN_EVERY_RUN), ids="-".join)
def test_a_family_is_as_the_table_has_it(cell: tuple[str, Any]) -> None:
    """Loaded, decoded, kept: no less, and no more either, so that what is mended is seen."""
    from benchmarks.families import row_of, table

    row = row_of(cell[1], cell[0])
    assert cells(list(table([row]))[-1]) == HELD[cell], row.outcome


@pytest.mark.long
def test_the_table_has_every_family() -> None:
    """Of the libraries' own lists, but for what is left out by name."""
    from benchmarks.tiny_families import LIBRARIES, families

    assert set(HELD) == {(family, library) for library in LIBRARIES for family in families(library)}
