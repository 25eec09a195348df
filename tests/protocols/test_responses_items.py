"""Items become messages: the same that `/v1/chat/completions` makes of the same conversation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import ImageBlock, Message, RequestId, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import parse_chat
from kvserve.protocols.responses_items import answer_of_item, item_id, read_items
from kvserve.protocols.sealed_thinking import seal_reasoning, unseal_reasoning
from tests.protocols.conftest import DEFAULTS
from tests.protocols.responses_wire import ID, as_responses, parse

SHARED = Path(__file__).resolve().parents[3] / "shared"
OTHER = "req" + "f" * 24


def text(said: str) -> dict[str, Any]:
    """An assistant's message without an id."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}


def thought(said: str) -> dict[str, Any]:
    """A reasoning item without an id."""
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": said}]}


def call(call_id: str) -> dict[str, Any]:
    """A call without an id."""
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def result(call_id: str, output: object = "r") -> dict[str, Any]:
    """What a call returned."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def user(said: str) -> dict[str, Any]:
    """A user's message as short as it may be."""
    return {"role": "user", "content": said}


def shape(items: Sequence[object]) -> list[str]:
    """The messages as words: role, then the kind of each block."""
    kinds = {TextBlock: "text", ThinkingBlock: "thought", ToolCallBlock: "call", ToolResultBlock: "result"}
    return [
        " ".join((message.role, *(kinds[type(block)] for block in message.blocks))) for message in read_items(items, "")
    ]  # type: ignore[index]


GROUPS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "an answer is one message": (
        [user("a"), thought("t"), text("x"), call("1"), call("2"), result("1"), result("2")],
        ["user text", "assistant thought text call call", "tool result", "tool result"],
    ),
    "results end an answer": (
        [thought("t"), call("1"), result("1"), thought("u"), call("2"), result("2"), text("x")],
        ["assistant thought call", "tool result", "assistant thought call", "tool result", "assistant text"],
    ),
    "two texts are two answers": ([text("a"), text("b")], ["assistant text", "assistant text"]),
    "thinking after text begins an answer": (
        [thought("t"), text("a"), thought("u"), text("b")],
        ["assistant thought text", "assistant thought text"],
    ),
    "what follows a call belongs to it": (
        [text("a"), call("1"), text("b"), thought("c"), call("2")],
        ["assistant text call text thought call"],
    ),
    "an aborted answer is only its thinking": ([thought("t"), user("a")], ["assistant thought", "user text"]),
    "thoughts that cannot be read are nobody's message": (
        [user("a"), {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}, user("b")],
        ["user text", "user text"],
    ),
    "an empty text is an empty message": ([text(""), user("a")], ["assistant", "user text"]),
    "ids of one answer hold it together": (
        [{**part, "id": item_id("msg", ID, place)} for place, part in enumerate((text("a"), thought("t"), text("b")))],
        ["assistant text thought text"],
    ),
    "ids of two answers keep them apart": (
        [{**thought("t"), "id": item_id("rs", ID, 0)}, {**call("1"), "id": f"fc_{OTHER}_0"}],
        ["assistant thought", "assistant call"],
    ),
    "ids of another server say nothing": (
        [{**thought("t"), "id": "rs_1"}, {**text("a"), "id": "msg_1"}, {**text("b"), "id": "msg_2"}],
        ["assistant thought text", "assistant text"],
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_items_are_grouped_into_messages(name: str) -> None:
    """Which items are one message, in each case that occurs."""
    items, expected = GROUPS[name]
    assert shape(items) == expected


def test_roles_and_parts() -> None:
    """Developer is system; texts and images of a message stay in order; a message needs no type."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    said = {"type": "input_text", "text": "look"}
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [said, image, {"type": "input_text", "text": ""}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "message", "role": "system", "content": "s", "id": None, "status": None, "phase": "commentary"},
    ]
    assert read_items(items, "input") == (
        Message("system", (TextBlock("rules"),)),
        Message("user", (TextBlock("look"), ImageBlock("data:image/png;base64,AA"))),
        Message("assistant", (TextBlock("no"),)),
        Message("system", (TextBlock("s"),)),
    )


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_results_are_text_or_parts(kind: str) -> None:
    """A string, an empty one, and parts with an image."""
    image = {"type": "input_image", "image_url": "data:x"}
    outputs: list[object] = ["r", "", [{"type": "input_text", "text": "r"}, image]]
    read = read_items([{"type": kind, "call_id": "c", "output": output} for output in outputs], "input")
    blocks: list[Any] = [message.blocks[0] for message in read]
    assert [block.call_id for block in blocks] == ["c"] * 3
    assert [block.blocks for block in blocks] == [
        (TextBlock("r"),),
        (),
        (TextBlock("r"), ImageBlock("data:x")),
    ]


def test_calls_of_namespaces_and_custom_tools_have_the_models_names_and_arguments() -> None:
    """The namespace stands before the name, a custom tool's input is its one argument."""
    items = [
        {"type": "function_call", "call_id": "1", "name": "stop", "namespace": "agents", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": '*** "é"\n'},
    ]
    [message] = read_items(items, "input")
    first, second = message.blocks
    assert first == ToolCallBlock("1", "agents__stop", '{"a": 1}')
    assert isinstance(second, ToolCallBlock) and second.name == "apply_patch"
    assert json.loads(second.arguments) == {"input": '*** "é"\n'}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": [{"type": "reasoning_text", "text": "whole"}], "summary": [{"text": "s"}]}, "whole"),
        ({"content": [], "summary": [{"text": "s"}], "encrypted_content": seal_reasoning("sealed")}, "sealed"),
        ({"content": None, "summary": [{"text": "one"}, {"text": "two"}]}, "one\n\ntwo"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "of another server"}, "s"),
    ],
)
def test_thoughts_are_taken_from_where_they_are_whole(fields: dict[str, object], expected: str) -> None:
    """The text itself, else what we sealed, else the summary."""
    [message] = read_items([{"type": "reasoning", "id": "rs_1", **fields}], "input")
    assert message.blocks == (ThinkingBlock(expected),)


@pytest.mark.parametrize("said", ["", "x", "日本 \ud800 \n" * 1000])
def test_sealed_thoughts_come_back(said: str) -> None:
    """Any text; and what is no seal of ours, or a broken one, says nothing."""
    sealed = seal_reasoning(said)
    assert sealed.isascii() and unseal_reasoning(sealed) == said
    assert unseal_reasoning(sealed[:12]) == ""
    for foreign in ("", "gAAAA", "kvserve1.", "kvserve1.é", "kvserve1.eJx!", "kvserve1.AAAA"):
        assert unseal_reasoning(foreign) == ""


def test_ids_name_their_answer() -> None:
    """Only ids of items that we wrote."""
    assert answer_of_item(item_id("msg", ID, 12)) == RequestId(ID)
    for other in ("msg_1", f"in_{ID}_0", f"resp_{ID}", "", f"msg_{ID}_x"):
        assert answer_of_item(other) is None


MISTAKES: list[tuple[object, str]] = [
    (5, "input[0]"),
    ({}, "input[0].type"),
    ({"type": "file"}, "input[0].type"),
    ({"type": "local_shell_call", "id": "ls_1", "action": {}}, "input[0].call_id"),
    ({"type": "shell_call_output", "output": []}, "input[0].call_id"),
    ({"type": 5}, "input[0].type"),
    ({"role": "tool", "content": "x"}, "input[0].role"),
    ({"role": "user", "content": 5}, "input[0].content"),
    ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].file_data"),
    ({"type": "function_call_output", "call_id": "1", "output": [{"type": "file"}]}, "input[0].output[0].file"),
    ({"role": "user", "content": [{"type": "input_image", "file_id": 5}]}, "input[0].content[0].file_id"),
    ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
    ({"type": "function_call", "name": "f"}, "input[0].call_id"),
    ({"type": "function_call", "call_id": "1"}, "input[0].name"),
    ({"type": "function_call", "call_id": "1", "name": "f", "arguments": 5}, "input[0].arguments"),
    ({"type": "function_call_output", "call_id": "1"}, "input[0].output"),
    ({"type": "function_call_output", "call_id": "1", "output": 5}, "input[0].output"),
    ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
    ({"type": "custom_tool_call", "call_id": "1", "name": "f"}, "input[0].input"),
    ({"type": "reasoning", "content": "x"}, "input[0].content"),
    ({"type": "reasoning", "summary": ["x"]}, "input[0].summary[0]"),
    ({"type": "reasoning", "encrypted_content": 5}, "input[0].encrypted_content"),
]


@pytest.mark.parametrize(("item", "param"), MISTAKES)
def test_a_broken_item_is_named(item: object, param: str) -> None:
    """The error says where."""
    with pytest.raises(BadRequest) as caught:
        read_items([item], "input")
    assert caught.value.param == param


# --- the same conversation in both protocols -------------------------------------------------------------------------


def corpus() -> list[Any]:
    """The last request of every conversation with text only, and of the recorded chat sessions."""
    bodies = []
    for file in sorted((SHARED / "corpus").glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines()[:8]:
            record = json.loads(line)
            messages = [record["pool"][number] for number in record["requests"][-1]["messages"]]
            bodies.append(pytest.param({"messages": messages, "tools": record.get("tools") or []}, id=record["id"]))
    for folder in ("pi-0.87-qwen", "openclaw-2026.9.6", "opencode"):
        for path in sorted((SHARED / "recordings" / folder).glob("*.json"))[-1:]:
            bodies.append(pytest.param(json.loads(path.read_text("utf-8"))["body"], id=folder))
    return bodies


@pytest.mark.parametrize("body", corpus())
def test_chat_and_responses_read_the_same_conversation_alike(body: dict[str, Any]) -> None:
    """Messages, tools and everything else of the turn are equal, so the model sees the same tokens."""
    nameless = [{**message, "name": None} for message in body["messages"]]  # items have no names
    chat = parse_chat({**body, "messages": nameless}, {}, DEFAULTS, ID).turn
    responses = parse(**as_responses(body)).turn
    assert responses.messages == chat.messages
    assert responses.tools == chat.tools
    fields = [name for name in chat.__dataclass_fields__ if name not in ("protocol", "messages", "tools", "keeping")]
    assert [getattr(responses, name) for name in fields] == [getattr(chat, name) for name in fields]
