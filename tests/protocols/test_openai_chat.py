"""Chat requests as a whole, and answers: golden wire files, the real SDK as reader, stream equals non-stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    Finished,
    JsonObject,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    SessionHint,
    TextBlock,
    ThinkingChoice,
    ToolCallBlock,
    ToolCallEnd,
    Usage,
    Waiting,
)
from kvserve.errors import BadRequest, EngineFailure
from kvserve.protocols.openai_chat import ChatEncoder, ChatRequest, parse_chat
from tests.calls import INTRICATE, every_cut, spoken
from tests.laws import num_examples

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

type Parse = Callable[..., ChatRequest]
type Golden = Callable[[str, str], None]
type AsSse = Callable[[Iterable[JsonObject]], str]

ID, MODEL, CREATED = RequestId("req7"), "org/model", 1_700_000_000
USAGE = Usage(
    num_prompt_tokens=120, num_cached_tokens=96, num_completion_tokens=9, num_reasoning_tokens=4, num_written_tokens=24
)
CALLS = [
    ToolCallBlock("call0a", "bash", '{"command": "ls \\"é\\""}'),
    ToolCallBlock("call0b", "read", '{"path":"日本.txt"}'),
]
CUT = ToolCallBlock("call0c", "bash", '{"command": "ls')
SCENARIOS: dict[str, list[AnswerEvent]] = {
    "plain_text": [ContentDelta("Hel"), ContentDelta("lo 😀"), Finished("stop", USAGE)],
    "reasoning": [
        Waiting(0, 120),
        ReasoningDelta("I should "),
        ReasoningDelta("greet.\n"),
        ContentDelta("Hello"),
        Finished("stop", USAGE, stop_string="END"),
    ],
    "two_tool_calls": [*spoken(CALLS[0]), *spoken(CALLS[1], [1, 9]), Finished("tool_calls", USAGE)],
    "cut_call": [ContentDelta("So: "), *spoken(CUT, [2, 12], is_cut=True), Finished("length", USAGE)],
    "length": [ContentDelta("Once upon a"), Finished("length", USAGE)],
    "drafted": [ContentDelta("Hello"), Finished("stop", replace(USAGE, num_accepted_tokens=5, num_rejected_tokens=2))],
}


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_whole_request_becomes_a_turn(defaults: RequestDefaults) -> None:
    """Model, messages, thinking, session and template arguments arrive together."""
    body = {
        "model": "org/model",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 99,
        "chat_template_kwargs": {"enable_thinking": False, "custom": [1]},
        "extra_body": {"chat_template_kwargs": {"custom": 2, "other": True}, "session_id": "s1"},
    }
    request = parse_chat(body, {"x-session-id": "header"}, defaults, ID)
    turn = request.turn
    assert (request.stream, request.include_usage) == (True, True)
    assert (turn.request_id, turn.protocol, turn.model, turn.max_tokens) == (ID, "openai_chat", "org/model", 99)
    assert turn.messages[0].blocks == (TextBlock("hi"),)
    assert turn.thinking == ThinkingChoice(enabled=False)
    assert turn.session == SessionHint(session_id="s1")
    assert turn.template_arguments == {"custom": [1], "other": True}
    assert turn.raw_prompt is None


def test_extra_body_may_carry_everything(parse: Parse) -> None:
    """What stands at the top level counts, what is missing there is taken from `extra_body`."""
    turn = parse(temperature=1, extra_body={"temperature": 0, "seed": 3, "model": "m", "stop": "x"}).turn
    assert (turn.sampling.temperature, turn.sampling.seed, turn.model, turn.stop_strings) == (1.0, 3, "m", ("x",))


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template", "add_generation_prompt"])
def test_a_request_cannot_set_what_the_renderer_sets(parse: Parse, name: str) -> None:
    """Template arguments that would change what a render is are refused."""
    with pytest.raises(BadRequest) as caught:
        parse(chat_template_kwargs={name: 1})
    assert caught.value.param == f"chat_template_kwargs.{name}"


# --- answers ---------------------------------------------------------------------------------------------------------


def stream(events: Iterable[AnswerEvent], include_usage: bool) -> list[dict[str, object]]:
    """All chunks of an answer."""
    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage)
    return [encoder.role_chunk(), *(chunk for event in events for chunk in encoder.encode(event))]


def collected(events: Iterable[AnswerEvent]) -> Answer:
    """The same events as one answer."""
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case ToolCallEnd(call):
                calls.append(call)
            case Finished():
                return Answer(reasoning, content, tuple(calls), event)
    raise AssertionError("the events have no end")


def put_together(chunks: Iterable[JsonObject]) -> tuple[dict[str, object], object, object]:
    """(message, finish_reason, usage) of a stream, joined as clients join deltas."""
    message: dict[str, object] = {"refusal": None}
    finish_reason = usage = None
    for chunk in json.loads(json.dumps(list(chunks))):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            delta = choice["delta"]
            message.update({key: delta[key] for key in ("role",) if key in delta})
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = str(message.get(key, "")) + delta[key]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                assert isinstance(calls, list)
                index = call.pop("index")
                if "id" in call:
                    assert index == len(calls)
                    calls.append(call)
                else:
                    assert index == len(calls) - 1 and call.keys() == {"function"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            if function := delta.get("function_call"):
                so_far = message.setdefault("function_call", {"arguments": ""})
                assert isinstance(so_far, dict) and ("name" in so_far) != ("name" in function)
                message["function_call"] = {
                    **so_far,
                    **function,
                    "arguments": so_far["arguments"] + function["arguments"],
                }
    if (message.get("tool_calls") or message.get("function_call")) and not message["content"]:
        message["content"] = None  # the role chunk's "" is all the content there was
    return message, finish_reason, usage


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("include_usage", [False, True], ids=["", "usage"])
def test_streams_have_their_wire_form(name: str, include_usage: bool, golden: Golden, as_sse: AsSse) -> None:
    """Byte for byte the golden stream, with and without the usage chunk."""
    suffix = "_usage" if include_usage else ""
    golden(f"chat_{name}{suffix}.sse", as_sse(stream(SCENARIOS[name], include_usage)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_have_their_wire_form(name: str, golden: Golden) -> None:
    """Byte for byte the golden body."""
    body = ChatEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(collected(SCENARIOS[name]))
    golden(f"chat_{name}.json", json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def accumulated(client: OpenAI) -> ChatCompletion:
    """The SDK's own sum of a stream; of a cut answer it raises the sum."""
    import openai

    options = {"model": "m", "messages": [], "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**options) as reader:
        try:
            return reader.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            return cut.completion


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sdk_reads_stream_and_answer_alike(name: str, sdk_reading: Callable[..., OpenAI], as_sse: AsSse) -> None:
    """The real SDK's accumulated stream is the message that it reads when nothing is streamed."""
    body = json.dumps(ChatEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(collected(SCENARIOS[name])))
    whole = sdk_reading(body).chat.completions.create(model="m", messages=[])
    wire = as_sse(stream(SCENARIOS[name], include_usage=True))
    streamed = accumulated(sdk_reading(wire))
    one, other = whole.choices[0], streamed.choices[0]
    assert (one.finish_reason, one.message.content or None) == (other.finish_reason, other.message.content or None)
    calls = [(call.id, call.function.name, call.function.arguments) for call in one.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [(call.id, call.function.name, call.function.arguments) for call in other.message.tool_calls or []]
    assert whole.usage == streamed.usage
    assert whole.id == streamed.id == "chatcmpl-req7"
    assert one.message.to_dict().get("reasoning_content") == other.message.to_dict().get("reasoning_content")


TEXT = st.text(max_size=12)
CALL_BLOCKS = st.builds(ToolCallBlock, TEXT, TEXT, TEXT)
SAID: st.SearchStrategy[list[AnswerEvent]] = st.one_of(
    TEXT.map(lambda text: [ReasoningDelta(text)]),
    TEXT.map(lambda text: [ContentDelta(text)]),
    st.builds(spoken, CALL_BLOCKS, st.sets(st.integers(0, 12), max_size=4)),
    st.just([Waiting(3, 9)]),
)
EVENTS: st.SearchStrategy[list[AnswerEvent]] = st.builds(
    lambda groups, reason: [*(event for group in groups for event in group), Finished(reason, USAGE)],
    st.lists(SAID, max_size=12),
    st.sampled_from(["stop", "length", "tool_calls"]),
)


@given(EVENTS, st.booleans())
@settings(max_examples=num_examples(50))
def test_a_stream_put_together_is_the_answer(events: list[AnswerEvent], include_usage: bool) -> None:
    """For any events: joined chunks, keep-alives between them, equal the message that is not streamed."""
    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage)
    chunks = [encoder.role_chunk()]
    for event in events:
        chunks += [encoder.keep_alive(), *encoder.encode(event)]
    body = json.loads(json.dumps(ChatEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(collected(events))))
    message, finish_reason, usage = put_together(chunks)
    message = {key: value for key, value in message.items() if key != "reasoning_content" or value}
    assert message == body["choices"][0]["message"]
    assert finish_reason == body["choices"][0]["finish_reason"]
    assert usage == (body["usage"] if include_usage else None)


def test_a_keep_alive_says_nothing(sdk_reading: Callable[..., OpenAI], as_sse: AsSse) -> None:
    """A delta with empty thinking: the SDK accumulates the same answer with and without it."""
    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage=False)
    alive = encoder.keep_alive()
    assert alive["choices"] == [{"index": 0, "delta": {"reasoning_content": ""}, "finish_reason": None}]
    chunks = stream(SCENARIOS["two_tool_calls"], include_usage=False)
    padded = [item for chunk in chunks for item in (chunk, alive)]
    answers = []
    for wire in (as_sse(chunks), as_sse(padded)):
        [choice] = accumulated(sdk_reading(wire)).choices
        message = choice.message.model_dump()
        message["reasoning_content"] = message.get("reasoning_content") or None
        answers.append((message, choice.finish_reason))
    assert answers[0] == answers[1]


def test_an_error_in_a_stream_is_raised_by_the_sdk(sdk_reading: Callable[..., OpenAI], as_sse: AsSse) -> None:
    """What came before the error is delivered, then the SDK raises its message."""
    import openai

    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage=False)
    chunks = [
        encoder.role_chunk(),
        *encoder.encode(ContentDelta("He")),
        encoder.error_chunk(EngineFailure("It broke.")),
    ]
    reader = sdk_reading(as_sse(chunks)).chat.completions.create(model="m", messages=[], stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="It broke"):
        for chunk in reader:
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["", "He"]


# --- calls as they come ----------------------------------------------------------------------------------------------

ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers(), max_size=3).map(
    lambda given: json.dumps(given, ensure_ascii=False)
)
WHOLE_CALLS = st.lists(
    st.builds(ToolCallBlock, st.uuids().map(str), st.sampled_from(["a", "b"]), ARGUMENTS), max_size=3
)
CUTS = st.sets(st.integers(1, 40), max_size=6)


@given(WHOLE_CALLS, CUTS, TEXT)
@settings(max_examples=num_examples(10))
def test_the_sdk_puts_pieces_of_calls_together(calls: list[ToolCallBlock], cuts: set[int], text: str) -> None:
    """However arguments are cut, the SDK's accumulator has the calls of the answer that is not streamed."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    said = [event for call in calls for event in spoken(call, cuts)]
    events = [ContentDelta(text), *said, Finished("tool_calls" if calls else "stop", USAGE)]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in stream(events, include_usage=True):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    whole = ChatEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(collected(events))
    [choice] = state.get_final_completion().choices
    told = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert told == [(call.call_id, call.name, call.arguments) for call in calls]
    assert choice.finish_reason == whole["choices"][0]["finish_reason"]  # type: ignore[index]


def test_the_sdk_has_the_arguments_wherever_they_are_cut() -> None:
    """At every single place, inside escapes and numbers too, and one letter at a time."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    call = ToolCallBlock("call0c", "edit", INTRICATE)
    for cuts in every_cut(INTRICATE):
        chunks = stream([*spoken(call, cuts), Finished("tool_calls", USAGE)], include_usage=True)
        assert len(chunks) == len(cuts) + 5  # the role, the name, the pieces, the end, the usage
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        [told] = state.get_final_completion().choices[0].message.tool_calls or []
        assert (told.id, told.function.name, told.function.arguments) == ("call0c", "edit", INTRICATE), cuts


def test_a_calls_name_comes_first_and_its_arguments_in_pieces() -> None:
    """The first chunk has id and name, the others what is new of the arguments."""
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(spoken(CALLS[0], [1]), include_usage=False)[1:]]  # type: ignore[index]
    assert deltas == [
        {
            "tool_calls": [
                {"index": 0, "id": "call0a", "type": "function", "function": {"name": "bash", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": CALLS[0].arguments[1:]}}]},
    ]


FUNCTION_EVENTS = [ReasoningDelta("hm"), *spoken(CALLS[0], [1, 9]), Finished("tool_calls", USAGE)]


def function_stream(events: Iterable[AnswerEvent]) -> list[dict[str, object]]:
    """All chunks of an answer to a request with `functions`."""
    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage=False, uses_functions=True)
    return [encoder.role_chunk(), *(chunk for event in events for chunk in encoder.encode(event))]


def test_functions_are_answered_in_their_form(golden: Golden, as_sse: AsSse) -> None:
    """`function_call` in deltas and message, and as the finish reason; both forms say the same."""
    chunks = function_stream(FUNCTION_EVENTS)
    golden("chat_function_call.sse", as_sse(chunks))
    body = ChatEncoder(ID, MODEL, CREATED, include_usage=False, uses_functions=True).encode_whole(
        collected(FUNCTION_EVENTS)
    )
    golden("chat_function_call.json", json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    message, finish_reason, _ = put_together(chunks)
    assert message == body["choices"][0]["message"]  # type: ignore[index]
    assert finish_reason == body["choices"][0]["finish_reason"] == "function_call"  # type: ignore[index]


def test_the_sdk_reads_a_function_call(sdk_reading: Callable[..., OpenAI], as_sse: AsSse) -> None:
    """The SDK puts the deprecated form together too."""
    client = sdk_reading(as_sse(function_stream(FUNCTION_EVENTS)))
    [choice] = accumulated(client).choices
    function = choice.message.function_call
    assert function is not None and choice.finish_reason == "function_call"
    assert (function.name, function.arguments) == (CALLS[0].name, CALLS[0].arguments)


@pytest.mark.parametrize(
    ("body", "uses_functions", "many"),
    [
        ({"functions": [{"name": "f"}]}, True, False),
        ({"functions": [{"name": "f"}], "parallel_tool_calls": True}, True, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "functions": []}, False, True),
        ({"functions": []}, False, True),
        ({}, False, True),
    ],
)
def test_who_sends_functions_gets_one_call_in_their_form(
    parse: Parse, body: dict[str, object], uses_functions: bool, many: bool
) -> None:
    """The legacy message has room for one call, so the answer ends with the first."""
    request = parse(**body)
    assert (request.uses_functions, request.turn.parallel_tool_calls) == (uses_functions, many)


def test_an_answer_without_a_call_is_the_same_for_functions() -> None:
    """Text and its finish reason have one form."""
    events = SCENARIOS["plain_text"]
    assert function_stream(events) == stream(events, include_usage=False)
