"""Responses and their events: golden wire files, the real SDK as reader, stream equals whole, echo equals answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import (
    AnswerEvent,
    Block,
    ContentDelta,
    Finished,
    ReasoningDelta,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    Usage,
    Waiting,
)
from kvserve.errors import EngineFailure, NotReady, QueueFull, RequestError
from kvserve.protocols.responses_items import read_items
from kvserve.protocols.responses_request import Described
from kvserve.protocols.responses_stream import ResponseStreamEncoder
from tests.calls import INTRICATE, every_cut, spoken
from tests.laws import num_examples
from tests.protocols.responses_wire import CREATED, ID, MODEL, as_named_sse, described, put_together, stream

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI

USAGE = Usage(
    num_prompt_tokens=120, num_cached_tokens=96, num_completion_tokens=9, num_reasoning_tokens=4, num_written_tokens=24
)
TOOLS = [
    {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "apply_patch", "description": "Patches files."},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "stop"}]},
    {"type": "web_search"},
]
CALLS = [
    ToolCallBlock("call0a", "bash", '{"command": "ls \\"é\\""}'),
    ToolCallBlock("call0b", "apply_patch", '{"input": "*** Begin\\n日本"}'),
    ToolCallBlock("call0c", "agents__stop", "{}"),
]
CUT_PATCH = ToolCallBlock("call0d", "apply_patch", '{"input": "*** Begin\\n日')
THOUGHT = [Waiting(0, 120), ReasoningDelta("I should "), ReasoningDelta("greet.\n")]
HELLO = [ContentDelta("Hel"), ContentDelta("lo 😀")]
SCENARIOS: dict[str, tuple[dict[str, Any], list[AnswerEvent]]] = {
    "text": ({}, [*HELLO, Finished("stop", USAGE)]),
    "reasoning": ({}, [*THOUGHT, *HELLO, Finished("stop", USAGE, stop_string="END")]),
    "summary": (
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        [*THOUGHT, *HELLO, Finished("stop", USAGE)],
    ),
    "call": ({"tools": TOOLS}, [*THOUGHT, *spoken(CALLS[0]), Finished("tool_calls", USAGE)]),
    "calls": (
        {"tools": TOOLS},
        [*HELLO, *(event for call in CALLS for event in spoken(call, [1, 14])), Finished("tool_calls", USAGE)],
    ),
    "cut": (
        {"tools": TOOLS},
        [*spoken(CALLS[0]), *spoken(CUT_PATCH, [1, 14], is_cut=True), Finished("length", USAGE)],
    ),
    "length": ({"max_output_tokens": 9}, [ContentDelta("Once upon a"), Finished("length", USAGE)]),
    "drafted": ({}, [*HELLO, Finished("stop", replace(USAGE, num_accepted_tokens=5, num_rejected_tokens=2))]),
}


def wire(name: str) -> list[dict[str, Any]]:
    """The events of a scenario."""
    body, events = SCENARIOS[name]
    return stream(events, described(**body))


@pytest.mark.parametrize("name", SCENARIOS)
def test_streams_have_their_wire_form(name: str, golden: Callable[[str, str], None]) -> None:
    """Byte for byte the golden stream; its last event carries the golden response."""
    events = wire(name)
    golden(f"responses_{name}.sse", as_named_sse(events))


def test_an_error_in_a_stream_has_its_wire_form(golden: Callable[[str, str], None]) -> None:
    """What was said before stands, and the response has failed."""
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, described())
    events = [*encoder.first_events(), *encoder.encode(HELLO[0]), encoder.error_chunk(EngineFailure("It broke."))]
    golden("responses_error.sse", as_named_sse(events))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailure("x"), "server_error"),
        (QueueFull("x"), "rate_limit_exceeded"),
        (NotReady("x"), "server_is_overloaded"),
    ],
)
def test_errors_have_codes_that_clients_know(error: RequestError, code: str) -> None:
    """A client tells from the code whether to ask again."""
    failed = ResponseStreamEncoder(ID, MODEL, CREATED, described()).error_chunk(error)
    assert failed["type"] == "response.failed"
    response: Any = failed["response"]
    assert response["status"] == "failed" and response["error"] == {"code": code, "message": "x"}


def test_a_keep_alive_is_an_event_that_says_nothing_new() -> None:
    """It is counted like the others, and the pieces mean the same with it between them."""
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, described())
    events: list[Any] = encoder.first_events()
    for event in SCENARIOS["reasoning"][1]:
        events += [encoder.keep_alive(), *encoder.encode(event)]
    assert events[2]["type"] == "response.in_progress"
    assert put_together(events) == events[-1]["response"]["output"]


# --- the SDK ---------------------------------------------------------------------------------------------------------


def sdk_reading(body: str) -> OpenAI:
    """The real openai SDK, whose every request is answered with this body; no socket is opened."""
    from openai import OpenAI

    kind = "text/event-stream" if body.startswith("event:") else "application/json"
    answer = httpx.Response(200, content=body.encode(), headers={"content-type": kind})
    transport = httpx.MockTransport(lambda _: answer)
    return OpenAI(api_key="any", base_url="http://test", max_retries=0, http_client=httpx.Client(transport=transport))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sdk_reads_every_event_by_its_type(name: str) -> None:
    """Each event becomes the SDK's own class for it, with nothing left over that the class does not know."""
    events = wire(name)
    with sdk_reading(as_named_sse(events)).responses.create(model="m", input="x", stream=True) as reader:
        read = list(reader)
    assert [event.type for event in read] == [event["type"] for event in events]
    for event in read:
        assert event.model_extra in (None, {}), (event.type, event.model_extra)


def without_parsed(value: Any) -> Any:
    """What the SDK adds to a stream's end left out."""
    if isinstance(value, dict):
        return {name: without_parsed(each) for name, each in value.items() if not name.startswith("parsed")}
    return [without_parsed(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ("length", "cut")])
def test_the_sdk_reads_stream_and_answer_alike(name: str) -> None:
    """The SDK's final response of a stream is what it reads when nothing is streamed."""
    events = wire(name)
    whole = sdk_reading(json.dumps(events[-1]["response"])).responses.create(model="m", input="x")
    with sdk_reading(as_named_sse(events)).responses.stream(model="m", input="x") as reader:
        streamed = reader.get_final_response()
    assert without_parsed([item.to_dict() for item in streamed.output]) == [item.to_dict() for item in whole.output]
    assert streamed.usage == whole.usage and whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 96
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    assert (
        streamed.output_text
        == whole.output_text
        == "".join(event.text for event in SCENARIOS[name][1] if isinstance(event, ContentDelta))
    )


def test_the_sdk_reads_an_error_in_a_stream() -> None:
    """A failed response carries code and message."""
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, described())
    events = [*encoder.first_events(), encoder.error_chunk(EngineFailure("It broke."))]
    with sdk_reading(as_named_sse(events)).responses.create(model="m", input="x", stream=True) as reader:
        *_, last = reader
    from openai.types.responses import ResponseFailedEvent

    assert isinstance(last, ResponseFailedEvent)
    assert last.response.error is not None and last.response.error.message == "It broke."


# --- laws ------------------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=12)
JSON_OBJECTS = st.dictionaries(TEXT, TEXT | st.integers(), max_size=3).map(json.dumps)
CALL_BLOCKS = st.builds(
    ToolCallBlock, TEXT, st.sampled_from(["bash", "agents__stop", "unheard"]), JSON_OBJECTS
) | st.builds(ToolCallBlock, TEXT, st.just("apply_patch"), st.builds(lambda said: json.dumps({"input": said}), TEXT))
CUTS = st.sets(st.integers(1, 30), max_size=5)
SAID: st.SearchStrategy[list[AnswerEvent]] = st.one_of(
    TEXT.map(lambda text: [ReasoningDelta(text)]),
    TEXT.map(lambda text: [ContentDelta(text)]),
    st.builds(spoken, CALL_BLOCKS, CUTS),
    st.just([Waiting(3, 9)]),
)
EVENTS: st.SearchStrategy[list[AnswerEvent]] = st.builds(
    lambda groups, reason: [*(event for group in groups for event in group), Finished(reason, USAGE)],
    st.lists(SAID, max_size=12),
    st.sampled_from(["stop", "length", "tool_calls"]),
)
ABOUT = st.sampled_from(
    [
        described(tools=TOOLS),
        described(tools=TOOLS, reasoning={"summary": "auto"}),
        described(tools=TOOLS, reasoning={"summary": "detailed"}, include=["reasoning.encrypted_content"]),
        described(tools=TOOLS, include=["reasoning.encrypted_content"]),
    ]
)


@given(EVENTS, ABOUT)
@settings(max_examples=num_examples(40))
def test_a_stream_put_together_is_the_response(events: list[AnswerEvent], about: Described) -> None:
    """For any events: the pieces of the stream make the items of the response that is not streamed."""
    made = stream(events, about)
    last = made[-1]
    is_cut = events[-1] == Finished("length", USAGE)
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["status"] == ("incomplete" if is_cut else "completed")
    assert last["response"]["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert put_together(made) == last["response"]["output"]


def said_blocks(events: list[AnswerEvent]) -> list[Block]:
    """What an answer says, neighbouring pieces of a channel as one, empty ones left out; arguments as JSON values."""
    blocks: list[Any] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                piece: Any = ThinkingBlock(text)
            case ContentDelta(text):
                piece = TextBlock(text)
            case ToolCallEnd(call):
                blocks.append((call.call_id, call.name, json.loads(call.arguments)))
                continue
            case _:
                continue
        if blocks and type(blocks[-1]) is type(piece):
            blocks[-1] = type(piece)(blocks[-1].text + piece.text)
        else:
            blocks.append(piece)
    return [block for block in blocks if isinstance(block, tuple) or block.text]


@given(EVENTS, ABOUT)
@settings(max_examples=num_examples(40))
def test_an_answer_sent_back_is_the_message_that_was_written(events: list[AnswerEvent], about: Described) -> None:
    """The items of any response, echoed, are one assistant message that says what the answer said, in its order."""
    output = stream(events, about)[-1]["response"]["output"]
    messages = read_items(output, "input")
    read = [
        (block.call_id, block.name, json.loads(block.arguments)) if isinstance(block, ToolCallBlock) else block
        for message in messages
        for block in message.blocks
    ]
    assert read == said_blocks(events)
    assert len(messages) <= 1


@given(TEXT.filter(bool), TEXT.filter(bool), st.lists(CALL_BLOCKS, max_size=3), ABOUT)
@settings(max_examples=num_examples(40))
def test_an_answer_without_its_ids_is_still_one_message(
    thought: str, said: str, calls: list[ToolCallBlock], about: Described
) -> None:
    """Clients that drop ids, or the thoughts' text but not their sealed form, send the same message back."""
    events = [
        ReasoningDelta(thought),
        ContentDelta(said),
        *(event for call in calls for event in spoken(call)),
        Finished("stop", USAGE),
    ]
    output = stream(events, about)[-1]["response"]["output"]
    bare = [{name: value for name, value in item.items() if name != "id"} for item in output]
    if bare[0].get("encrypted_content"):
        bare[0] = {"type": "reasoning", "encrypted_content": bare[0]["encrypted_content"], "summary": []}
    assert read_items(bare, "input") == read_items(output, "input")


# --- calls as they come ----------------------------------------------------------------------------------------------


@given(st.lists(CALL_BLOCKS, min_size=1, max_size=3), CUTS)
@settings(max_examples=num_examples(10))
def test_the_sdk_puts_pieces_of_calls_together(calls: list[ToolCallBlock], cuts: set[int]) -> None:
    """However arguments are cut, the SDK accumulates the items of the whole response."""
    said = [event for call in calls for event in spoken(call, cuts)]
    events = stream([*said, Finished("tool_calls", USAGE)], described(tools=TOOLS))
    with sdk_reading(as_named_sse(events)).responses.stream(model="m", input="x") as reader:
        streamed = reader.get_final_response()
    assert without_parsed([item.to_dict() for item in streamed.output]) == events[-1]["response"]["output"]
    assert put_together(events) == events[-1]["response"]["output"]


def test_the_sdk_has_the_arguments_wherever_they_are_cut() -> None:
    """At every single place, inside escapes and numbers too, and one letter at a time. What the SDK put together of the
    pieces is looked at, since its final response is the one that the last event holds."""
    call = ToolCallBlock("call0c", "bash", INTRICATE)
    for cuts in every_cut(INTRICATE):
        events = stream([*spoken(call, cuts), Finished("tool_calls", USAGE)], described(tools=TOOLS))
        with sdk_reading(as_named_sse(events)).responses.stream(model="m", input="x") as reader:
            told = [event for event in reader if event.type == "response.function_call_arguments.delta"]
        assert len(told) == len(cuts) + 1
        assert told[-1].snapshot == INTRICATE == events[-1]["response"]["output"][0]["arguments"], cuts


def test_a_call_that_was_cut_is_an_incomplete_item() -> None:
    """It says what there is of its arguments or of a custom tool's input; whole calls before it are completed."""
    whole, cut = wire("cut")[-1]["response"]["output"]
    assert (whole["status"], whole["arguments"]) == ("completed", CALLS[0].arguments)
    assert (cut["status"], cut["input"]) == ("incomplete", "*** Begin\n日")


def test_a_custom_tools_input_comes_in_pieces() -> None:
    """Each piece of the function's arguments is decoded as it comes; an escape waits for its other half."""
    pieces = ['{"in', 'put": "a\\', "nb", '\\"c', '"', "}"]
    call = ToolCallBlock("c", "apply_patch", "".join(pieces))
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, described(tools=TOOLS))
    encoder.encode(ToolCallStart("c", "apply_patch"))
    told = [[event["delta"] for event in encoder.encode(ToolCallPiece(piece))] for piece in pieces]
    assert told == [[], ["a"], ["\nb"], ['"c'], [], []]
    done = encoder.encode(ToolCallEnd(call))
    assert [event["type"] for event in done] == ["response.custom_tool_call_input.done", "response.output_item.done"]
    assert done[0]["input"] == 'a\nb"c'
