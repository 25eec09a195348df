"""The body of a prewarming in either API's form, and its answer."""

from typing import Any

import pytest

from kvserve.core import RequestDefaults, RequestId, SamplingParams
from kvserve.errors import BadRequest
from kvserve.protocols.prewarm import encode_prewarmed, parse_prewarm, speaks_anthropic

DEFAULTS = RequestDefaults(SamplingParams(), 128, True, None)
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Hello."}


def parsed(body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    return parse_prewarm(body, headers or {}, DEFAULTS, RequestId("test"))


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"messages": [USER]}, {}, False),
        ({"messages": [USER], "tools": [TOOL]}, {}, False),
        ({"messages": [USER], "tools": "none"}, {}, False),
        ({"messages": [USER]}, {"anthropic-version": "2023-06-01"}, True),
        ({"system": "You help."}, {}, True),
        ({"messages": [USER], "tools": [ANTHROPIC_TOOL]}, {}, True),
    ],
)
def test_the_form_is_told_by_what_only_one_has(body: dict[str, Any], headers: dict[str, str], expected: bool) -> None:
    """The header, the system prompt's place, the tools' fields."""
    assert speaks_anthropic(body, headers) is expected


def test_both_forms_are_one_turn() -> None:
    """The same system prompt and tools, and no message that nobody sent."""
    openai = parsed({"messages": [{"role": "system", "content": "You help."}], "tools": [TOOL]})
    anthropic = parsed({"system": "You help.", "tools": [ANTHROPIC_TOOL]})
    assert openai.messages == anthropic.messages
    assert [message.role for message in openai.messages] == ["system"]
    assert [tool.name for tool in openai.tools] == [tool.name for tool in anthropic.tools] == ["read"]


@pytest.mark.parametrize("messages", [None, []])
def test_there_need_be_no_message(messages: list[Any] | None) -> None:
    """Tools alone are a prefix, in both forms."""
    for tool in (TOOL, ANTHROPIC_TOOL):
        turn = parsed({"messages": messages, "tools": [tool]})
        assert (turn.messages, [each.name for each in turn.tools]) == ((), ["read"])


@pytest.mark.parametrize("body", [{"messages": [USER]}, {"system": "You help."}])
def test_what_is_not_to_be_kept_is_not_computed_ahead(body: dict[str, Any]) -> None:
    """A prewarming is for keeping: with `ttl: 0` it is refused, wherever that stands."""
    for asked in ({**body, "ttl": 0}, {**body, "metadata": {"ttl": "0s"}}):
        with pytest.raises(BadRequest) as caught:
            parsed(asked)
        assert caught.value.param == "ttl"
    assert parsed({**body, "ttl": 60}).messages


def test_messages_are_kept_as_they_came() -> None:
    """A conversation's beginning, with its first turns."""
    body = {"system": "You help.", "messages": [USER, {"role": "assistant", "content": "Hi."}]}
    assert [message.role for message in parsed(body).messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"system": 3}, "system"),
        ({"tools": 7}, "tools"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    """Nothing to compute, and fields of another type."""
    with pytest.raises(BadRequest) as caught:
        parsed(body)
    assert caught.value.param == param


def test_the_answer_says_what_was_done() -> None:
    """Dropped where there is a reason, else done."""
    counts: dict[str, Any] = {"num_tokens": 9, "num_cached_tokens": 4, "num_computed_tokens": 5, "seconds": 0.12345}
    done = encode_prewarmed("tiny", **counts, reason="")
    assert done == {
        "object": "cache.prewarm",
        "model": "tiny",
        "state": "done",
        "reason": None,
        "tokens": 9,
        "cached": 4,
        "computed": 5,
        "seconds": 0.1235,
    }
    dropped = encode_prewarmed("tiny", **counts, reason="cleared")
    assert (dropped["state"], dropped["reason"]) == ("dropped", "cleared")
