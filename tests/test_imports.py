"""What the default run does not import names what is there: end-to-end tests and benchmarks follow the package."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("tests/e2e/*.py"), *ROOT.glob("benchmarks/*.py")])


def missing(source: str) -> list[str]:
    """The names that a module imports from the package and that the package does not have."""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if node.module is not None and node.module.partition(".")[0] == "kvserve"]
    return [
        f"{node.module}.{name.name}" for node in own for name in node.names if not _is_there(node.module, name.name)
    ]


def _is_there(module: str | None, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(str(module)), name) or _is_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_names_of_the_package_are_there() -> None:
    """In every file of both folders."""
    assert len(FILES) > 50
    assert {str(file.relative_to(ROOT)): gone for file in FILES if (gone := missing(file.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "source", ["from kvserve.core import Gone", "from kvserve.gone import Turn", "from kvserve import gone"]
)
def test_a_name_that_left_is_noticed(source: str) -> None:
    """The control: a class, a module, a module as a name."""
    assert missing(f"{source}\nfrom kvserve import core\nfrom kvserve.core import Turn") == [
        source.replace("from ", "").replace(" import ", ".")
    ]
