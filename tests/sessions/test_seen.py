"""Paths and records are values: long ones are no problem, and nobody changes them."""

import dataclasses
import gc

import pytest

from kvserve.sessions.seen import PathNode, pack_ids
from tests.sessions.samples import record_of, user


def test_a_very_long_path_is_walked_and_freed_without_recursion() -> None:
    """100,000 messages below each other: read, shown and let go."""
    seen = PathNode(None, b"0", user("x"), None, 0)
    for index in range(1, 100_000):
        seen = PathNode(seen, b"0", seen.message, None, index)
    assert [node.index for node in seen.path()] == list(range(100_000))
    assert len(repr(seen)) < 500
    del seen
    gc.collect()


def test_a_node_cannot_be_changed() -> None:
    """Who holds a path holds what the model saw."""
    seen = PathNode(None, b"0", user("x"), None, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.message = user("y")  # type: ignore[misc]


def test_packed_ids_are_the_ids() -> None:
    """Prompt and answer, one after the other, four bytes each, read-only."""
    packed = pack_ids((1, 2, 2**32 - 1), [5])
    record = dataclasses.replace(record_of(PathNode(None, b"0", user("x"), None, 0)), packed_ids=packed)
    assert list(record.ids) == [1, 2, 2**32 - 1, 5] and len(record.ids) == 4 and len(packed) == 16
    with pytest.raises(TypeError):
        record.ids[0] = 3  # type: ignore[index]
    with pytest.raises(OverflowError):
        pack_ids([-1])


def test_a_record_keeps_its_own_arguments() -> None:
    """The caller's dict may change, the record's does not."""
    arguments: dict[str, object] = {"a": 1}
    record = dataclasses.replace(record_of(PathNode(None, b"0", user("x"), None, 0)), template_arguments=arguments)
    arguments["a"] = 2
    assert dict(record.template_arguments) == {"a": 1}
    with pytest.raises(TypeError):
        record.template_arguments["a"] = 3  # type: ignore[index]
