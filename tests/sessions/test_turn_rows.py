"""The turn store's rows come back as they were, in every field; half of one is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import ImageSpan, Message, TextBlock, ToolSpec, Written
from kvserve.sessions.message_rows import dump, parse
from kvserve.sessions.seen import PathNode, TurnRecord
from kvserve.sessions.tool_layouts import AddedTools, ToolLayout
from kvserve.sessions.turn_rows import (
    node_body,
    node_of,
    record_body,
    record_of,
)
from kvserve.sessions.turn_state import ChainState
from kvserve.sessions.turns import TurnStore
from tests.sessions import samples
from tests.sessions.samples import assistant, call, steps_of, user, written
from tests.sessions.test_message_rows import messages, writings

digests = st.binary(max_size=4)


@given(messages, st.none() | writings, digests, digests, st.booleans())
def test_a_node_comes_back(message: Message, wrote: Written | None, chain: bytes, meaning: bytes, shares: bool) -> None:
    """Below its parent, with what was written there; a message that is the writing's own is so again."""
    parent = PathNode(None, b"p", user("p"), None, 0)
    said = wrote.message if wrote is not None and shares else message
    seen = PathNode(parent, chain, said, wrote, 1, meaning)
    again = node_of(node_body(7, seen), {7: parent})
    assert again.parent is parent
    for field in dataclasses.fields(PathNode):
        assert getattr(again, field.name) == getattr(seen, field.name), field.name
    assert again.written is None or (again.message is again.written.message) == (seen.message is wrote.message)  # type: ignore[union-attr]


def test_a_node_without_its_parent_is_refused() -> None:
    """A path with a hole would be another conversation."""
    seen = PathNode(PathNode(None, b"p", user("p"), None, 0), b"c", assistant("a"), written(assistant("a")), 1)
    with pytest.raises(ValueError, match="without the one before"):
        node_of(node_body(7, seen), {8: seen})
    with pytest.raises(ValueError, match="without a message"):
        node_of(b'{"parent":null,"chain":"00","meaning":"","message":null,"written":null}', {})


@given(st.none() | digests, st.booleans(), st.none() | digests, st.booleans())
def test_conflicts_come_back(said: bytes | None, is_doubtful: bool, meaning: bytes | None, is_contested: bool) -> None:
    """Nothing known and an empty digest are two things."""
    state, again = ChainState({}, said, is_doubtful, meaning, is_contested), ChainState()
    if (row := state.row()) is not None:
        again.recall(parse(dump(row)))
        assert again == dataclasses.replace(state, has_row=True)
    else:
        assert said is None and not (is_doubtful or is_contested)


ARGUMENTS = {"a": (True, None, [1, (2.5, "x")]), "b": {"tuple": [1], "object": {}}, "c": []}


def test_a_record_comes_back_in_every_field() -> None:
    """Also messages outside the path, tuples among the arguments, images and token ids up to 32 bits."""
    path = TurnStore().extend(None, steps_of("ab"))
    carrier = Message("user", (TextBlock("carrier"), call("{}")))
    record = dataclasses.replace(
        samples.record_of(path, "r9", "s9"),
        messages=(path.path()[0].message, carrier, path.message),
        tools=(ToolSpec("t", "d", {"x": 1.0}, True),),
        tools_digest=b"\x00\xff",
        packed_ids=samples.pack_ids([0, 2**32 - 1, 10, 10]),
        starts=(0, 2),
        template_arguments=ARGUMENTS,
        fired=frozenset({"b", "a"}),
        images=(ImageSpan(1, 2, "digest"),),
        num_computed_tokens=3,
        tool_layout=ToolLayout((b"\x01\xfe",), (AddedTools(path.chain, (b"\x02", b"\x03")),)),
    )
    serial, again = record_of(record_body(7, record), path)
    assert serial == 7
    for field in dataclasses.fields(TurnRecord):
        assert getattr(again, field.name) == getattr(record, field.name), field.name
    assert repr(dict(again.template_arguments)) == repr(ARGUMENTS)
    assert again.messages[0] is path.path()[0].message


@pytest.mark.parametrize("body", [b"", b"{}", b"{}\n123", b"[]\n", b"\xff\n"])
def test_a_broken_record_is_refused(body: bytes) -> None:
    """Nothing half is taken."""
    path = TurnStore().extend(None, steps_of("ab"))
    with pytest.raises(ValueError, match=r"."):
        record_of(body, path)


def test_a_record_from_before_layouts_comes_back_without() -> None:
    """Files that were written by an earlier version stay whole."""
    path = TurnStore().extend(None, steps_of("ab"))
    body = record_body(7, samples.record_of(path))
    line, _, packed = body.partition(b"\n")
    row = {name: value for name, value in json.loads(line).items() if name != "tool_layout"}
    _, again = record_of(json.dumps(row).encode() + b"\n" + packed, path)
    assert again.tool_layout == ToolLayout()
