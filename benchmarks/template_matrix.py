"""What this server makes of a model's chat template: what is found out, rendered, read and replayed as it must be.

A row of cells for any folder, without weights; the judge is transformers. `scripts/check_template.py` prints it,
`real_templates.py` makes the table of the templates that people run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.template_calls import call_cells
from benchmarks.template_cell import Cell
from benchmarks.template_load import load_cells
from benchmarks.template_model import Model, load_model
from benchmarks.template_reference import Reference
from benchmarks.template_render import render_cells
from benchmarks.template_replay import replay_cells
from kvserve.app.wiring import template_file

COLUMNS: Mapping[str, Callable[[Model, Reference], Iterator[Cell]]] = {
    "load": load_cells,
    "render": render_cells,
    "calls": call_cells,
    "replay": replay_cells,
}
LOOPS = "loops"
"""The column that needs a model: `template_loops.py`."""


@dataclass(frozen=True, slots=True)
class Row:
    """All cells of one template."""

    name: str
    cells: tuple[Cell, ...]

    def of(self, column: str) -> list[Cell]:
        """Those of a column."""
        return [cell for cell in self.cells if cell.column == column]

    @property
    def misses(self) -> list[Cell]:
        """Those that should have come out otherwise."""
        return [cell for cell in self.cells if cell.verdict == "miss"]


def row_of(name: str, folder: Path, columns: Iterable[str] = COLUMNS, template: Path | None = None) -> Row:
    """The cells of a folder, with the template of a file in the place of its own, if one is given. A folder that cannot
    be loaded has one cell, which says why."""
    try:
        given = template_file(template)
        source = given.source if given is not None else None
        model, reference = load_model(folder, source), Reference(folder, source)
    except Exception as error:  # noqa: BLE001  # the reason is the result
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Row(name, (Cell("load", "template", "miss", reason),))
    return Row(name, tuple(cell for column in columns for cell in COLUMNS[column](model, reference)))


# --- tables ----------------------------------------------------------------------------------------------------------


def count(cells: Sequence[Cell]) -> str:
    """How many of those that count are right, and how many turns the template itself changes."""
    verdicts = Counter(cell.verdict for cell in cells)
    counted = len(cells) - verdicts["not counted"] - verdicts["dropped"]
    if not counted and not verdicts["dropped"]:
        return "none"
    return f"{verdicts['ok']}/{counted}" + (f" + {verdicts['dropped']}" if verdicts["dropped"] else "")


def table(rows: Sequence[Row], columns: Collection[str] = tuple(COLUMNS)) -> Iterator[str]:
    """A line for each template, with its cells by column."""
    yield f"| template | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for row in rows:
        yield f"| {row.name} | {' | '.join(count(row.of(column)) for column in columns)} |"


def details(row: Row) -> Iterator[str]:
    """Each miss with its reason, then what is not counted, by reason."""
    for cell in row.misses:
        yield f"- {cell.column}, {cell.case}: {_plain(cell.reason)}"
    for column in (*COLUMNS, LOOPS):
        others: dict[tuple[str, str], list[str]] = {}
        for cell in row.of(column):
            if cell.verdict in ("dropped", "not counted"):
                others.setdefault((cell.verdict, cell.reason), []).append(cell.case)
        for (verdict, reason), cases in others.items():
            yield f"- {column}, {verdict} ({', '.join(cases)}): {_plain(reason)}"


def _plain(reason: str) -> str:
    return f"`{reason.replace('`', chr(39))}`" if any(mark in reason for mark in "<>[]|*_") else reason
