"""Completions: prompts in all their spellings, refusals, golden streams and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from kvserve.core import (
    Answer,
    AnswerEvent,
    ContentDelta,
    Finished,
    JsonObject,
    ReasoningDelta,
    RequestDefaults,
    RequestId,
    ToolCallBlock,
    ToolCallStart,
    Usage,
    Waiting,
)
from kvserve.errors import BadRequest
from kvserve.protocols.openai_completions import (
    CompletionEncoder,
    CompletionRequest,
    parse_completion,
)

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI

ID, MODEL, CREATED = RequestId("req8"), "org/model", 1_700_000_000
FINISHED = Finished("length", Usage(6, 0, 5))
EVENTS: list[AnswerEvent] = [Waiting(0, 6), ContentDelta("upon"), ContentDelta(" a <think>"), FINISHED]


@pytest.fixture
def parse(defaults: RequestDefaults) -> Callable[..., CompletionRequest]:
    """Parses a completion body given as keywords."""
    return lambda **body: parse_completion(body, {"x-session-id": "s"}, defaults, ID)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2.0, 3], (1, 2, 3)), ([[1, 2]], (1, 2))],
)
def test_one_prompt_in_any_spelling(
    parse: Callable[..., CompletionRequest], prompt: object, expected: object, defaults: RequestDefaults
) -> None:
    """Text, token ids, or a list of one of these."""
    request = parse(prompt=prompt, max_tokens=7, stream=True, stream_options={"include_usage": True}, stop="x")
    turn = request.turn
    assert turn.raw_prompt == expected
    assert (turn.messages, turn.max_tokens, turn.stop_strings, turn.session.session_id) == ((), 7, ("x",), "s")
    assert (turn.protocol, turn.sampling) == ("openai_completions", defaults.sampling)
    assert (request.stream, request.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_named(
    parse: Callable[..., CompletionRequest], body: dict[str, object], param: str
) -> None:
    """Several prompts, echo, suffix, best_of and too many logprobs are a 400 that says so."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param


def test_neutral_values_pass(parse: Callable[..., CompletionRequest]) -> None:
    """Fields that ask for nothing are tolerated."""
    parse(prompt="x", echo=False, suffix=None, best_of=1, n=1, logprobs=None)
    assert parse(prompt="x", logprobs=False).turn.num_top_logprobs is None


@pytest.mark.parametrize("include_usage", [False, True])
def test_streams_have_their_wire_form(
    include_usage: bool,
    golden: Callable[[str, str], None],
    as_sse: Callable[[Iterable[JsonObject]], str],
    sdk_reading: Callable[..., OpenAI],
) -> None:
    """Byte for byte the golden stream, whose joined text the SDK reads; a keep-alive adds nothing."""
    encoder = CompletionEncoder(ID, MODEL, CREATED, include_usage)
    chunks = [encoder.keep_alive(), *(chunk for event in EVENTS for chunk in encoder.encode(event))]
    wire = as_sse(chunks)
    golden("completion_usage.sse" if include_usage else "completion.sse", wire)
    read = list(sdk_reading(wire).completions.create(model="m", prompt="x", stream=True))
    choices = [choice for chunk in read for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "upon a <think>"
    assert choices[-1].finish_reason == "length"
    assert (read[-1].usage is not None) == include_usage


def test_the_answer_has_its_wire_form(golden: Callable[[str, str], None], sdk_reading: Callable[..., OpenAI]) -> None:
    """Byte for byte the golden body, and the SDK reads it."""
    wire = (
        json.dumps(
            CompletionEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(
                Answer("", "upon a <think>", (), FINISHED)
            ),
            indent=1,
        )
        + "\n"
    )
    golden("completion.json", wire)
    read = sdk_reading(wire).completions.create(model="m", prompt="x")
    assert (read.id, read.choices[0].text, read.choices[0].finish_reason) == ("cmpl-req8", "upon a <think>", "length")


def test_a_completion_is_not_split() -> None:
    """Reasoning or calls in a completion are a fault of the caller, never lost in silence."""
    encoder = CompletionEncoder(ID, MODEL, CREATED, include_usage=False)
    call = ToolCallBlock("c", "f", "{}")
    for event in (ReasoningDelta("x"), ToolCallStart("c", "f")):
        with pytest.raises(TypeError):
            encoder.encode(event)
    for answer in (Answer("x", "", (), FINISHED), Answer("", "", (call,), FINISHED)):
        with pytest.raises(TypeError):
            CompletionEncoder(ID, MODEL, CREATED, include_usage=False).encode_whole(answer)
