"""Finds whether words can stand right before calls where one template has no place for words beside calls, and puts
them there: that is where models write them.

The template renders the calls alone, with a mark before the first name; the words go before what opens the calls. That
is told by a row of calls, which is handed in. It knows no requests.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from kvserve.core import CallParts
from kvserve.prompt.compiled import MessageDict, Refusal
from kvserve.prompt.conform import Dialect
from kvserve.prompt.control import CALL
from kvserve.prompt.steps import PromptStep, WireForm

_SAID, _THOUGHT, _ANSWER, _LATER = "kwsaid", "kwthought", "kwanswer", "kwlater"
type Renders = Callable[[Sequence[PromptStep], WireForm], str | Refusal]


def with_words_before(dialect: Dialect, opening: CallParts, render: Renders, loop: Sequence[PromptStep]) -> Dialect:
    """The dialect with what opens calls, if words before that stand where an answer does and in their order. `loop` is
    a question with two calls and their results."""
    form = replace(dialect.form, call_opening=opening)
    if form.fills_calls or not _begin_as_answers(form, render, loop):
        return dialect
    if not all(_is_shown(steps, form, render) for steps in _talks(form, loop)):
        return dialect
    return replace(dialect, form=form, text_with_calls=True, reasoning_with_text_and_calls=True)


def without_words_before(dialect: Dialect) -> Dialect:
    """The same, with such words in a message of their own."""
    form = replace(dialect.form, call_opening=None)
    return replace(dialect, form=form, text_with_calls=False, reasoning_with_text_and_calls=False)


def placed(marked: str, bare: str, steps: Sequence[PromptStep], form: WireForm) -> str | Refusal:
    """The rendered text with the words before their calls. `marked` has a mark before the first name behind words,
    `bare` has none; a refusal where the mark changed more than that, or stands behind something else than an opening.
    """
    words = [step.text for step in steps if has_words_before(step, form)]
    opening = form.call_opening or ()
    if marked.replace(CALL, "") != bare:
        return Refusal("it writes a call otherwise for its name's sake")
    starts = [start for place in _places(marked) if (start := _opening_before(marked, place, opening)) is not None]
    if len(starts) != len(words):
        return Refusal("it writes calls otherwise behind words")
    ends = [0, *starts, len(marked)]
    pieces = [marked[start:end] for start, end in pairwise(ends)]
    return "".join(piece + said for piece, said in zip(pieces, (*words, ""), strict=True)).replace(CALL, "")


def has_words_before(step: PromptStep, form: WireForm) -> bool:
    """Whether the template is given this step without its words."""
    return form.call_opening is not None and bool(step.text and step.calls)


def without_marks(messages: Iterable[MessageDict]) -> Iterator[MessageDict]:
    """The same messages with the names as they are."""
    for message in messages:
        calls = message.get("tool_calls")
        yield {**message, "tool_calls": [_unmarked(call) for call in calls]} if isinstance(calls, list) else message


def _unmarked(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": call["function"]["name"].removeprefix(CALL)}}


def _places(text: str) -> Iterator[int]:
    place = text.find(CALL)
    while place >= 0:
        yield place
        place = text.find(CALL, place + 1)


def _opening_before(text: str, place: int, opening: CallParts) -> int | None:
    """Where the opening begins that ends at this place; None where none does, as of a name that stands in a result."""
    start = text.rfind(str(opening[0]), 0, place)
    pattern = "".join(re.escape(part) if isinstance(part, str) else f"[^{CALL}]*?" for part in opening)
    return start if start >= 0 and re.fullmatch(pattern, text[start:place]) else None


def _talks(form: WireForm, loop: Sequence[PromptStep]) -> Iterator[list[PromptStep]]:
    """A loop with words before its calls that runs and that was answered, without thinking and behind such."""
    for thought in _thoughts(form):
        said = [
            replace(step, text=f"{_SAID}{number}end", reasoning=thought and f"{thought}{number}end")
            if step.calls
            else step
            for number, step in enumerate(loop)
        ]
        yield said
        yield [*said, PromptStep("assistant", _ANSWER), PromptStep("user", _LATER)]


def _is_shown(steps: Sequence[PromptStep], form: WireForm, render: Renders) -> bool:
    """Whether what each step thinks, if that is written, says and calls stands there once, in this order."""
    text, place = _written(steps, form, render), 0
    for step in steps:
        values = [call.arguments.partition(":")[2].strip('"}') for call in step.calls]
        for word in (step.reasoning if step.reasoning in text else "", step.text, *values):
            place = text.find(word, place)
            if place < 0 or (word and text.count(word) != 1):
                return False
    return True


def _begin_as_answers(form: WireForm, render: Renders, loop: Sequence[PromptStep]) -> bool:
    """Whether the same stands before words that calls follow as before an answer, behind a question and a result,
    behind thinking where both show it and without."""
    user, first, result, second, last = loop
    leads = (((user,), first, result), ((user, first, result), second, last))
    for (lead, calls, behind), thought in product(leads, _thoughts(form)):
        said, answer = replace(calls, text=_SAID, reasoning=thought), PromptStep("assistant", _ANSWER, thought)
        texts = [
            _written((*lead, said, behind), form, render).partition(_SAID),
            _written((*lead, answer, PromptStep("user", _LATER)), form, render).partition(_ANSWER),
        ]
        headers = [before.rpartition(lead[-1].text)[2] for before, found, _ in texts if found]
        if len(headers) != len(texts):
            return False
        if len({bool(thought) and thought in header for header in headers}) == 1 and headers[0] != headers[1]:
            return False
    return True


def _thoughts(form: WireForm) -> tuple[str, ...]:
    return ("", _THOUGHT) if form.reasoning is not None else ("",)


def _written(steps: Sequence[PromptStep], form: WireForm, render: Renders) -> str:
    """The steps with the words; "" where they cannot be written."""
    wordless = [replace(step, text="") if has_words_before(step, form) else step for step in steps]
    marked, bare = render(steps, form), render(wordless, form)
    text = placed(marked, bare, steps, form) if isinstance(marked, str) and isinstance(bare, str) else ""
    return text if isinstance(text, str) else ""
