"""Finds the tags between which a chat template writes what was thought, at load, by rendering an answer that was
thought about.

It knows words in rendered texts. The tags of families that are known by name are `writing.py`'s.
"""

import re
from collections.abc import Iterator

from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.probe import REASONING_FORMS, Prober, in_order, talk
from kvserve.prompt.steps import INLINE, THINK_CLOSE, PromptStep, ThinkTags, WireForm
from kvserve.prompt.switches import keep_arguments
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.writing import REASONING_TAGS

_THOUGHT, _SAID = "kwthought", "kwsaid"
_BEGUN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_LAST_TAG = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\Z")


def own_thinking_tags(tokenizer: Tokenizer) -> ThinkTags | None:
    """Those of a model's template. Raises ModelLoadError."""
    if tokenizer.chat_template is None:
        return None
    return thinking_tags(CompiledTemplate(tokenizer.chat_template, tokenizer.template_variables))


def thinking_tags(template: CompiledTemplate) -> ThinkTags | None:
    """The opening and the closing tag; None where those of a known family stand in the template, where it writes no
    thinking, and where that stands between anything else than two words."""
    if THINK_CLOSE in template.source or any(opening in template.source for opening, _ in REASONING_TAGS):
        return None
    prober = Prober(template, arguments=keep_arguments(template))
    for name, hints in REASONING_FORMS:
        if name != INLINE and any(hint in template.source for hint in hints):
            tags = _found(prober, WireForm(reasoning=name))
            if tags is not None:
                return tags
    return None


def _found(prober: Prober, form: WireForm) -> ThinkTags | None:
    user, *_ = asked = talk(["user"])
    text = prober.render([user, PromptStep("assistant", _SAID, _THOUGHT)], form, tail=False, keep=True)
    if not isinstance(text, str) or not in_order(text, (user.text, _THOUGHT, _SAID)):
        return None
    before, _, behind = text.partition(user.text)[2].partition(_THOUGHT)
    before, closing = before.rstrip(), behind.partition(_SAID)[0].strip()
    headers = (_shared(before, lead) for lead in _leads(prober, form, asked))
    opening = before[min(headers, default=len(before)) :].strip()
    if not opening and (last := _LAST_TAG.search(before)) is not None:  # each answer has a block, if an empty one
        opening = last.group()
    words = [len(tag.split()) for tag in (opening, closing)]
    return (opening, closing) if words == [1, 1] and opening != closing else None


def _leads(prober: Prober, form: WireForm, asked: list[PromptStep]) -> Iterator[str]:
    """What stands before an answer that was not thought about, the last one and an earlier one."""
    answer = PromptStep("assistant", _SAID)
    for steps in ([*asked, answer], [*asked, answer, *talk(["user"])]):
        text = prober.render(steps, form, tail=False, keep=True)
        if isinstance(text, str) and in_order(text, (asked[0].text, _SAID)):
            yield text.partition(asked[0].text)[2].partition(_SAID)[0]


def _shared(one: str, other: str) -> int:
    """How many characters both begin with alike, no tag cut."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    begun = _BEGUN_TAG.search(one[:length]) if length < min(len(one), len(other)) else None
    return length if begun is None else begun.start()
