"""docs/tests.md names tests that are there and that the default run takes, and it has a line for every requirement.

It reads the page and the syntax trees of the tests; whether a test really holds its row is a matter of opening it.
"""

import ast
import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/tests.md").read_text(encoding="utf-8")
NODE_IDS = sorted(set(re.findall(r"`([^`\s]+::[^`\s]+)`", PAGE)))
FILES = sorted(set(re.findall(r"`(tests/[^`\s:]+\.py)`", PAGE)))

NUM_ROWS = {"A": 8, "B": 11, "C": 8, "D": 3, "E": 6, "F": 4, "G": 7, "H": 6}
"""How many requirements each letter has."""

LEFT_OUT = ("pytest.mark.long", "pytest.mark.e2e")
"""Marks of what the default run does not take."""


def marks(nodes: list[ast.expr]) -> list[str]:
    """The decorators, or members of a `pytestmark`, without their arguments."""
    whole = chain.from_iterable(node.elts if isinstance(node, ast.List | ast.Tuple) else [node] for node in nodes)
    return [ast.unparse(node.func if isinstance(node, ast.Call) else node) for node in whole]


def marks_of_module(tree: ast.Module) -> list[str]:
    """What `pytestmark` says of all tests of a file."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return marks([node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def complaint(node_id: str, root: Path = ROOT) -> str | None:
    """What is wrong with a node id of the page, if anything is."""
    path, _, name = node_id.partition("::")
    if path.startswith("tests/e2e/"):
        return f"{node_id}: only `make e2e` runs it"
    if not (root / path).is_file():
        return f"{node_id}: there is no such file"
    tree = tree_of(root / path)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found or not name.startswith("test_"):
        return f"{node_id}: the file has no such test"
    left_out = [mark for mark in (*marks_of_module(tree), *marks(found[-1].decorator_list)) if mark in LEFT_OUT]
    return f"{node_id}: marked {left_out[0]}" if left_out else None


def test_every_test_of_the_page_is_in_the_default_run(request: pytest.FixtureRequest) -> None:
    """Its file is there, the function is defined in it, and no mark leaves it out as a whole. A default run that takes
    it shows that; of what this run does not take the syntax tree is read."""
    is_default = "not long" in request.config.option.markexpr
    taken = {item.nodeid.partition("[")[0] for item in request.session.items if is_default}
    assert len(NODE_IDS) > 100
    assert [told for node_id in NODE_IDS if node_id not in taken and (told := complaint(node_id))] == []


def test_some_case_of_every_test_is_in_this_run(request: pytest.FixtureRequest) -> None:
    """A test all of whose cases are long holds nothing by default. Where only a part of the tests was asked for, there
    is nothing to see."""
    asked = request.config
    if asked.option.keyword or asked.getoption("--part") or any("::" in argument for argument in asked.args):
        pytest.skip("only some of the tests were asked for")
    run = {item.nodeid.partition("[")[0] for item in request.session.items}
    files = {node_id.partition("::")[0] for node_id in run}
    assert [node_id for node_id in NODE_IDS if node_id.partition("::")[0] in files and node_id not in run] == []


def test_every_file_of_the_page_is_there() -> None:
    """Those too that are named for what the default run does not show."""
    assert [path for path in FILES if not (ROOT / path).is_file()] == []


MIXED = """
def test_of_every_run(): ...
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.long)])
def test_of_which_a_part_is_long(number): ...
@pytest.mark.slow
@pytest.mark.long
def test_that_is_long(): ...
@pytest.mark.e2e
def test_that_needs_a_client(): ...
def helper(): ...
"""
LONG = """
pytestmark = [pytest.mark.long, pytest.mark.timeout(9)]
def test_of_a_long_file(): ...
"""


@pytest.mark.parametrize(
    ("node_id", "reason"),
    [
        ("tests/test_mixed.py::test_of_every_run", None),
        ("tests/test_mixed.py::test_of_which_a_part_is_long", None),
        ("tests/test_nowhere.py::test_of_every_run", "no such file"),
        ("tests/test_mixed.py::test_a_made_up_one", "no such test"),
        ("tests/test_mixed.py::helper", "no such test"),
        ("tests/test_mixed.py::test_that_is_long", "marked pytest.mark.long"),
        ("tests/test_mixed.py::test_that_needs_a_client", "marked pytest.mark.e2e"),
        ("tests/test_long.py::test_of_a_long_file", "marked pytest.mark.long"),
        ("tests/e2e/test_mixed.py::test_of_every_run", "only `make e2e`"),
    ],
)
def test_what_is_not_in_the_default_run_is_told(tmp_path: Path, node_id: str, reason: str | None) -> None:
    """The control: a made-up node id, one of an end-to-end test and long ones are no holders of anything."""
    for path, text in {"test_mixed.py": MIXED, "test_long.py": LONG, "e2e/test_mixed.py": MIXED}.items():
        file = tmp_path / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    told = complaint(node_id, tmp_path)
    assert told is None if reason is None else reason in (told or "")


def test_every_row_has_its_line() -> None:
    """The first cell of a line of a table begins with the row's id; no row has two."""
    lines = re.findall(r"^\| ([A-Z]\d+) .* \| .+ \|$", PAGE, re.MULTILINE)
    assert lines == [f"{letter}{number}" for letter, last in NUM_ROWS.items() for number in range(1, last + 1)]


def test_a_line_names_a_test_or_says_that_there_is_none() -> None:
    """Each line of a table has a holder, or the words for what the default run does not show."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("Held by |")]
    words = ("::", "no test: ", "only in make full: ", "only in make e2e: ")
    assert lines and [line for line in lines if not any(word in line for word in words)] == []
