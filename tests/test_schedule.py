"""How tests are sorted into units, and units into parts, by what they took before."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedule import PIECE_SECONDS, SlowestFirst, Units, stale_files

FILES = {"tests/a.py": 30.0, "tests/b.py": 10.0, "tests/proxy/": 20.0}


def ids(file: str, count: int) -> list[str]:
    """Node ids of one file."""
    return [f"{file}::test_{number}" for number in range(count)]


def test_a_file_is_one_unit_and_a_folder_with_an_expensive_fixture_too() -> None:
    """What shares fixtures stays together, and goes out longest first."""
    units = Units([*ids("tests/b.py", 2), *ids("tests/proxy/c.py", 1), *ids("tests/proxy/d.py", 1)], FILES)
    assert units.slowest_first() == ["tests/proxy/", "tests/b.py"]
    assert units.of["tests/proxy/c.py::test_0"] == units.of["tests/proxy/d.py::test_0"]


def test_a_file_of_minutes_is_cut_where_it_stands() -> None:
    """Pieces are neighbours in the order of collection, so that a fixture of the module is begun once more at most."""
    units = Units(ids("tests/a.py", 10), {"tests/a.py": 3.5 * PIECE_SECONDS})
    pieces = [units.of[each] for each in ids("tests/a.py", 10)]
    assert pieces == sorted(pieces) and len(set(pieces)) == 3


def test_parts_share_all_and_are_about_as_long() -> None:
    """Every test is in exactly one part; an unknown file counts as well."""
    node_ids = [each for file in (*FILES, "tests/new.py") for each in ids(file, 3)]
    units = Units(node_ids, FILES)
    parts = units.parts(2)
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(units.of.values())
    lengths = [sum(units.seconds[unit] for unit in part) for part in parts]
    assert abs(lengths[0] - lengths[1]) <= 5


class Worker:
    """What the scheduler asks of a worker: it notes what it is given."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def scheduler() -> SlowestFirst:
    options = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(
        option=options, getoption=lambda name: None, getvalue=lambda name: ["popen", "popen"], rootpath=None
    )
    return SlowestFirst(config, SimpleNamespace(loadscopesched=lambda *_: None))


def test_of_a_worker_that_crashes_the_rest_goes_to_its_successor(scheduler: SlowestFirst) -> None:
    """What it had finished is not run again, nor is the test that took it along: that one is the crash that is told."""
    node_ids = [*ids("tests/crash_a.py", 4), *ids("tests/crash_b.py", 4)]
    first, second, successor = Worker("gw0"), Worker("gw1"), Worker("gw2")
    for worker in (first, second):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, node_ids)
    scheduler.schedule()
    assert (first.given, second.given) == ([0, 1, 2, 3], [4, 5, 6, 7])
    scheduler.mark_test_complete(first, 0)
    for index in (4, 5, 6, 7):
        scheduler.mark_test_complete(second, index)
    assert scheduler.remove_node(first) == node_ids[1]
    scheduler.add_node(successor)
    scheduler.add_node_collection(successor, node_ids)
    scheduler.schedule()
    assert successor.given == [2, 3]
    for index in successor.given:
        scheduler.mark_test_complete(successor, index)
    assert scheduler.tests_finished and not scheduler.has_pending and successor.shutting_down


def test_what_has_to_be_compiled_is_what_is_new_or_changed(tmp_path: Path) -> None:
    """A test without rewritten bytecode, or with bytecode that is older than it; never those that no worker imports."""
    for folder in ("e2e", "with_drafts", "__pycache__"):
        (tmp_path / folder).mkdir()
    for name in ("test_new", "test_changed", "test_same", "e2e/test_client", "with_drafts/test_again"):
        (tmp_path / f"{name}.py").touch()
    for name, seconds_later in (("test_changed", -1), ("test_same", 1)):
        compiled = tmp_path / "__pycache__" / f"{name}.{sys.implementation.cache_tag}-pytest-9.0.0.pyc"
        compiled.touch()
        written = (tmp_path / f"{name}.py").stat().st_mtime + seconds_later
        os.utime(compiled, (written, written))
    assert {file.stem for file in stale_files(tmp_path)} == {"test_new", "test_changed"}
