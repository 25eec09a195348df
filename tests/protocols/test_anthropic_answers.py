"""Answers of /v1/messages: golden wire files, the real SDK as reader, and streams that say what whole answers say."""

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    Finished,
    OutputDelta,
    ReasoningDelta,
    RequestId,
    ToolCallBlock,
    ToolCallEnd,
    Usage,
    Waiting,
)
from kvserve.errors import EngineFailure
from kvserve.protocols.anthropic_answers import MessageStreamEncoder, PromptCounts, whole_message
from kvserve.protocols.sealed_thinking import signed_text
from tests.calls import INTRICATE, every_cut, spoken
from tests.laws import num_examples
from tests.protocols.anthropic_wire import as_named_sse, sdk_reading

type Golden = Callable[[str, str], None]
type Event = dict[str, Any]

ID, MODEL = RequestId("req7"), "org/model"
COUNTS = PromptCounts(num_prompt_tokens=120, num_marked_tokens=110)
USAGE = Usage(num_prompt_tokens=120, num_cached_tokens=96, num_completion_tokens=9, num_reasoning_tokens=4)
FOUND = Waiting(96, 120, 96)
CALLS = [
    ToolCallBlock("call0a", "bash", '{"command": "ls \\"é\\""}'),
    ToolCallBlock("call0b", "read", '{"path":"日本.txt","limit":5}'),
]
SCENARIOS: dict[str, list[AnswerEvent]] = {
    "text": [Waiting(0, 120), FOUND, ContentDelta("Hel"), ContentDelta("lo 😀"), Finished("stop", USAGE)],
    "thinking_text": [
        FOUND,
        ReasoningDelta("I should "),
        ReasoningDelta("greet.\n"),
        ContentDelta("\n\n"),
        ContentDelta("Hello"),
        Finished("stop", USAGE),
    ],
    "tool_use": [
        FOUND,
        ContentDelta("I look."),
        ContentDelta("\n"),
        *spoken(CALLS[0]),
        Finished("tool_calls", USAGE),
    ],
    "two_tools": [
        FOUND,
        ReasoningDelta("Both."),
        ContentDelta("\n\n"),
        *spoken(CALLS[0]),
        ContentDelta("\n"),
        *spoken(CALLS[1], [1, 12]),
        Finished("tool_calls", USAGE),
    ],
    "max_tokens": [FOUND, ContentDelta("Once upon a"), Finished("length", USAGE)],
    "stop_sequence": [FOUND, ContentDelta("One, two, "), Finished("stop", USAGE, stop_string="three")],
    "context_full": [FOUND, ContentDelta("Once upon a"), Finished("length", USAGE, is_context_full=True)],
}


def stream(events: Iterable[AnswerEvent], *, shows_thinking: bool = True, counts: PromptCounts = COUNTS) -> list[Event]:
    """All events of an answer's stream."""
    encoder = MessageStreamEncoder(ID, MODEL, lambda: counts, shows_thinking=shows_thinking)
    return [made for event in events for made in encoder.encode(event)]


def types(events: Iterable[Event]) -> list[str]:
    return [str(event["type"]) for event in events]


@pytest.mark.parametrize("name", SCENARIOS)
def test_streams_have_their_wire_form(name: str, golden: Golden) -> None:
    """Byte for byte the golden stream: message, blocks one behind the other, end."""
    golden(f"anthropic_{name}.sse", as_named_sse(stream(SCENARIOS[name])))


def test_an_error_in_the_middle_has_its_wire_form(golden: Golden) -> None:
    """The last event is the error's, under its own name."""
    encoder = MessageStreamEncoder(ID, MODEL, lambda: COUNTS, shows_thinking=True)
    events = [made for event in (FOUND, ContentDelta("Hel")) for made in encoder.encode(event)]
    golden("anthropic_error.sse", as_named_sse([*events, encoder.error_chunk(EngineFailure("The row failed."))]))


@pytest.mark.parametrize("name", SCENARIOS)
def test_whole_answers_have_their_wire_form(name: str, golden: Golden) -> None:
    """The golden body, which the SDK reads as its own type without leftovers."""
    body = whole_message(stream(SCENARIOS[name]))
    golden(f"anthropic_{name}.json", json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    from anthropic.types import Message

    message = Message.model_validate(body)
    assert json.loads(message.model_dump_json(exclude_unset=True)) == body


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sdk_puts_the_stream_together(name: str) -> None:
    """What the SDK accumulates of a stream is the whole message."""
    events = stream(SCENARIOS[name])
    with sdk_reading(as_named_sse(events)).messages.stream(model="m", max_tokens=9, messages=[]) as read:
        message = read.get_final_message()
    body = whole_message(events)
    assert [block.to_dict() for block in message.content] == body["content"]
    assert (message.id, message.stop_reason, message.stop_sequence) == (
        body["id"],
        body["stop_reason"],
        body["stop_sequence"],
    )
    assert message.usage.to_dict() == body["usage"]


TEXTS = st.text(alphabet="ab \n", max_size=4)
CUTS = st.sets(st.integers(1, 30), max_size=4)
groups: st.SearchStrategy[list[OutputDelta]] = st.one_of(
    TEXTS.map(lambda text: [ReasoningDelta(text)]),
    TEXTS.map(lambda text: [ContentDelta(text)]),
    st.builds(spoken, st.sampled_from(CALLS), CUTS),
)
answers = st.lists(groups, max_size=12).map(lambda each: [delta for group in each for delta in group])


@given(answers, st.booleans(), st.booleans())
@settings(max_examples=num_examples(50))
def test_any_answer_is_well_formed_and_says_what_the_model_wrote(
    said: list[OutputDelta], shows_thinking: bool, is_found_first: bool
) -> None:
    """Blocks are opened and closed in order and none is empty; but for white space between blocks nothing is lost."""
    events = stream(
        [*([FOUND] if is_found_first else []), *said, Finished("stop", USAGE)], shows_thinking=shows_thinking
    )
    kinds = types(events)
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == 1
    open_index, num_blocks = None, 0
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_index is None and event["index"] == num_blocks
                open_index, num_blocks = num_blocks, num_blocks + 1
            case "content_block_delta":
                assert event["index"] == open_index
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case other:
                raise AssertionError(other)
    assert open_index is None
    body: Event = whole_message(events)
    content = body["content"]
    texts = [block["text"] for block in content if block["type"] == "text"]
    thinking = [signed_text(block["signature"]) or "" for block in content if block["type"] == "thinking"]
    assert all(text.strip() for text in [*texts, *thinking])
    assert _letters(*texts) == _letters(*(delta.text for delta in said if isinstance(delta, ContentDelta)))
    assert _letters(*thinking) == _letters(*(delta.text for delta in said if isinstance(delta, ReasoningDelta)))
    inputs = [block["input"] for block in content if block["type"] == "tool_use"]
    assert inputs == [json.loads(delta.call.arguments) for delta in said if isinstance(delta, ToolCallEnd)]
    if not shows_thinking:
        assert all(block["thinking"] == "" for block in content if block["type"] == "thinking")
        assert "thinking_delta" not in json.dumps(events)
    else:
        assert thinking == [block["thinking"] for block in content if block["type"] == "thinking"]


def _letters(*texts: str) -> str:
    return "".join("".join(texts).split())


@given(answers, st.data())
@settings(max_examples=num_examples(50))
def test_the_cut_of_the_pieces_does_not_matter(said: list[OutputDelta], data: st.DataObject) -> None:
    """One letter at a time or in larger pieces: the message is the same."""
    pieces: list[OutputDelta] = []
    for delta in said:
        if not isinstance(delta, ReasoningDelta | ContentDelta):
            pieces.append(delta)
            continue
        cuts = sorted({0, len(delta.text), *data.draw(st.lists(st.integers(0, len(delta.text)), max_size=3))})
        pieces += [type(delta)(delta.text[a:b]) for a, b in pairwise(cuts)]
    end = Finished("stop", USAGE)
    assert whole_message(stream([FOUND, *pieces, end])) == whole_message(stream([FOUND, *said, end]))


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500))
@settings(max_examples=num_examples(50))
def test_the_three_counts_are_the_prompt(num_prompt: int, num_marked: int, num_cached: int) -> None:
    """Input, read and created add up to the prompt's tokens, and nothing is created without a mark."""
    num_marked, num_cached = min(num_marked, num_prompt), min(num_cached, num_prompt)
    usage = PromptCounts(num_prompt, num_marked).usage(num_cached, 7)
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    counts: list[int] = [int(str(usage[name])) for name in names]
    assert sum(counts) == num_prompt and min(counts) >= 0 and counts[2] == num_cached
    assert num_marked or counts[1] == 0


def test_silence_before_the_lookup_is_broken_by_the_message_itself() -> None:
    """No event may come before `message_start`; after it silence is broken by pings, and it comes once."""
    encoder = MessageStreamEncoder(ID, MODEL, lambda: COUNTS, shows_thinking=True)
    assert encoder.encode(Waiting(0, 120)) == []
    assert encoder.keep_alive()["type"] == "message_start"
    assert encoder.keep_alive() == {"type": "ping"}
    assert encoder.encode(FOUND) == []
    end = encoder.encode(Finished("stop", USAGE))
    assert types(end) == ["message_delta", "message_stop"]
    assert end[0]["usage"] == {**COUNTS.usage(96, 9), "output_tokens_details": {"thinking_tokens": 4}}


def test_events_without_an_end_are_no_message() -> None:
    """A cut stream never passes for a whole answer."""
    with pytest.raises(ValueError):
        whole_message(stream([FOUND, ContentDelta("a")]))


@given(answers, CUTS)
@settings(max_examples=num_examples(10))
def test_the_sdk_puts_pieces_of_arguments_together(said: list[OutputDelta], cuts: set[int]) -> None:
    """However a call's arguments are cut, the SDK accumulates the input of the whole message."""
    events = stream([FOUND, *said, *spoken(CALLS[1], cuts), Finished("tool_calls", USAGE)])
    with sdk_reading(as_named_sse(events)).messages.stream(model="m", max_tokens=9, messages=[]) as read:
        message = read.get_final_message()
    assert [block.to_dict() for block in message.content] == whole_message(events)["content"]


def test_the_sdk_has_the_input_wherever_the_arguments_are_cut() -> None:
    """At every single place, inside escapes and numbers too, and one letter at a time."""
    call = ToolCallBlock("call0c", "edit", INTRICATE)
    for cuts in every_cut(INTRICATE):
        events = stream([FOUND, *spoken(call, cuts), Finished("tool_calls", USAGE)])
        pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert len(pieces) == len(cuts) + 1
        with sdk_reading(as_named_sse(events)).messages.stream(model="m", max_tokens=9, messages=[]) as read:
            [block] = read.get_final_message().content
        assert block.to_dict()["input"] == json.loads(INTRICATE), cuts


CUT = ToolCallBlock("call0c", "read", '{"path": "a.py", "limit": 5, "text": "def f')


def test_a_call_that_was_cut_begins_and_says_what_there_is(golden: Golden) -> None:
    """Its pieces go out as they are; where the message comes whole its input cannot be taken for a tool's."""
    events = stream([FOUND, *spoken(CUT, [3], is_cut=True), Finished("length", USAGE)])
    golden("anthropic_cut_call.sse", as_named_sse(events))
    body: Event = whole_message(events)
    [block] = body["content"]
    assert block == {"type": "tool_use", "id": "call0c", "name": "read", "input": {"INVALID_JSON": CUT.arguments}}
    assert body["stop_reason"] == "max_tokens"
    with sdk_reading(as_named_sse(events)).messages.stream(model="m", max_tokens=9, messages=[]) as read:
        message = read.get_final_message()
    assert message.stop_reason == "max_tokens"
    assert message.content[0].to_dict()["input"] == {"path": "a.py", "limit": 5}


def test_nobody_is_told_to_run_a_broken_call() -> None:
    """SDKs take the readable beginning of arguments for all of them: such an answer does not end with `tool_use`."""
    broken = ToolCallBlock("c", "read", '{"path": "say "hi""}')
    events = stream([FOUND, *spoken(CALLS[1]), *spoken(broken, [8]), Finished("tool_calls", USAGE)])
    with sdk_reading(as_named_sse(events)).messages.stream(model="m", max_tokens=9, messages=[]) as read:
        message = read.get_final_message()
    body: Event = whole_message(events)
    assert message.content[1].to_dict()["input"] == {"path": "say "}
    assert body["content"][1]["input"] == {"INVALID_JSON": broken.arguments}
    assert message.stop_reason == body["stop_reason"] == "end_turn"
