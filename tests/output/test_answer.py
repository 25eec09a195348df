"""One answer from its tokens: deltas, stop strings, the one allowed call, counts and finish reasons."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import (
    ContentDelta,
    Drafted,
    Drafting,
    Finished,
    GenerationDone,
    GenerationTiming,
    ReasoningDelta,
    StopReason,
    ToolCallEnd,
    ToolCallStart,
    ToolSpec,
)
from kvserve.output.answer import AnswerReader, SaidTokens
from kvserve.output.formats import select_format
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner
from tests.calls import calls_of

TOOL = ToolSpec("look", None, {"type": "object", "properties": {}})
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


OPENED = CALL[: CALL.index("{}") + 1]


class Letters:
    """A detokenizer for tokens that are code points."""

    def add(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


class Pieces:
    """A detokenizer whose tokens are numbers of texts; "" is a token that only begins a character."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def add(self, token: int) -> str:
        return self._texts[token]

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
    return reasoning, content, sum(isinstance(event, ToolCallStart) for event in events), last


def test_tags_with_nothing_between_them_are_no_thought() -> None:
    """They are tokens of the answer, and none of its thinking, which there is none of."""
    for text in ("<think></think>yes", "<think>\n\n</think>\n\nyes"):
        reasoning, content, _, end = read(reader(), text)
        assert (reasoning, content, end.usage.num_reasoning_tokens) == ("", "yes", 0)
        assert end.usage.num_completion_tokens == len(text) + 1
    assert read(reader(), "<think>hm</think>yes")[3].usage.num_reasoning_tokens > 2


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


def test_drafted_tokens_are_counted_as_accepted_or_rejected() -> None:
    """Of all sources; what was accepted behind a stop string is no token of the answer."""
    drafting = Drafting({"prediction": Drafted(9, 6), "records": Drafted(4, 1)}, num_steps=9)
    for said, num_accepted in (("abcdefgh", 7), ("abENDfgh", 5)):
        answer = reader("END")
        answer.feed(list(map(ord, said)))
        end = answer.finish(replace(done("stop"), drafting=drafting))[-1]
        assert isinstance(end, Finished)
        assert (end.usage.num_accepted_tokens, end.usage.num_rejected_tokens) == (num_accepted, 6)


def test_where_one_call_is_allowed_the_answer_ends_with_it() -> None:
    """parallel_tool_calls=false: nothing after the first call."""
    assert read(reader(many_calls=False), CALL + CALL)[2] == 1
    assert read(reader(), CALL + CALL)[2] == 2


@pytest.mark.parametrize("reason", ["length", "watchdog"])
def test_a_cut_answer_says_so(reason: StopReason) -> None:
    """Whichever limit ended the row, the client reads `length`; an unfinished call stays content."""
    _, content, calls, end = read(reader(), "so " + CALL[:20], reason)
    assert (content, calls, end.reason) == ("so " + CALL[:20], 0, "length")


@pytest.mark.parametrize("reason", ["shutdown", "cancelled"])
def test_an_answer_that_was_broken_off_has_no_end(reason: StopReason) -> None:
    """What was held back is told, but no finish reason: it would say that the answer is all there is. One that was over
    before (a stop string) keeps its own."""
    answer = reader()
    said = [*answer.feed([ord(char) for char in "so " + CALL[:20]]), *answer.finish(done(reason))]
    assert "".join(event.text for event in said if isinstance(event, ContentDelta)) == "so " + CALL[:20]
    assert not any(isinstance(event, Finished) for event in said) and answer.finish_reason is None
    assert read(reader("END"), "some END more", reason)[3].reason == "stop"


@pytest.mark.parametrize("reason", ["shutdown", "cancelled"])
def test_a_call_that_was_broken_off_is_not_ended(reason: StopReason) -> None:
    """Clients run a call once its end is told. One whose arguments are whole is told of."""
    for written, is_ended in ((OPENED, False), (CALL.removesuffix("</tool_call>"), True)):
        answer = reader()
        said = [*answer.feed([ord(char) for char in written]), *answer.finish(done(reason))]
        assert any(isinstance(event, ToolCallStart) for event in said)
        assert any(isinstance(event, ToolCallEnd) for event in said) == is_ended


def test_a_finished_call_gives_its_reason() -> None:
    """A turn with calls ends with `tool_calls`."""
    assert read(reader(), CALL)[3].reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "reason", "finish", "arguments"),
    [
        (OPENED + '"a": "b', "length", "length", '{"a": "b'),
        (OPENED + '"a": "b', "stop", "stop", '{"a": "b'),
        (CALL + OPENED + '"a": "b', "stop", "tool_calls", '{"a": "b'),
        (CALL[:-14], "length", "length", "{}"),
        (CALL[:-14], "stop", "tool_calls", "{}"),
        (OPENED + "oops}}</tool_call>", "stop", "tool_calls", "{oops}}"),
    ],
)
def test_a_call_that_was_cut_is_none_to_run(text: str, reason: StopReason, finish: str, arguments: str) -> None:
    """It has begun, and what there is of it is told; `tool_calls` is said where a call came to its end."""
    answer = reader()
    events = [*answer.feed([ord(char) for char in text]), *answer.finish(done(reason))]
    assert calls_of(events)[-1].call.arguments == arguments
    assert isinstance(events[-1], Finished) and events[-1].reason == finish


def test_a_stop_string_is_not_looked_for_in_arguments() -> None:
    """It ends content only, however a call's arguments are cut."""
    answer = reader("END")
    events = [
        *answer.feed([ord(char) for char in OPENED + '"a": "END"}}\n</tool_call> END']),
        *answer.finish(done("stop")),
    ]
    assert calls_of(events)[0].call.arguments == '{"a": "END"}' and answer.stop_string == "END"


def test_a_raw_prompt_has_no_channels() -> None:
    """Without a splitter every tag is text."""
    assert read(reader(raw=True), "<think>a</think>" + CALL)[1] == "<think>a</think>" + CALL


def said_tokens(*texts: str, stop: str = "END", many_calls: bool = True) -> SaidTokens:
    """What an answer of these tokens consists of, read two tokens at a time as they may arrive."""
    answer = reader(stop, many_calls=many_calls)
    answer.detokenizer = Pieces(texts)
    tokens = list(range(len(texts)))
    for start in range(0, len(tokens), 2):
        answer.feed(tokens[start : start + 2])
    answer.finish(done("stop"))
    return answer.said_tokens()


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("so", " it", " is"), SaidTokens(3)),
        (("so", " it", " END", " more"), SaidTokens(2, " ")),
        (("so", " it", "END", " more"), SaidTokens(2)),
        (("so", " E", "N", "D more"), SaidTokens(1, " ")),
        (("END", " more"), SaidTokens(0)),
        (("", "", "a", "", "eEND"), SaidTokens(3, "e")),
        (("<think>\n", "END", "\n</think>\n\n", "yes", " END"), SaidTokens(4, " ")),
        (("<think>\n", "hm", "\n</think>\n\nEN", "D"), SaidTokens(2, "\n</think>\n\n")),
    ],
)
def test_an_answer_ends_in_tokens_where_it_ends_in_words(texts: Sequence[str], said: SaidTokens) -> None:
    """A stop string and what follows is no part of it; what was said of the token that it began in comes as text."""
    assert said_tokens(*texts) == said


def test_what_follows_the_one_allowed_call_is_no_part_of_the_answer() -> None:
    """Tokens that had arrived together with its end are not counted."""
    assert said_tokens("so", CALL, CALL, "more", many_calls=False) == SaidTokens(2)


@given(st.lists(st.sampled_from(["a", " b", "E", "N", "D", "EN", "xEND", "", "\n"]), max_size=12))
def test_the_tokens_and_the_rest_are_what_was_said(texts: list[str]) -> None:
    """Whatever the tokens, together they are the text before the first stop string."""
    said = said_tokens(*texts)
    before, stop, _ = "".join(texts).partition("END")
    assert "".join(texts[: said.num_tokens]) + said.rest == (before if stop else "".join(texts))
