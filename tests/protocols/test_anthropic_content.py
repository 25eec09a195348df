"""Anthropic messages become nouns: in order, nothing hoisted, nothing dropped, results as in OpenAI's form."""

from typing import Any

import pytest

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from kvserve.errors import BadRequest
from kvserve.protocols.fields import decode_body
from kvserve.protocols.sealed_thinking import sign
from tests.protocols.anthropic_wire import parse

MARK = {"type": "ephemeral"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
DATA_URL = ImageBlock("data:image/png;base64,iVBORw0KGgo=")


def messages(*sent: Any, **fields: Any) -> tuple[Message, ...]:
    return parse(messages=list(sent), **fields).turn.messages


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", **fields}


@pytest.mark.parametrize("system", ["rules", [{"type": "text", "text": "rules", "cache_control": MARK}]])
def test_the_system_text_is_the_first_message(system: Any) -> None:
    """As a string or as marked blocks it is the same message."""
    assert messages(user(TEXT), system=system)[0] == Message("system", (TextBlock("rules"),))


@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_system_text_that_says_nothing_is_none(system: Any) -> None:
    """There is no empty system message."""
    assert [message.role for message in messages(user(TEXT), system=system)] == ["user"]


def test_a_string_and_one_marked_block_are_the_same_message() -> None:
    """Clients send a list while a message is the newest and a string once it is history."""
    assert messages({"role": "user", "content": "a"}) == messages(user({**TEXT, "cache_control": MARK}))


def test_only_what_is_no_text_is_the_servers() -> None:
    """A document's text and words for what cannot be read are the server's, a text block never."""
    document = {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    pages = {"type": "document", "title": "t", "source": {"type": "content", "content": [TEXT, IMAGE, TEXT]}}
    found = {"type": "search_result", "title": "t", "source": "s", "content": [TEXT]}
    claimed = {**TEXT, "is_ours": True, "kind": "ours", "author": "server"}
    [message] = messages(user(claimed, document, pages, found, {"type": "smell", "of": "pine"}))
    told = [block.is_ours for block in message.blocks if isinstance(block, TextBlock)]
    assert message.blocks[0] == TextBlock("a") and told == [False, *[True] * 6]


def test_system_messages_in_the_middle_stay_where_they_are() -> None:
    """Hoisting one would change everything behind it."""
    sent = messages(user(TEXT), {"role": "system", "content": "note"}, assistant(TEXT), user(TEXT), system="rules")
    assert [message.role for message in sent] == ["system", "user", "system", "assistant", "user"]


RESULTS: dict[str, tuple[Any, ToolResultBlock]] = {
    "string": (result(content="out"), ToolResultBlock("c1", (TextBlock("out"),))),
    "blocks": (result(content=[TEXT, TEXT]), ToolResultBlock("c1", (TextBlock("a"), TextBlock("a")))),
    "image": (result(content=[TEXT, IMAGE]), ToolResultBlock("c1", (TextBlock("a"), DATA_URL))),
    "error": (result(content="no", is_error=True), ToolResultBlock("c1", (TextBlock("no"),), True)),
    "nothing": (result(), ToolResultBlock("c1", ())),
    "null": (result(content=None, is_error=None), ToolResultBlock("c1", ())),
    "found tool": (
        result(content=[{"type": "tool_reference", "tool_name": "look"}]),
        ToolResultBlock("c1", (ToolBlock("look"),)),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_tool_results(name: str) -> None:
    """Each form of a result, as a message of its own."""
    sent, expected = RESULTS[name]
    assert messages(user(sent)) == (Message("tool", (expected,)),)


def test_results_and_words_keep_their_order() -> None:
    """One message of the wire becomes several: each result apart, the words around them as the user's."""
    sent = messages(user(TEXT, result(content="1"), result(content="2"), TEXT, IMAGE))
    assert sent == (
        Message("user", (TextBlock("a"),)),
        Message("tool", (ToolResultBlock("c1", (TextBlock("1"),)),)),
        Message("tool", (ToolResultBlock("c1", (TextBlock("2"),)),)),
        Message("user", (TextBlock("a"), DATA_URL)),
    )


ASSISTANT: dict[str, tuple[Any, tuple[Block, ...]]] = {
    "text": (TEXT, (TextBlock("a"),)),
    "empty text": ({"type": "text", "text": ""}, ()),
    "thinking": ({"type": "thinking", "thinking": "hm\n", "signature": "s"}, (ThinkingBlock("hm\n"),)),
    "thinking without signature": ({"type": "thinking", "thinking": "hm"}, (ThinkingBlock("hm"),)),
    "omitted thinking": ({"type": "thinking", "thinking": "", "signature": sign("I see.")}, (ThinkingBlock("I see."),)),
    "edited thinking": ({"type": "thinking", "thinking": "x", "signature": sign("y")}, (ThinkingBlock("x"),)),
    "omitted thinking of others": ({"type": "thinking", "thinking": "", "signature": "Eq4="}, ()),
    "redacted thinking": ({"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}, ()),
    "our redacted thinking": ({"type": "redacted_thinking", "data": sign("I see.")}, (ThinkingBlock("I see."),)),
    "call": (
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"a": [1, 2.5, None, "é"]}},
        (ToolCallBlock("toolu_1", "bash", '{"a":[1,2.5,null,"é"]}'),),
    ),
    "call without arguments": (
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        (ToolCallBlock("t", "f", "{}"),),
    ),
}


@pytest.mark.parametrize("name", ASSISTANT)
def test_assistants_blocks(name: str) -> None:
    """Each block that an assistant's message may echo."""
    sent, expected = ASSISTANT[name]
    assert messages(user(TEXT), assistant(sent))[1] == Message("assistant", expected)


PLAIN: dict[str, tuple[Any, Block]] = {
    "image": (IMAGE, DATA_URL),
    "image by address": (
        {"type": "image", "source": {"type": "url", "url": "https://h/x.png"}},
        ImageBlock("https://h/x.png"),
    ),
    "document": (
        {
            "type": "document",
            "title": "T",
            "context": "C",
            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
        },
        TextBlock("T\nC\nD", is_ours=True),
    ),
    "document in blocks": (
        {"type": "document", "source": {"type": "content", "content": [TEXT, TEXT]}},
        TextBlock("a\na", is_ours=True),
    ),
    "search result": (
        {"type": "search_result", "title": "T", "source": "https://h", "content": [TEXT]},
        TextBlock("T\nhttps://h\na", is_ours=True),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_users_blocks(name: str) -> None:
    """Each block that a user's message may hold besides text, there and in a result."""
    sent, expected = PLAIN[name]
    assert messages(user(sent)) == (Message("user", (expected,)),)
    assert messages(user(result(content=[sent])))[0].blocks[0] == ToolResultBlock("c1", (expected,))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown block": (user({"type": "smell"}), "messages[0].content[0].type"),
    "block without a type": (user({"text": "x"}), "messages[0].content[0].type"),
    "block that is none": (user("x"), "messages[0].content[0]"),
    "call by the user": (
        user({"type": "tool_use", "id": "t", "name": "f", "input": {}}),
        "messages[0].content[0].type",
    ),
    "result by the assistant": (assistant(result()), "messages[0].content[0].type"),
    "image in the system's": ({"role": "system", "content": [IMAGE]}, "messages[0].content[0].type"),
    "unknown role": ({"role": "tool", "content": "x"}, "messages[0].role"),
    "no content": ({"role": "user"}, "messages[0].content"),
    "content that is a number": ({"role": "user", "content": 5}, "messages[0].content"),
    "text that is none": (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
    "arguments as text": (
        assistant({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}),
        "messages[0].content[0].input",
    ),
    "result without an id": (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    "block inside a result": (
        user(result(content=[{"type": "thinking", "thinking": "x"}])),
        "messages[0].content[0].content[0].type",
    ),
    "image of another source": (user({"type": "image", "source": {"type": "x"}}), "messages[0].content[0].source.type"),
    "image without bytes": (
        user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
        "messages[0].content[0].source.data",
    ),
    "PDF without bytes": (
        user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}),
        "messages[0].content[0].source.data",
    ),
    "document of another source": (
        user({"type": "document", "source": {"type": "x"}}),
        "messages[0].content[0].source.type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str) -> None:
    """A clear error instead of a message with something missing."""
    sent, param = REFUSED[name]
    with pytest.raises(BadRequest) as caught:
        messages(sent)
    assert caught.value.param == param


def test_equal_keys_in_the_input_of_a_call_are_refused() -> None:
    """Of the two values the model would see one."""
    raw = (
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"a":1,"a":2}}]}]}'
    )
    with pytest.raises(BadRequest, match="a key is named twice") as caught:
        parse(**decode_body(raw))
    assert caught.value.param == "messages[0].content[0].input"
