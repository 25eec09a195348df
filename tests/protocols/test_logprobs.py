"""Log-probabilities on the wire: who asks for how many, and the three forms, as the SDK's types have them."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ContentToken,
    Finished,
    JsonObject,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    ToolCallBlock,
    Usage,
)
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import ChatEncoder, ChatRequest
from kvserve.protocols.openai_completions import CompletionEncoder, parse_completion
from kvserve.protocols.responses_stream import ResponseStreamEncoder
from tests.calls import spoken
from tests.protocols.responses_wire import parse as parse_response

if TYPE_CHECKING:
    from openai import OpenAI

ID, MODEL, CREATED = RequestId("req1"), "org/model", 1700000000
PARROT = "\N{PARROT}".encode()
TOKENS = (
    ContentToken(b"Hi", -0.5, ((b"Hi", -0.5), (b"Hello", -1.0)), 0),
    ContentToken(b" " + PARROT[:2], -2.0, ((b"!", -0.25), (b" \xf0", -3.0)), 2),
    ContentToken(PARROT[2:], -math.inf, ((b"\xa0", 0.0), (b"<|im_end|>", -math.inf)), 3),
)
USAGE = Usage(5, 0, 3)
EVENTS: tuple[AnswerEvent, ...] = (
    ReasoningDelta("hm"),
    ContentDelta("Hi", TOKENS[:1]),
    ContentDelta(" \N{PARROT}", TOKENS[1:]),
    *spoken(ToolCallBlock("c1", "look", "{}")),
    Finished("tool_calls", USAGE),
)
CHAT_FORM = [
    {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
    {"token": " \\xf0\\x9f", "logprob": -2.0, "bytes": [32, 240, 159]},
    {"token": "\\xa6\\x9c", "logprob": -9999.0, "bytes": [166, 156]},
]
CHAT_TOP = [
    [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}, {"token": "Hello", "logprob": -1.0, "bytes": [*b"Hello"]}],
    [{"token": "!", "logprob": -0.25, "bytes": [33]}, {"token": " \\xf0", "logprob": -3.0, "bytes": [32, 240]}],
    [
        {"token": "\\xa0", "logprob": 0.0, "bytes": [160]},
        {"token": "<|im_end|>", "logprob": -9999.0, "bytes": [*b"<|im_end|>"]},
    ],
]
CHAT_ENTRIES = [{**entry, "top_logprobs": top} for entry, top in zip(CHAT_FORM, CHAT_TOP, strict=True)]


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "num_top"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": 0, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"extra_body": {"logprobs": True, "top_logprobs": 3}}, 3),
    ],
)
def test_a_chat_asks_with_a_flag_and_a_number(
    parse: Callable[..., ChatRequest], body: dict[str, Any], num_top: int | None
) -> None:
    """The number alone asks for nothing unless it is above 0, which is a contradiction."""
    assert parse(**body).turn.num_top_logprobs == num_top


@pytest.mark.parametrize("flag", [{}, {"logprobs": False}, {"logprobs": 0}])
def test_a_number_without_the_flag_is_refused(parse: Callable[..., ChatRequest], flag: dict[str, Any]) -> None:
    """As OpenAI does, naming the field and what it needs."""
    with pytest.raises(BadRequest, match="top_logprobs needs logprobs: true") as caught:
        parse(top_logprobs=2, **flag)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(("value", "num_top"), [(None, None), (False, None), (0, 0), (5, 5), (20, 20)])
def test_a_completion_asks_with_a_number(defaults: RequestDefaults, value: object, num_top: int | None) -> None:
    """0 asks for the drawn tokens' own."""
    body = {"prompt": "x", "logprobs": value}
    assert parse_completion(body, {}, defaults, ID).turn.num_top_logprobs == num_top


def test_a_response_asks_by_what_it_includes() -> None:
    """How many likeliest ones is a field of its own, which is told again."""
    include = ["message.output_text.logprobs"]
    assert parse_response().turn.num_top_logprobs is None
    assert parse_response(include=include).turn.num_top_logprobs == 0
    request = parse_response(include=[*include, "reasoning.encrypted_content"], top_logprobs=2)
    assert (request.turn.num_top_logprobs, request.described.echo["top_logprobs"]) == (2, 2)
    with pytest.raises(BadRequest, match="include"):
        parse_response(top_logprobs=2)


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(tokens: Sequence[ContentToken] = TOKENS) -> Answer:
    content = "Hi \N{PARROT}" if tokens else ""
    return Answer("hm", content, (ToolCallBlock("c1", "look", "{}"),), Finished("tool_calls", USAGE), tuple(tokens))


def test_a_chats_answer_has_the_form_that_the_sdk_reads(sdk_reading: Callable[..., "OpenAI"]) -> None:
    """Content's tokens with their bytes; nothing of thinking and calls."""
    from openai.types.chat import ChatCompletion

    body = ChatEncoder(ID, MODEL, CREATED, include_usage=False, with_logprobs=True).encode_whole(answer())
    assert body["choices"][0]["logprobs"] == {"content": CHAT_ENTRIES, "refusal": None}  # type: ignore[index]
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    read = sdk_reading(json.dumps(body)).chat.completions.create(model="m", messages=[]).choices[0].logprobs
    assert read is not None and read.content is not None and read.refusal is None
    spelt = b"".join(bytes(entry.bytes or ()) for entry in read.content)
    assert spelt.decode() == "Hi \N{PARROT}"


def test_a_chat_that_asked_and_said_nothing_has_no_tokens() -> None:
    """An answer of calls alone; one that did not ask has none of it."""
    silent = ChatEncoder(ID, MODEL, CREATED, include_usage=False, with_logprobs=True).encode_whole(answer(()))
    assert silent["choices"][0]["logprobs"] == {"content": [], "refusal": None}  # type: ignore[index]
    assert ChatEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(answer())["choices"][0]["logprobs"] is None  # type: ignore[index]


def test_a_chats_chunks_carry_the_tokens_of_their_text(
    as_sse: Callable[[Iterable[JsonObject]], str], sdk_reading: Callable[..., "OpenAI"]
) -> None:
    """Every chunk says so, those without text say null; put together they are the whole answer's."""
    from openai.types.chat import ChatCompletionChunk

    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage=True, with_logprobs=True)
    chunks = [encoder.role_chunk(), *(chunk for event in EVENTS for chunk in encoder.encode(event))]
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]  # type: ignore[index]
    assert told == [
        None,
        None,
        {"content": CHAT_ENTRIES[:1], "refusal": None},
        {"content": CHAT_ENTRIES[1:], "refusal": None},
        None,
        None,
        None,
    ]
    read = list(sdk_reading(as_sse(chunks)).chat.completions.create(model="m", messages=[], stream=True))
    parts = [choice.logprobs for chunk in read for choice in chunk.choices if choice.logprobs is not None]
    assert [entry.token for part in parts for entry in part.content or []] == [each["token"] for each in CHAT_FORM]


def test_a_stream_that_did_not_ask_says_nothing_of_it() -> None:
    """Its chunks have no such field."""
    encoder = ChatEncoder(ID, MODEL, CREATED, include_usage=False)
    [chunk] = encoder.encode(ContentDelta("Hi"))
    assert "logprobs" not in chunk["choices"][0]  # type: ignore[index]


LEGACY = {
    "tokens": ["Hi", "bytes:\\x20\\xf0\\x9f", "bytes:\\xa6\\x9c"],
    "token_logprobs": [-0.5, -2.0, -9999.0],
    "top_logprobs": [
        {"Hi": -0.5, "Hello": -1.0},
        {"!": -0.25, "bytes:\\x20\\xf0": -3.0, "bytes:\\x20\\xf0\\x9f": -2.0},
        {"bytes:\\xa0": 0.0, "<|im_end|>": -9999.0, "bytes:\\xa6\\x9c": -9999.0},
    ],
    "text_offset": [0, 2, 3],
}


def test_a_completion_has_the_older_form() -> None:
    """Lists, the drawn token among the likeliest, and offsets that go on from chunk to chunk."""
    from openai.types import Completion

    whole = Answer("", "Hi \N{PARROT}", (), Finished("length", USAGE), TOKENS)
    body = CompletionEncoder(ID, MODEL, CREATED, include_usage=False, with_logprobs=True).encode_whole(whole)
    assert body["choices"][0]["logprobs"] == LEGACY  # type: ignore[index]
    Completion.model_validate_json(json.dumps(body), strict=True)
    assert (
        CompletionEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(whole)["choices"][0]["logprobs"] is None
    )  # type: ignore[index]

    encoder = CompletionEncoder(ID, MODEL, CREATED, include_usage=False, with_logprobs=True)
    events = (*EVENTS[1:3], Finished("length", USAGE))
    chunks = [encoder.keep_alive(), *(chunk for event in events for chunk in encoder.encode(event))]
    for chunk in chunks:
        Completion.model_validate_json(json.dumps({**chunk, "choices": [_ended(chunk)]}), strict=True)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]  # type: ignore[index]
    assert told[0] is None and told[-1] is None
    assert {name: [*told[1][name], *told[2][name]] for name in LEGACY} == LEGACY


def _ended(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk's choice with the end that the SDK's type demands of every one."""
    return {**chunk["choices"][0], "finish_reason": "length"}


def test_of_alternatives_with_one_text_the_likeliest_counts() -> None:
    """The older form has room for one."""
    twice = ContentToken(b"a", -1.0, ((b"a", -1.0), (b"a", -2.0), (b"b", -3.0)), 0)
    whole = Answer("", "a", (), Finished("length", USAGE), (twice,))
    body = CompletionEncoder(ID, MODEL, CREATED, include_usage=False, with_logprobs=True).encode_whole(whole)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "b": -3.0}]  # type: ignore[index]


def named(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("token", "logprob")}


def test_a_response_tells_them_with_its_text() -> None:
    """Its part has them with bytes, the events of its text without, as the SDK's types have both."""
    from openai.types.responses import ResponseOutputMessage, ResponseTextDeltaEvent, ResponseTextDoneEvent

    request = parse_response(include=["message.output_text.logprobs"], top_logprobs=2)
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, request.described)
    events = [*encoder.first_events(), *(made for event in EVENTS for made in encoder.encode(event))]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    without_bytes = [
        {**named(entry), "top_logprobs": list(map(named, top))} for entry, top in zip(CHAT_FORM, CHAT_TOP, strict=True)
    ]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == without_bytes == done["logprobs"]  # type: ignore[attr-defined]
    for delta in deltas:
        ResponseTextDeltaEvent.model_validate_json(json.dumps(delta), strict=True)
    ResponseTextDoneEvent.model_validate_json(json.dumps(done), strict=True)
    [message] = [item for item in encoder.response["output"] if item["type"] == "message"]  # type: ignore[attr-defined]
    assert message["content"][0]["logprobs"] == CHAT_ENTRIES
    ResponseOutputMessage.model_validate_json(json.dumps(message), strict=True)
    assert parse_response(input=[{"role": "user", "content": "x"}, message]).turn.messages[1].blocks


def test_each_message_of_a_response_has_its_own() -> None:
    """A message behind a call begins anew."""
    request = parse_response(include=["message.output_text.logprobs"])
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, request.described)
    call = spoken(ToolCallBlock("c1", "look", "{}"))
    for event in (ContentDelta("Hi", TOKENS[:1]), *call, ContentDelta("Hi", TOKENS[:1]), Finished("stop", USAGE)):
        encoder.encode(event)
    messages = [item for item in encoder.response["output"] if item["type"] == "message"]  # type: ignore[attr-defined]
    assert [len(item["content"][0]["logprobs"]) for item in messages] == [1, 1]
