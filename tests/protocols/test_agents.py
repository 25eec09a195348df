"""Agents on the wire: what a new one is to be, how one is told, and what an answer says of it."""

from base64 import b64encode

import pytest

from kvserve.core import (
    Finished,
    ImageBlock,
    Message,
    RequestId,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    Usage,
)
from kvserve.core.agent_nouns import NewAgent
from kvserve.errors import BadRequest
from kvserve.protocols.agents import (
    AgentEncoder,
    AgentNote,
    encode_message,
    iso_time,
    parse_create,
)
from kvserve.protocols.openai_chat import ChatEncoder


def test_a_body_that_says_nothing_makes_a_plain_agent() -> None:
    """It persists, and everything else is the server's."""
    assert parse_create({}) == NewAgent()


@pytest.mark.parametrize("name", ["system_prompt", "system"])
def test_the_system_prompt_has_two_names_and_two_forms(name: str) -> None:
    """A string or text parts; empty is none; both names at once are an error."""
    assert parse_create({name: "Be brief."}).system_prompt == "Be brief."
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert parse_create({name: parts}).system_prompt == "Be brief."
    assert parse_create({name: ""}).system_prompt is parse_create({name: None}).system_prompt is None
    with pytest.raises(BadRequest, match="both given"):
        parse_create({"system_prompt": "a", "system": "a"})


def test_a_file_in_a_system_prompt_stands_on_lines_of_its_own() -> None:
    """As it does in a message: glued to the client's words it could not be told from them."""
    file = {"type": "file", "file": {"file_data": b64encode(b"one\ntwo").decode(), "filename": "notes.txt"}}
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}, file, {"type": "text", "text": "Go."}]
    assert parse_create({"system": parts}).system_prompt == "Be brief.\nnotes.txt\none\ntwo\nGo."


def test_times_are_iso_8601_in_utc() -> None:
    """To the millisecond, with a Z."""
    assert iso_time(0) == "1970-01-01T00:00:00.000Z"
    assert iso_time(1_795_291_200.5) == "2026-11-21T20:00:00.500Z"


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (Message("user", ()), {"role": "user", "content": ""}),
        (Message("user", (TextBlock("a"), TextBlock("b")), "Ann"), {"role": "user", "content": "ab", "name": "Ann"}),
        (
            Message("user", (TextBlock("see"), ImageBlock("data:x"))),
            {
                "role": "user",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
            },
        ),
        (
            Message("assistant", (ThinkingBlock("hm"), ToolCallBlock("c1", "look", '{"a": 1}'))),
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
            },
        ),
        (
            Message("tool", (ToolResultBlock("c1", (TextBlock("a cat"),)),)),
            {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
        ),
    ],
)
def test_a_history_is_told_as_chat_messages(message: Message, wire: dict[str, object]) -> None:
    """Each kind of block in its place."""
    assert encode_message(message) == wire


def test_only_the_chunk_that_ends_an_answer_tells_of_the_agent() -> None:
    """Not the role, not the usage behind it; the note is asked for when the turn is over."""
    note = AgentNote("one", 3, 1, 99, is_stored=True)
    encoder = AgentEncoder(ChatEncoder(RequestId("r"), "m", 0, include_usage=True), lambda: note)
    finish, usage = encoder.encode(Finished("stop", Usage(1, 0, 1)))
    assert finish["agent"] == {
        "agent_id": "one",
        "num_turns": 3,
        "num_dropped_turns": 1,
        "context_tokens": 99,
        "stored": True,
    }
    assert not any("agent" in chunk for chunk in (usage, encoder.role_chunk(), encoder.keep_alive()))
