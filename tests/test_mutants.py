"""The planted faults of `make mutants` fit the code as it stands."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutation.mutants import Edit, read_mutants
from tests.mutation.results import Verdict, read_results, table

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = read_mutants()


BLOCK = re.compile(r"^( *)(?:async def|def|class) ", re.MULTILINE)
"""Where a function or a class begins, with its indentation."""


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


@cache
def blocks(text: str) -> list[range]:
    """Where functions and classes stand in a text, as half-open ranges of its characters, in the order of their
    beginnings: each ends before the next line that is no deeper than its first."""
    return [range(begins.start(), _end(text, begins)) for begins in BLOCK.finditer(text)]


def _end(text: str, begins: re.Match[str]) -> int:
    after = re.compile(rf"^ {{0,{len(begins[1])}}}[^\s)\]}}]", re.MULTILINE).search(text, begins.end())
    return after.start() if after else len(text)


def are_alike(one: object, other: object) -> bool:
    """Whether two nodes of syntax trees, or what stands in them, say the same, wherever they stand."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(are_alike(getattr(one, name, None), getattr(other, name, None)) for name in one._fields)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return one == other


def are_two_programs(one: str, other: str) -> bool:
    """Whether texts differ in more than their words."""
    return not are_alike(ast.parse(one), ast.parse(other))


def is_another_program(edit: Edit, text: str) -> bool:
    """The same of a text and what an edit makes of it: where one holds the edit, only the innermost function or class
    is read."""
    changed, at = edit.applied(text), text.index(edit.old)
    around = [block for block in blocks(text) if block.start <= at and at + len(edit.old) <= block.stop]
    if not around:
        return are_two_programs(text, changed)
    block = f"if True:\n{text[around[-1].start : around[-1].stop]}"
    if not block.startswith("if True:\n "):
        block = block.partition("\n")[2]
    return are_two_programs(block, block.replace(edit.old, edit.new))


def test_each_fault_has_a_name_of_its_own() -> None:
    """Results are kept by name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def complaint(edit: Edit) -> str | None:
    """Why an edit plants no fault, if it does not."""
    try:
        return None if is_another_program(edit, text_of(edit.file)) else f"the same program: {edit.old!r}"
    except ValueError as error:
        return str(error)


def test_each_fault_can_be_planted() -> None:
    """Each replaced text stands in its file once, and what comes out is another program."""
    told = {mutant.name: [complaint(edit) for edit in mutant.edits] for mutant in MUTANTS}
    assert {name: complaints for name, complaints in told.items() if any(complaints)} == {}


def test_a_fault_that_is_none_is_told() -> None:
    """The control: a text that is not there, or twice, and one that says the same, in a function or beside it."""
    text = "a = 1  # b\n\n\nclass C:\n    def f(self):\n        return a  # d\n\n\ndef g():\n    pass  # a\n"
    for old, new, is_another in (("# b", "# c", False), ("= 1", "= 2", True), ("# d", "# e", False)):
        assert is_another_program(Edit("a.py", old, new), text) == is_another
    assert is_another_program(Edit("a.py", "        return a  # d", "        return b"), text)
    assert is_another_program(Edit("a.py", "def g():\n    pass", "def h():\n    pass"), text)


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
