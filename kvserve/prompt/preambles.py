"""Finds whether one template forgets a running loop's thinking for words before a call, and where else they can stand;
and whether a system's words begin a question.

It knows one wire form, which counts only where the template's own rendering shows it, and no requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvserve.prompt.compiled import Refusal
from kvserve.prompt.control import NOTHING
from kvserve.prompt.steps import Preamble, PromptStep, WireForm

KNOWN = (
    # harmony, whose word for them it is: until it answers, the model speaks in the channel of its calls
    Preamble(
        end="<|end|>",
        header="<|start|>assistant<|channel|>commentary<|message|>",
        unthought=f"<|start|>assistant<|channel|>analysis<|message|>{NOTHING}<|end|>",
    ),
)
_THOUGHT, _SECOND, _WORDS = "kwthought", "kwsecond", "kwwords"

type Renders = Callable[[Sequence[PromptStep], WireForm], str | Refusal]


def with_preamble(form: WireForm, render: Renders, loop: Sequence[PromptStep]) -> WireForm:
    """The form with that of words before a call, if the template needs one. `loop` is a question with two calls and
    their results, without thinking."""
    rows = (each for each in KNOWN if _stands(each, form, render, loop) and _is_needed(form, render, loop))
    return replace(form, preamble=next(rows, None))


def with_system_joined(form: WireForm, render: Renders) -> WireForm:
    """The form with whether a system's text before a question is written as one text with it, as two messages of a user
    are joined that the template refuses."""
    system, user = PromptStep("system", _WORDS), PromptStep("user", _SECOND)
    whole = render((replace(user, text=f"{_WORDS}\n\n{_SECOND}"),), form)
    alternates = not isinstance(render((user, user), form), str)
    return replace(form, joins_system=alternates and isinstance(whole, str) and render((system, user), form) == whole)


def with_words_joined(steps: Sequence[PromptStep]) -> list[PromptStep]:
    """The steps, with all that a message thinks and says before a call in one: thinking behind words makes an answer of
    these. Joined as a client of chat completions gets them, so that the model's own tokens still stand for it."""
    rows: list[PromptStep] = []
    for step in reversed(steps):
        if rows and (step.kind, rows[-1].kind) == ("assistant", "calls") and step.index == rows[-1].index:
            last = rows.pop()
            step = replace(last, text=step.text + last.text, reasoning=step.reasoning + last.reasoning)
        rows.append(step)
    return rows[::-1]


def _stands(preamble: Preamble, form: WireForm, render: Renders, loop: Sequence[PromptStep]) -> bool:
    """Whether it is a message of its own behind the thinking, and what is written of no thinking stands before it."""
    user, first, result, second, last = loop
    thought = replace(first, reasoning=_THOUGHT)
    words = replace(second, reasoning=preamble.behind("", _WORDS))
    alone = render((user, thought, result, words, last), form)
    if not isinstance(alone, str) or alone.count(f"{preamble.unthought}{preamble.header}{_WORDS}") != 1:
        return False
    said = preamble.behind(_SECOND, _WORDS)
    both = render((user, thought, result, replace(second, reasoning=said), last), form)
    return isinstance(both, str) and 0 <= both.find(_THOUGHT) < both.find(said)


def _is_needed(form: WireForm, render: Renders, loop: Sequence[PromptStep]) -> bool:
    """Whether words in a message of their own cost the thinking before them."""
    user, first, result, second, last = loop
    words = PromptStep("assistant", _WORDS)
    text = render((user, replace(first, reasoning=_THOUGHT), result, words, second, last), form)
    return isinstance(text, str) and _WORDS in text and _THOUGHT not in text
