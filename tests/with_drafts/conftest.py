"""Tests of whole servers once more, with drafts tried at every step: for `make full` only.

A file here names tests of another one, which then run in a module of their own, with fixtures of their own: the cells
that the default run takes, and those of `ALSO`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

from tests.laws import IS_FULL, THREE_KINDS
from tests.with_drafts.trying import Tried, drafts_at_every_step

collect_ignore_glob = [] if IS_FULL else ["test_*.py"]

HERE = Path(__file__).parent

ALSO: Mapping[str, Callable[..., bool]] = {
    "test_every_turn_starts_where_the_last_one_ended": lambda app, **_: app == "gemma3",
    "test_the_next_prompt_is_the_one_without_a_restart": lambda family, **_: family != "glm4_moe_lite",
    "test_a_server_that_starts_again_is_warm": lambda **_: True,
    "test_two_clients_on_one_session_id": lambda **_: True,
    "test_a_rewound_conversation": lambda **_: True,
    "test_whatever_was_computed_is_reused": lambda served, scenario: served in THREE_KINDS and "sub-agents" in scenario,
}
"""Of tests that the default run takes with one kind of caches: caches that can be cut, states, windows."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the other cells out, and the rest out of the default run."""
    again = [item for item in items if isinstance(item, pytest.Function) and item.path.parent == HERE]
    left_out = {item for item in again if not _is_wanted(item)}
    for item in again:
        item.add_marker(pytest.mark.long)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_wanted(item: pytest.Function) -> bool:
    """No law either, whose examples `make full` multiplies."""
    if is_hypothesis_test(item.obj):
        return False
    is_also = ALSO.get(item.originalname)
    return not item.get_closest_marker("long") or (is_also is not None and is_also(**item.callspec.params))


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[Tried]:
    """Before any server of the module."""
    with drafts_at_every_step() as tried:
        yield tried
    assert tried.num_drafted or not tried.num_plain, "no server of this module has drafted anything"


@pytest.fixture(autouse=True)
def answers_are_right(tried: Tried) -> Iterator[None]:
    """Whatever a test looks at itself."""
    yield
    assert not tried.take_wrong()
