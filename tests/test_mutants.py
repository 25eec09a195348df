"""The planted faults of `make mutants` fit the code as it stands."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutation.mutants import Edit, Mutant, read_mutants
from tests.mutation.results import Verdict, read_results, table

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = read_mutants()


@cache
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


def test_each_fault_has_a_name_of_its_own() -> None:
    """Results are kept by name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant: Mutant) -> None:
    """Each replaced text stands in its file once, and what comes out is another program."""
    for edit in mutant.edits:
        text = (ROOT / edit.file).read_text("utf-8")
        assert ast.dump(ast.parse(edit.applied(text))) != dumped(text)


def test_a_text_that_moved_is_told() -> None:
    """A fault that no longer fits is an error, not a mutant that survives."""
    with pytest.raises(ValueError, match="0 times"):
        Edit("a.py", "gone\n", "").applied("here\n")
    assert list(Edit("a.py", "b\nc\n", "").lines("a\nb\nc\nd\n")) == [2, 3]


def test_results_are_read_as_they_were_kept(tmp_path: Path) -> None:
    """The next run begins with the tests that noticed a fault; who was noticed by nobody, or is gone, has none."""
    first, second, gone, *_ = MUTANTS
    verdicts = {
        first.name: Verdict(first, "mapped", "tests/a.py::test_b[x | y]"),
        second.name: Verdict(second, "nobody", ""),
        gone.name: Verdict(gone, "full", "tests/c.py::test_d"),
    }
    kept = tmp_path / "results.md"
    kept.write_text(table(verdicts, 0, 60.0), "utf-8")
    assert read_results([first, second], kept) == {first.name: verdicts[first.name]}
    assert len(read_results(MUTANTS)) > len(MUTANTS) // 2
