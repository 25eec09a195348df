"""Whatever a body is, parsing ends in a request or in a request error; and real clients' bodies parse."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import JsonObject, RequestDefaults, RequestId, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.errors import BadRequest, RequestError
from kvserve.protocols.error_bodies import encode_openai_error
from kvserve.protocols.fields import decode_body
from kvserve.protocols.openai_chat import ChatRequest, parse_chat
from kvserve.protocols.openai_completions import parse_completion
from kvserve.protocols.openai_messages import read_message
from tests.laws import num_examples

DATA = Path(__file__).parent / "data"
RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"

VALID: dict[str, object] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {
            "role": "user",
            "content": [
                {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
                {"type": "file", "file": {"file_id": "f", "filename": "n"}},
                {"type": "video_url", "video_url": {"url": "u"}},
            ],
        },
    ],
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
            },
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"anyOf": [{"type": "object"}]}}},
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
    "thinking": {"type": "enabled"},
    "reasoning": {"effort": "low"},
    "chat_template_kwargs": {"preserve_thinking": True},
    "metadata": {"session_id": "s"},
    "extra_body": {"ttl": "5m", "speculation": False, "metadata": {"chat_id": 5}, "temperature": 1, "seed": 3},
    "prompt": "x",
}
NAMES = st.sampled_from([*VALID, "n", "logprobs", "functions", "function_call", "cache_mode", "ttl", "type", "role"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**4000) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from paths(child, (*path, key))


def replaced(body: dict[str, object], path: tuple[str | int, ...], value: object) -> dict[str, object]:
    """`body` with another value under `path`."""
    changed = copy.deepcopy(body)
    place: object = changed
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return changed


def check(body: JsonObject, defaults: RequestDefaults) -> None:
    """Both parsers give a request or a request error whose body is JSON."""
    for parse in (parse_chat, parse_completion):
        try:
            parse(body, {}, defaults, RequestId("r"))
        except RequestError as error:
            assert isinstance(error, BadRequest)
            assert json.dumps(encode_openai_error(error), allow_nan=False)


def test_the_body_that_is_mutated_is_valid(defaults: RequestDefaults) -> None:
    """Otherwise the mutations would prove nothing."""
    parse_chat(VALID, {}, defaults, RequestId("r"))
    parse_completion(VALID, {}, defaults, RequestId("r"))


@given(path=st.sampled_from(list(paths(VALID))), value=JSON)
@settings(max_examples=num_examples(60))
def test_any_mutation_of_a_valid_body_is_answered(
    path: tuple[str | int, ...], value: object, defaults: RequestDefaults
) -> None:
    """One field of any depth replaced by any JSON value."""
    check(replaced(VALID, path, value), defaults)


@given(body=st.dictionaries(NAMES | st.text(max_size=4), JSON, max_size=6))
@settings(max_examples=num_examples(60))
def test_any_object_is_answered(body: dict[str, object], defaults: RequestDefaults) -> None:
    """Objects of known and unknown names with any values."""
    check(body, defaults)


@given(value=JSON)
@settings(max_examples=num_examples(60))
def test_any_json_is_answered(value: object, defaults: RequestDefaults) -> None:
    """Any JSON text as the body, NaN literals included."""
    try:
        body = decode_body(json.dumps(value).encode())
    except BadRequest:
        return
    check(body, defaults)


def parse_recorded(record: dict[str, object], defaults: RequestDefaults) -> ChatRequest:
    """Decodes and parses a recorded body as it would arrive."""
    headers = dict(record["headers"])  # type: ignore[call-overload]
    body = decode_body(json.dumps(record["body"]).encode())
    return parse_chat(body, {name.lower(): value for name, value in headers.items()}, defaults, RequestId("r"))


def load(name: str, defaults: RequestDefaults) -> ChatRequest:
    """A recorded request of tests/protocols/data."""
    return parse_recorded(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")), defaults)


def test_a_recorded_tool_loop_parses(defaults: RequestDefaults) -> None:
    """PI's session with thinking, parallel tools and an aborted turn keeps every block."""
    request = load("pi_tool_loop", defaults)
    turn = request.turn
    assert (request.stream, request.include_usage, turn.max_tokens, len(turn.tools)) == (True, True, 8192, 4)
    assert (turn.thinking.enabled, turn.thinking.preserve) == (True, True)
    calls = [block for message in turn.messages for block in message.blocks if isinstance(block, ToolCallBlock)]
    results = [block for message in turn.messages for block in message.blocks if isinstance(block, ToolResultBlock)]
    assert [call.call_id for call in calls] == [result.call_id for result in results]
    assert json.loads(calls[0].arguments)["command"].endswith('echo "turn 1 é 日本"')
    assert [message.role for message in turn.messages[-2:]] == ["user", "user"]


def test_a_recorded_developer_message_parses(defaults: RequestDefaults) -> None:
    """PI against a plain reasoning model: developer role and `reasoning_effort`."""
    turn = load("pi_developer_role", defaults).turn
    assert turn.messages[0].role == "system"
    assert (turn.thinking.enabled, turn.thinking.effort, turn.max_tokens) == (True, "medium", 16384)


def test_a_recorded_title_request_parses(defaults: RequestDefaults) -> None:
    """opencode's side request: no tools, the session in headers."""
    turn = load("opencode_title", defaults).turn
    assert turn.tools == ()
    assert turn.session.session_id == "ses_e05473b9affeRfi6OaaTyRYnYY"
    assert isinstance(turn.messages[-1].blocks[0], TextBlock)


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not beside the repository")
def test_all_recordings_parse(defaults: RequestDefaults) -> None:
    """Every recorded chat request of every client parses, with as many messages as were sent."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RECORDINGS.glob("*/*.json"))]
    chats = [record for record in records if record["path"] == "/v1/chat/completions"]
    assert chats
    for record in chats:
        assert len(parse_recorded(record, defaults).turn.messages) == len(record["body"]["messages"])


CLAIMS = {"is_ours": True, "kind": "ours", "author": "server", "citations": [], "text": "x", "refusal": "x"}


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_only_what_is_no_text_is_the_servers(kind: str) -> None:
    """Whatever a client writes into a text part, it is the client's; parts that the server puts into words are not."""
    unread = [
        {"type": "video_url", "video_url": {"url": "u"}},
        {"type": "input_audio"},
        {"type": "file", "file": {"file_data": "eA=="}},
    ]
    told = read_message({"role": "user", "content": [{**CLAIMS, "type": kind}, *unread]}, "m").blocks
    assert told[0] == TextBlock("x")
    assert [block.is_ours for block in told if isinstance(block, TextBlock)] == [False, True, True, True]
