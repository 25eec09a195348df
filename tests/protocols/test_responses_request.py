"""Bodies of `/v1/responses` as a whole: fields, refusals, what is told again, robustness, recorded bodies."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import NOBODY, Message, RequestDefaults, SessionHint, TextBlock, ThinkingChoice, ToolResultBlock
from kvserve.errors import BadRequest, NotFound, RequestError
from kvserve.protocols.responses_request import parse_responses
from kvserve.protocols.responses_store import ResponseStore, StoredResponse
from kvserve.protocols.sampling_fields import NO_LIMIT
from tests.laws import num_examples
from tests.protocols.responses_wire import ID, parse
from tests.protocols.test_robustness import JSON, paths, replaced

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings" / "codex"


def test_a_whole_request_becomes_a_turn(defaults: RequestDefaults) -> None:
    """Instructions, input, limits, thinking and session arrive together."""
    body = {
        "model": "org/model",
        "instructions": "Be brief.",
        "input": "hi",
        "stream": True,
        "max_output_tokens": 99,
        "temperature": 0.5,
        "top_p": 0.25,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "k1",
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "field_of_tomorrow": {"x": [1]},
    }
    request = parse_responses(body, {"session-id": "header"}, defaults, ID, ResponseStore(None, print).of(NOBODY))
    turn = request.turn
    assert turn.messages == (Message("system", (TextBlock("Be brief."),)), Message("user", (TextBlock("hi"),)))
    assert (turn.protocol, turn.model, turn.max_tokens) == ("openai_responses", "org/model", 99)
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.parallel_tool_calls) == (0.5, 0.25, False)
    assert turn.thinking == ThinkingChoice(enabled=True, effort="low")
    assert turn.session == SessionHint(session_id="header")
    assert (request.stream, request.store, request.previous_response_id) == (True, True, None)
    assert (request.described.with_summary, request.described.seals_reasoning) == (True, True)
    assert request.described.echo["metadata"] == {"a": "b"}
    assert request.described.echo["instructions"] == "Be brief."


def test_what_a_request_leaves_out_is_told_as_it_holds(defaults: RequestDefaults) -> None:
    """The response says which values were in force."""
    echo = parse().described.echo
    assert (echo["temperature"], echo["top_p"]) == (defaults.sampling.temperature, defaults.sampling.top_p)
    assert (echo["tool_choice"], echo["parallel_tool_calls"], echo["store"]) == ("auto", True, True)
    assert (echo["truncation"], echo["text"]) == ("disabled", {"format": {"type": "text"}})


def test_every_item_of_a_request_is_kept_with_an_id() -> None:
    """Those that the client gave, and ours for the others."""
    given = [{"role": "user", "content": "a", "id": "mine"}, {"role": "user", "content": "b"}]
    first, second = parse(input=given).items
    assert first == given[0]
    assert second == {**given[1], "id": f"in_{ID}_1"}
    [text] = parse(input="hi").items
    assert text["content"] == [{"type": "input_text", "text": "hi"}]


REFUSED: list[tuple[str, object]] = [
    ("background", True),
    ("conversation", "conv_1"),
    ("prompt", {"id": "pmpt_1"}),
    ("top_logprobs", 2),
    ("top_logprobs", 21),
    ("include", "reasoning.encrypted_content"),
    ("include", [5]),
    ("input", None),
    ("input", []),
    ("input", 5),
    ("input", {}),
    ("instructions", 5),
    ("model", 5),
    ("stream", "yes"),
    ("stream_options", True),
    ("store", "no"),
    ("max_output_tokens", 0),
    ("max_output_tokens", "9"),
    ("max_tool_calls", 0),
    ("metadata", []),
    ("truncation", "middle"),
    ("parallel_tool_calls", 1),
    ("previous_response_id", 5),
    ("previous_response_id", ""),
    ("reasoning", "high"),
    ("reasoning", {"effort": "perhaps"}),
    ("reasoning", {"summary": "long"}),
    ("temperature", 3),
    ("top_p", -1),
    ("text", "json"),
    ("text", {"format": {"type": "xml"}}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": "text"}}}),
    ("text", {"verbosity": 5}),
    ("tools", 5),
    ("tool_choice", "sometimes"),
    ("prompt_cache_key", 5),
    ("user", 5),
]


def test_minus_one_is_no_limit_but_the_context() -> None:
    """The response says what was asked: none."""
    request = parse(max_output_tokens=-1)
    assert request.turn.max_tokens == NO_LIMIT
    assert request.described.echo["max_output_tokens"] is None


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    """Each wrong value is a BadRequest whose `param` begins with the field."""
    with pytest.raises(BadRequest) as caught:
        parse(**{name: value})
    assert str(caught.value.param).startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", False),
        ("conversation", None),
        ("truncation", "auto"),
        ("max_tool_calls", 5),
        ("service_tier", "auto"),
        ("include", ["web_search_call.action.sources"]),
        ("client_metadata", {"x": 1}),
        ("reasoning", {"summary": None}),
        ("reasoning", {}),
        ("text", None),
    ],
)
def test_a_field_that_asks_for_nothing_passes(name: str, value: object) -> None:
    """The turn is the same as without it."""
    assert parse(**{name: value}).turn == parse().turn


@pytest.mark.parametrize(
    ("fields", "is_stored"),
    [
        ({}, True),
        ({"store": False}, False),
        ({"ttl": 0}, False),
        ({"ttl": 0, "store": True}, False),
        ({"ttl": 1}, True),
    ],
)
def test_a_request_that_wants_nothing_kept_is_not_stored(fields: dict[str, Any], is_stored: bool) -> None:
    """`ttl: 0` is `store: false`, and the response says so."""
    request = parse(**fields)
    assert request.store == request.described.echo["store"] == is_stored


def test_a_request_may_forbid_drafts() -> None:
    """As in chats."""
    assert [parse(**said).turn.may_draft for said in ({}, {"speculation": False})] == [True, False]


# --- former responses ------------------------------------------------------------------------------------------------


def stored(name: str, previous: str | None, said: str, answer: str) -> StoredResponse:
    """One turn that is kept."""
    item = {"id": f"msg_{name.removeprefix('resp_')}_0", "type": "message", "role": "assistant", "content": answer}
    return StoredResponse({"id": name, "output": [item]}, ({"role": "user", "content": said, "id": "u"},), previous)


FIRST, SECOND = "resp_req" + "1" * 24, "resp_req" + "2" * 24


@pytest.fixture
def store() -> ResponseStore:
    """Two turns, one after the other."""
    store = ResponseStore(None, print)
    store.put(stored(FIRST, None, "one", "eins"))
    store.put(stored(SECOND, FIRST, "two", "zwei"))
    return store


def test_a_previous_response_brings_its_whole_conversation(store: ResponseStore) -> None:
    """All turns up to it, then the input; the instructions are those of this request."""
    request = parse(store, previous_response_id=SECOND, instructions="Now.", input="three")
    said = [(message.role, message.blocks[0]) for message in request.turn.messages]
    assert said == [
        ("system", TextBlock("Now.")),
        ("user", TextBlock("one")),
        ("assistant", TextBlock("eins")),
        ("user", TextBlock("two")),
        ("assistant", TextBlock("zwei")),
        ("user", TextBlock("three")),
    ]
    assert len(request.items) == 1 and request.previous_response_id == SECOND


def test_a_result_may_follow_the_response_that_called(store: ResponseStore) -> None:
    """The call is in the history, its result in the input."""
    call = {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    store.put(StoredResponse({"id": "resp_3", "output": [call]}, (), SECOND))
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    *_, last = parse(store, previous_response_id="resp_3", input=[output]).turn.messages
    assert last == Message("tool", (ToolResultBlock("c", (TextBlock("r"),)),))


def test_an_item_may_be_named_instead_of_sent(store: ResponseStore) -> None:
    """The item stands in its place, in the turn and in what is kept."""
    reference = {"type": "item_reference", "id": f"msg_{SECOND.removeprefix('resp_')}_0"}
    request = parse(store, input=[{"role": "user", "content": "two"}, reference, {"role": "user", "content": "x"}])
    assert [message.role for message in request.turn.messages] == ["user", "assistant", "user"]
    assert request.items[1]["content"] == "zwei"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_unheard"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_unheard"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": f"msg_{SECOND.removeprefix('resp_')}_9"}]}, "input"),
    ],
)
def test_what_is_not_kept_is_a_404(store: ResponseStore, fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    with pytest.raises(NotFound) as caught:
        parse(store, **fields)
    assert caught.value.param == param


# --- whatever comes --------------------------------------------------------------------------------------------------

VALID: dict[str, object] = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"text": "s"}],
            "content": [{"text": "c"}],
            "encrypted_content": "e",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "l", "output": "a"},
        {"type": "shell_call_output", "call_id": "l", "output": [{"stdout": "a", "outcome": {"type": "exit"}}]},
        {"type": "computer_call_output", "call_id": "k", "output": {"type": "computer_screenshot", "image_url": "u"}},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
        {"type": "of_tomorrow", "role": "user", "text": "x"},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"session_id": "s"},
    "max_output_tokens": 5,
    "stream": True,
    "store": False,
    "truncation": "auto",
}


@given(st.sampled_from(list(paths(VALID))), JSON)
@settings(max_examples=num_examples(60))
def test_any_change_of_a_good_body_is_read_or_refused(path: tuple[str | int, ...], value: object) -> None:
    """Nothing else than a request error comes out, and what is read can be written again."""
    body = replaced(VALID, path, value)
    try:
        request = parse(**body)
    except RequestError:
        return
    json.dumps([request.described.echo, request.items])


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_bodies_are_read_whole(path: Path, defaults: RequestDefaults) -> None:
    """Every text, thought, call and result that Codex sent is in the turn, once and in order."""
    row = json.loads(path.read_text("utf-8"))
    headers = {name.lower(): value for name, value in row["headers"]}
    request = parse_responses(row["body"], headers, defaults, ID, ResponseStore(None, print).of(NOBODY))
    assert request.turn.session.session_id == row["body"]["prompt_cache_key"]
    assert not request.store and request.stream
    said: list[str] = []
    for item in row["body"]["input"]:
        content = item.get("content") or []
        said += [part["text"] for part in content]
        said += [item[name] for name in ("arguments", "output") if name in item]
    read: list[str] = []
    for message in request.turn.messages:
        for block in message.blocks:
            parts = block.blocks if isinstance(block, ToolResultBlock) else (block,)
            read += [getattr(part, "text", None) or getattr(part, "arguments", "") for part in parts]
    assert read == said
    offered = [tool for tool in row["body"]["tools"] if tool["type"] != "web_search"]
    assert len(request.turn.tools) == sum(len(tool.get("tools", [tool])) for tool in offered)
