"""Messages as agents send them become ordered blocks; what is no message is refused by path."""

import pytest

from kvserve.core import Block, ImageBlock, Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, decode_body
from kvserve.protocols.openai_messages import read_message, read_messages

IMAGE = "data:image/png;base64,AAAA"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{ "a":1}'}}


def assistant(*blocks: Block) -> Message:
    """An assistant's message."""
    return Message("assistant", blocks)


GOOD: list[tuple[dict[str, object], Message]] = [
    ({"role": "user", "content": "hi"}, Message("user", (TextBlock("hi"),))),
    ({"role": "user", "content": "hi", "name": "ann"}, Message("user", (TextBlock("hi"),), "ann")),
    ({"role": "developer", "content": "be kind"}, Message("system", (TextBlock("be kind"),))),
    *(({"role": "user", **empty}, Message("user", ())) for empty in ({}, {"content": None}, {"content": ""})),
    *(
        ({"role": "assistant", "content": empty}, assistant())
        for empty in ([], [{"type": "text", "text": ""}])  # as empty as null
    ),
    (
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
                {"type": "input_image", "image_url": IMAGE},
                {"type": "input_text", "text": "b"},
            ],
        },
        Message("user", (TextBlock("a"), ImageBlock(IMAGE), ImageBlock(IMAGE), TextBlock("b"))),
    ),
    ({"role": "assistant", "content": "x", "tool_calls": None}, assistant(TextBlock("x"))),
    ({"role": "assistant", "refusal": "no"}, assistant(TextBlock("no"))),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, assistant(TextBlock("no"))),
    *(
        ({"role": "assistant", field: "hm", "content": "x"}, assistant(ThinkingBlock("hm"), TextBlock("x")))
        for field in ("reasoning_content", "reasoning", "reasoning_text")
    ),
    (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        assistant(ThinkingBlock("hm", "s")),
    ),
    (
        {"role": "assistant", "reasoning_content": "hm", "content": "x", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        assistant(
            ThinkingBlock("hm"),
            TextBlock("x"),
            ToolCallBlock("c1", "f", '{ "a":1}'),
            ToolCallBlock("c2", "f", '{ "a":1}'),
        ),
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1, 2]}}}]},
        assistant(ToolCallBlock("", "f", '{"é":[1,2]}')),
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        assistant(ToolCallBlock("c", "f", "{}")),
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "not json"}}]},
        assistant(ToolCallBlock("c", "f", "not json")),
    ),
    (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        assistant(ToolCallBlock("f", "f", "{}")),
    ),
    (
        {"role": "function", "name": "f", "content": "42"},
        Message("tool", (ToolResultBlock("f", (TextBlock("42"),)),), "f"),
    ),
    (
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        Message("tool", (ToolResultBlock("c1", (TextBlock("42"),)),)),
    ),
    ({"role": "tool", "content": None}, Message("tool", (ToolResultBlock("", ()),))),
]

BAD: list[tuple[object, str]] = [
    ("hi", "messages[0]"),
    (None, "messages[0]"),
    ({}, "messages[0].role"),
    ({"role": "wizard"}, "messages[0].role"),
    ({"role": 5}, "messages[0].role"),
    ({"role": ["user"]}, "messages[0].role"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
    ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "smell"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].image_url"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].image_url.url"),
    ({"role": "user", "content": [{"type": "input_image", "file_id": ""}]}, "messages[0].content[0].file_id"),
    ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0].content[0].type"),
    ({"role": "user", "name": 5}, "messages[0].name"),
    ({"role": "assistant", "reasoning_content": 5}, "messages[0].reasoning_content"),
    ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}, "messages[0].function_call"),
    ({"role": "tool", "tool_call_id": 5}, "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("wire", "message"), GOOD)
def test_a_message_becomes_ordered_blocks(wire: dict[str, object], message: Message) -> None:
    """Each form that agents send has one meaning."""
    assert read_message(wire, "m") == message


@pytest.mark.parametrize(("wire", "param"), BAD)
def test_a_broken_message_names_its_field(wire: object, param: str) -> None:
    """The error's param is the path to what is wrong."""
    with pytest.raises(BadRequest) as caught:
        read_messages(Fields({"messages": [wire]}))
    assert caught.value.param == param


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": []}, {"messages": {}}, {"messages": "hi"}])
def test_there_is_at_least_one_message(body: dict[str, object]) -> None:
    """Missing, empty and mistyped lists are refused."""
    with pytest.raises(BadRequest) as caught:
        read_messages(Fields(body))
    assert caught.value.param == "messages"


def test_order_and_number_of_messages_stay() -> None:
    """Nothing is hoisted, merged or dropped: system in the middle, two users in a row, a result without a call."""
    roles = ["user", "system", "user", "user", "tool", "developer", "assistant"]
    read = read_messages(Fields({"messages": [{"role": role, "content": role} for role in roles]}))
    assert [message.role for message in read] == ["user", "system", "user", "user", "tool", "system", "assistant"]


def test_equal_keys_in_arguments_that_are_an_object_are_refused() -> None:
    """As text they are written as they were sent; as an object one of the two values is lost already."""
    raw = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments": {"a":1,"a":2}}}]}'
    with pytest.raises(BadRequest, match="a key is named twice") as caught:
        read_message(decode_body(raw), "messages[0]")
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
