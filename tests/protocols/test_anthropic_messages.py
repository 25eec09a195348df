"""Requests of /v1/messages as a whole: every field, bodies of real clients, and whatever else a body may be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import (
    Principal,
    RequestId,
    ResponseFormat,
    SessionHint,
    ThinkingChoice,
    ToolChoice,
    ToolSpec,
    principal_digest,
)
from kvserve.errors import BadRequest, RequestError
from kvserve.protocols.anthropic_messages import parse_counted, parse_messages
from kvserve.protocols.error_bodies import encode_anthropic_error
from tests.protocols.anthropic_wire import parse
from tests.protocols.conftest import DEFAULTS
from tests.protocols.test_robustness import JSON, paths, replaced

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"
CLIENTS = ("claude-code-2.1.119", "claude-code-2.1.330", "pi-0.87-anthropic")
TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
SPEC = ToolSpec("look", "looks", {"type": "object", "properties": {}})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_a_whole_request_becomes_a_turn() -> None:
    """Limits, sampling, stop sequences, tools and form arrive together."""
    request = parse(
        model="claude-x",
        max_tokens=32_000,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        stop_sequences=["a", "b", "a"],
        stream=True,
        tools=[{**TOOL, "type": "custom", "defer_loading": False, "eager_input_streaming": True}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "somebody"},
        betas=["x"],
    )
    turn = request.turn
    assert (request.stream, request.shows_thinking) == (True, True)
    assert (turn.protocol, turn.model, turn.max_tokens) == ("anthropic_messages", "claude-x", 32_000)
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (0.5, 0.25, 3)
    assert turn.stop_strings == ("a", "b")
    assert turn.tools == (SPEC,)
    assert turn.response_format == ResponseFormat("json_schema", SCHEMA, strict=True)
    assert turn.session == SessionHint(principal=Principal(user=principal_digest("user", "somebody")))


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required"), True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, ToolChoice("function", "look"), False),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, is_parallel: bool) -> None:
    """Each form of the choice."""
    turn = parse(tools=[TOOL], tool_choice=choice).turn
    assert (turn.tool_choice, turn.parallel_tool_calls) == (expected, is_parallel)


@pytest.mark.parametrize(
    ("fields", "expected", "shows"),
    [
        ({}, ThinkingChoice(False), True),
        ({"thinking": None}, ThinkingChoice(False), True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ThinkingChoice(True, max_num_tokens=1024), True),
        ({"thinking": {"type": "between_tools"}}, ThinkingChoice(True), True),
        ({"thinking": {"type": "disabled"}}, ThinkingChoice(False), True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, ThinkingChoice(True), False),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, ThinkingChoice(True), True),
        ({"output_config": {"effort": "xhigh"}}, ThinkingChoice(False), True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, ThinkingChoice(True, "low"), True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, ThinkingChoice(False), True),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            ThinkingChoice(False, preserve=True),
            True,
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
            ThinkingChoice(False, preserve=True),
            True,
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}, {"type": "x"}]}},
            ThinkingChoice(False),
            True,
        ),
        ({"enable_thinking": False}, ThinkingChoice(False), True),
        ({"enable_thinking": True}, ThinkingChoice(True), True),
        ({"extra_body": {"reasoning_effort": "high"}}, ThinkingChoice(True, "high"), True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ThinkingChoice(True), True),
        ({"thinking": "off"}, ThinkingChoice(False), True),
    ],
)
def test_thinking(fields: dict[str, Any], expected: ThinkingChoice, shows: bool) -> None:
    """Anthropic's object, the effort beside it, and the spellings of the other protocols."""
    request = parse(**fields)
    assert (request.turn.thinking, request.shows_thinking) == (expected, shows)


def _user(said: object = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": said, **more}


def _effort(level: str) -> dict[str, Any]:
    return {"output_config": {"effort": level}}


SYSTEM: dict[str, Any] = {"role": "system", "content": "s"}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
RESULT = _user([{"type": "tool_result", "tool_use_id": "c", "content": "r"}, {"type": "text", "text": "reminder"}])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([_user(**_effort("low"))], "low"),
        ([_user(), {**SYSTEM, **_effort("low")}], "low"),
        ([_user(), {"role": "system", **_effort("low")}], "low"),
        ([_user(**_effort("max")), {**SYSTEM, **_effort("low")}], "low"),
        ([_user(), {**SYSTEM, **_effort("low")}, CALLED, RESULT, SYSTEM], "low"),
        ([_user(), {**SYSTEM, **_effort("low")}, CALLED, RESULT, {**SYSTEM, **_effort("max")}], "max"),
        ([_user(), {**SYSTEM, **_effort("low")}, {"role": "assistant", "content": "a"}, _user()], "medium"),
        ([_user(), {**SYSTEM, "output_config": {}}], "medium"),
        ([_user(), {**SYSTEM, "output_config": None}], "medium"),
    ],
)
def test_a_messages_effort_holds_for_its_turn(messages: list[Any], expected: str) -> None:
    """In the newest turn it counts before the request's, also through a loop of tools; those of old turns are over."""
    turn = parse(messages=messages, thinking={"type": "adaptive"}, output_config={"effort": "medium"}).turn
    assert turn.thinking == ThinkingChoice(True, expected)


def test_a_system_message_that_only_sets_the_effort_says_nothing() -> None:
    """It is no message of the prompt; one without content and effort is an error, and so is a conversation of none."""
    turn = parse(messages=[_user(), {"role": "system", **_effort("low")}]).turn
    assert [message.role for message in turn.messages] == ["user"]
    for messages in (
        [_user(), {"role": "system"}],
        [_user(), {"role": "system", "output_config": {}}],
        [_user(), {**SYSTEM, **_effort("huge")}],
        [{"role": "system", **_effort("low")}],
    ):
        with pytest.raises(BadRequest, match="messages"):
            parse(messages=messages)


SESSION = "1cb3ea4d-976d-4eea-8348-b2146025f9ef"


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})}}, {}, SESSION),
        ({"metadata": {"user_id": f"user_0f_account__session_{SESSION}"}}, {}, SESSION),
        ({"metadata": {"user_id": "somebody"}}, {}, None),
        ({"metadata": {"user_id": "[" * 50_000}}, {}, None),
        ({"metadata": {"user_id": '{"session_id": 5}'}}, {}, None),
        ({"metadata": {"user_id": r'{"session_id": "\ud83d!"}'}}, {}, "\N{REPLACEMENT CHARACTER}!"),  # half an emoji
        ({}, {"x-claude-code-session-id": SESSION}, SESSION),
        ({"session_id": "mine", "metadata": {"user_id": f"u_session_{SESSION}"}}, {}, "mine"),
    ],
)
def test_sessions(fields: dict[str, Any], headers: dict[str, str], expected: str | None) -> None:
    """Claude Code writes its session into the user id; a mere user is no session."""
    assert parse(headers, **fields).turn.session.session_id == expected


MISTYPED: dict[str, list[Any]] = {
    "max_tokens": [None, 0, -1, 1.5, "10", True, [], {}, 10**30],
    "model": [1, [], {}, True],
    "messages": [None, [], "hello", 5, {}, [5], ["hi"], [None], [[]]],
    "system": [5, {}, [5], ["x"], [{"type": "image"}], True],
    "stream": ["yes", 1, []],
    "temperature": [-0.1, 2.1, "hot", True, []],
    "top_p": [-0.1, 1.1, "x"],
    "top_k": [-2, 1.5, "x"],
    "stop_sequences": [5, {}, True, [5], [None], ["x"] * 17],
    "metadata": ["x", 5, [], {"user_id": 5}],
    "tools": [5, "x", {}, [5], [{}], [{"name": "f"}], [{**TOOL, "name": "a b"}], [{**TOOL, "input_schema": []}]]
    + [[{**TOOL, "type": kind}] for kind in ("bash_20250124", "web_search_sometimes", 5)]
    + [[{**TOOL, "defer_loading": "later"}]],
    "tool_choice": ["auto", 5, [], {}, {"type": "sometimes"}, {"type": "any"}, {"type": "tool", "name": "no"}],
    "tool_choice.disable_parallel_tool_use": [{"type": "auto", "disable_parallel_tool_use": "yes"}],
    "thinking": ["perhaps", 5, [], {"type": "perhaps"}, {"type": "enabled", "budget_tokens": "x"}],
    "thinking.display": [{"type": "enabled", "display": 5}],
    "output_config": [5, "x", [], {"effort": "huge"}, {"format": "json"}, {"format": {"type": "xml"}}],
    "output_config.format": [{"format": {"type": "json_schema"}}],
    "context_management": [5, "x", [], {"edits": 5}, {"edits": [5]}],
    "cache_control": [5, "x", {}, {"type": "forever"}, {"type": "ephemeral", "ttl": "soon"}],
    "mcp_servers": [5, [{"type": "url"}]],
    "container": ["c", {}],
    "thread": [{"type": "continue", "previous_message_id": "msg_1"}, {"type": "create"}, 5],
    "service_tier": [5],
    "betas": ["x", [5]],
}


@pytest.mark.parametrize("field", MISTYPED)
def test_a_field_of_the_wrong_type_is_named(field: str) -> None:
    """The error says which one."""
    for value in MISTYPED[field]:
        with pytest.raises(BadRequest) as caught:
            parse_messages({**_plain(), field.partition(".")[0]: value}, {}, DEFAULTS, RequestId("r"))
        assert str(caught.value.param).startswith(field), (value, caught.value)


def _plain() -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def test_what_is_only_counted_needs_no_limit() -> None:
    """The same turn but for the limit of the answer."""
    body = {**_plain(), "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = parse_counted({key: body[key] for key in body if key != "max_tokens"}, {}, DEFAULTS, RequestId("r"))
    asked = parse_messages(body, {}, DEFAULTS, RequestId("r")).turn
    assert (counted.max_tokens, asked.max_tokens) == (None, 5)
    assert (counted.messages, counted.tools, counted.thinking) == (asked.messages, asked.tools, asked.thinking)


def _recorded() -> list[Path]:
    return [file for client in CLIENTS for file in sorted((RECORDINGS / client).glob("*.json"))]


def test_recorded_bodies_parse() -> None:
    """Every request that real clients sent: its session, its marks, and a message for each result."""
    if not _recorded():
        pytest.skip(f"needs the recordings in {RECORDINGS}")
    for file in _recorded():
        record = json.loads(file.read_text("utf-8"))
        headers = {name.lower(): value for name, value in record["headers"]}
        request = parse_messages(record["body"], headers, DEFAULTS, RequestId("r"))
        turn = request.turn
        results = [
            block
            for message in record["body"]["messages"]
            for block in message["content"]
            if isinstance(block, dict) and block["type"] == "tool_result"
        ]
        assert [message.role for message in turn.messages].count("tool") == len(results)
        assert turn.session.marked_seconds == 300 and turn.session.num_marked_messages == len(turn.messages)
        assert (turn.session.session_id is None) == file.parent.name.startswith("pi")
        assert turn.thinking.enabled and request.stream
        assert request.shows_thinking == (file.parent.name != "claude-code-2.1.330")


VALID: dict[str, object] = {
    **_plain(),
    "model": "m",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "u"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s",
                    "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e"}],
                },
                {"type": "compaction", "content": "c"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "document", "title": "t", "source": {"type": "base64", "media_type": "m", "data": "JVBERi0="}},
                {"type": "hologram", "text": "x"},
            ],
        },
        {"role": "system", "output_config": {"effort": "low"}},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "look"},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "extra_body": {"ttl": "5m", "speculation": False},
}


@given(st.data())
def test_any_body_is_a_request_or_a_request_error(data: st.DataObject) -> None:
    """Any value at any place of a good body: never another exception, and the error has a body."""
    place = data.draw(st.sampled_from(list(paths(VALID))))
    body = replaced(VALID, place, data.draw(JSON))
    try:
        parse_messages(body, {}, DEFAULTS, RequestId("r"))
    except RequestError as error:
        assert json.dumps(encode_anthropic_error(error))


def test_the_valid_body_is_valid() -> None:
    """Else the test above would show nothing."""
    turn = parse_messages(VALID, {}, DEFAULTS, RequestId("r")).turn
    assert turn.session.ttl_seconds == 300.0 and not turn.may_draft


@pytest.mark.parametrize(
    ("described", "head"), [({"description": "looks"}, "looks\n\nExamples of input:\n"), ({}, "Examples of input:\n")]
)
def test_examples_of_input_are_behind_the_description(described: dict[str, str], head: str) -> None:
    """No chat template has a place for them: the model reads them with the tool, one a line."""
    tool = {"name": "look", "input_schema": SCHEMA, **described}
    [spec] = parse(tools=[{**tool, "input_examples": [{"a": "größe"}, {"a": "b"}]}]).turn.tools
    assert spec.description == head + '{"a": "größe"}\n{"a": "b"}'
    assert parse(tools=[{**tool, "input_examples": []}]).turn.tools[0].description == described.get("description")


@pytest.mark.parametrize("examples", [5, {"a": 1}, ["a"], [[{}]]])
def test_examples_that_are_no_objects_are_refused(examples: object) -> None:
    """The error names the field."""
    with pytest.raises(BadRequest) as caught:
        parse(tools=[{**TOOL, "input_examples": examples}])
    assert (caught.value.param or "").startswith("tools[0].input_examples")
