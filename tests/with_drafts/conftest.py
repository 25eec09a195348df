"""Tests of whole servers once more, with drafts tried at every step: for `make full` only.

A file here names tests of another one, which then run in a module of their own, with fixtures of their own: the cells
that the default run takes, and of the tests in `ALL_CELLS` all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws import IS_FULL
from tests.with_drafts.trying import Tried, drafts_at_every_step

collect_ignore_glob = [] if IS_FULL else ["test_*.py"]

HERE = Path(__file__).parent

ALL_CELLS: frozenset[str] = frozenset()
"""Tests that run with every family."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the default run leaves out, and leave the rest out of the default run."""
    again = [item for item in items if item.path.parent == HERE]
    left_out = {item for item in again if item.get_closest_marker("long") and _name(item) not in ALL_CELLS}
    for item in again:
        item.add_marker(pytest.mark.long)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[Tried]:
    """Before any server of the module."""
    with drafts_at_every_step() as tried:
        yield tried
    assert not tried.wrong
    assert tried.num_drafted or not tried.num_plain, "no server of this module has drafted anything"


@pytest.fixture(autouse=True)
def answers_are_right(tried: Tried) -> Iterator[None]:
    """Whatever a test looks at itself. An answer may be looked at a moment after its client has it: then a later test
    tells of it, or the module's end."""
    yield
    assert not tried.take_wrong()
