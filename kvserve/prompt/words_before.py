"""Finds whether words can stand right before calls where one template has no place for words beside calls, and puts
them there: that is where models write them.

The template renders the calls alone, with a mark before the first name; the words go before what opens the calls. That
is told by a row of calls, which is handed in. It knows no requests.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvserve.core import CallParts
from kvserve.prompt.call_words import pattern_of
from kvserve.prompt.compiled import Refusal
from kvserve.prompt.conform import Dialect
from kvserve.prompt.control import CALL
from kvserve.prompt.steps import PromptStep, WireForm

_SAID, _THOUGHT, _ANSWER, _LATER = "kwsaid", "kwthought", "kwanswer", "kwlater"
_ESCAPED = CALL.encode("ascii", "backslashreplace").decode()

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


def placed(text: str, steps: Sequence[PromptStep], form: WireForm) -> str | Refusal:
    """The rendered text of these steps with the words before their calls; a refusal where some would be lost."""
    words = [step.text for step in steps if step.text and step.calls]
    if form.call_opening is None or not words:
        return text
    found = list(re.finditer(f"({pattern_of(form.call_opening)}){CALL}", text))
    if len(found) != len(words) or _ESCAPED in text:
        return Refusal("it writes calls otherwise behind words")
    pieces, end = list[str](), 0
    for match, said in zip(found, words, strict=True):
        pieces += [text[end : match.start()], said, match[1]]
        end = match.end()
    return "".join((*pieces, text[end:])).replace(CALL, "")  # of names that it writes again with the result


def _talks(form: WireForm, loop: Sequence[PromptStep]) -> Iterator[list[PromptStep]]:
    """A loop with words before its calls that runs and that was answered, without thinking and behind such."""
    for thought in ("", _THOUGHT) if form.reasoning is not None else ("",):
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
    """Whether the same stands before words that calls follow as before an answer, behind a question and a result."""
    user, first, result, second, last = loop
    for lead, calls, behind in (((user,), first, result), ((user, first, result), second, last)):
        asked = replace(calls, text=_SAID)
        answered = (*lead, PromptStep("assistant", _ANSWER), PromptStep("user", _LATER))
        before, said, _ = _written((*lead, asked, behind), form, render).partition(_SAID)
        header, answer, _ = _written(answered, form, render).partition(_ANSWER)
        texts = (text.rpartition(lead[-1].text)[2].rstrip() for text in (before, header))
        if not said or not answer or len(set(texts)) > 1:
            return False
    return True


def _written(steps: Sequence[PromptStep], form: WireForm, render: Renders) -> str:
    """The steps with the words; "" where they cannot be written."""
    text = render(steps, form)
    text = placed(text, steps, form) if isinstance(text, str) else text
    return text if isinstance(text, str) else ""
