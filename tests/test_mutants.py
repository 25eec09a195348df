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
def text_of(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


@cache
def statements(text: str) -> dict[str, ast.stmt]:
    """Those of a module itself, by their text with what stands before them."""
    lines, nodes = text.splitlines(keepends=True), ast.parse(text).body
    starts = [0, *(node.end_lineno or 0 for node in nodes)]
    return {"".join(lines[start : node.end_lineno]): node for start, node in zip(starts, nodes, strict=False)}


def are_two_programs(one: str, other: str) -> bool:
    """Whether statements differ in more than their words; those that are alike to the letter need no look."""
    differing = statements(one).keys() ^ statements(other).keys()
    dumps = [[ast.dump(node) for text, node in statements(each).items() if text in differing] for each in (one, other)]
    return dumps[0] != dumps[1]


def is_another_program(edit: Edit, text: str) -> bool:
    """The same of a text and what an edit makes of it: only the statement that it stands in is read again."""
    changed = edit.applied(text)
    whole = next((statement for statement in statements(text) if edit.old in statement), None)
    if whole is None:
        return are_two_programs(text, changed)
    return are_two_programs(whole, whole.replace(edit.old, edit.new))


def test_each_fault_has_a_name_of_its_own() -> None:
    """Results are kept by name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant: Mutant) -> None:
    """Each replaced text stands in its file once, and what comes out is another program."""
    for edit in mutant.edits:
        assert is_another_program(edit, text_of(edit.file))


def test_words_are_no_fault() -> None:
    """Another comment or another line is the same program, another value is not."""
    text = "import a\n\n\n@b\ndef c():\n    return a  # d\n"
    assert not are_two_programs(text, text.replace("# d", "# e")) and not are_two_programs(text, f"\n{text}")
    assert are_two_programs(text, text.replace("@b", "@d")) and are_two_programs(text, text.replace("return a", "pass"))


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
