"""One answer from its tokens: deltas, stop strings, the one allowed call, counts and finish reasons."""

import pytest

from kvserve.core import (
    ContentDelta,
    Finished,
    GenerationDone,
    GenerationTiming,
    ReasoningDelta,
    StopReason,
    ToolCallDelta,
    ToolSpec,
)
from kvserve.output.answer import AnswerReader
from kvserve.output.formats import select_format
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner

TOOL = ToolSpec("look", None, {"type": "object", "properties": {}})
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


class Letters:
    """A detokenizer for tokens that are code points."""

    def add(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


def reader(*stops: str, many_calls: bool = True, raw: bool = False) -> AnswerReader:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    splitter = Splitter(select_format("auto", "", tags, None), starts_in_reasoning=False, tools=(TOOL,))
    return AnswerReader(Letters(), StopScanner(stops), None if raw else splitter, allows_many_calls=many_calls)


def done(reason: StopReason) -> GenerationDone:
    return GenerationDone(reason, 5, 2, 0, GenerationTiming(0, 0, 0))


def read(answer: AnswerReader, text: str, reason: StopReason = "stop") -> tuple[str, str, int, Finished]:
    """Reasoning, content, number of calls and the end."""
    events = [*answer.feed([ord(char) for char in text]), *answer.finish(done(reason))]
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    last = events[-1]
    assert isinstance(last, Finished)
    return reasoning, content, sum(isinstance(event, ToolCallDelta) for event in events), last


def test_channels_counts_and_the_stop_token() -> None:
    """Thinking and content are apart; the stop token counts as a token of the answer."""
    reasoning, content, _, end = read(reader(), "<think>\nhm\n</think>\n\nyes")
    assert (reasoning, content, end.reason) == ("hm", "yes", "stop")
    assert end.usage.num_completion_tokens == len("<think>\nhm\n</think>\n\nyes") + 1
    assert end.usage.num_cached_tokens == 2


def test_a_stop_string_ends_content_but_not_thinking() -> None:
    """It is cut from the content and named; tokens behind it do not count; thinking may contain it."""
    _, content, _, end = read(reader("END"), "<think>\nEND\n</think>\nsome END more")
    assert (content, end.reason, end.stop_string) == ("some ", "stop", "END")
    assert end.usage.num_completion_tokens == len("<think>\nEND\n</think>\nsome END")


def test_where_one_call_is_allowed_the_answer_ends_with_it() -> None:
    """parallel_tool_calls=false: nothing after the first call."""
    assert read(reader(many_calls=False), CALL + CALL)[2] == 1
    assert read(reader(), CALL + CALL)[2] == 2


@pytest.mark.parametrize(("reason", "finish"), [("length", "length"), ("watchdog", "length"), ("shutdown", "length")])
def test_a_cut_answer_says_so(reason: StopReason, finish: str) -> None:
    """Whatever ended the row early, the client reads `length`; an unfinished call stays content."""
    _, content, calls, end = read(reader(), "so " + CALL[:20], reason)
    assert (content, calls, end.reason) == ("so " + CALL[:20], 0, finish)


def test_a_finished_call_gives_its_reason() -> None:
    """A turn with calls ends with `tool_calls`."""
    assert read(reader(), CALL)[3].reason == "tool_calls"


def test_a_raw_prompt_has_no_channels() -> None:
    """Without a splitter every tag is text."""
    assert read(reader(raw=True), "<think>a</think>" + CALL)[1] == "<think>a</think>" + CALL
