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
_TAG = re.compile(r"[^\w\s]\S*\w\S*")
_LAST_TAG = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\Z")


def own_thinking_tags(tokenizer: Tokenizer) -> ThinkTags | None:
    """Those of a model's template. Raises ModelLoadError."""
    if tokenizer.chat_template is None:
        return None
    return thinking_tags(CompiledTemplate(tokenizer.chat_template, tokenizer.template_variables))


def thinking_tags(template: CompiledTemplate) -> ThinkTags | None:
    """The opening and the closing tag; None where those of a known family stand in the template, where it writes no
    thinking, where that stands between anything else than two words, and where these could be prose."""
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
    leads = [*_leads(prober, form, asked)]
    opening = before[min((_shared(before, lead) for lead in leads), default=len(before)) :].strip()
    if not opening and _have_block(leads, before, closing) and (last := _LAST_TAG.search(before)) is not None:
        opening = last.group()
    return (opening, closing) if _is_tag(opening) and _is_tag(closing) and opening != closing else None


def _have_block(leads: list[str], before: str, closing: str) -> bool:
    """Whether every answer has the tags, with nothing between them if nothing was thought. Else all that a model says
    before a closing tag, which may never come, would be thinking."""
    return bool(leads) and all(lead[len(before) :].lstrip().startswith(closing) for lead in leads)


def _is_tag(text: str) -> bool:
    """Whether it is one word that no line of prose, of a list or of code begins with by chance."""
    return _TAG.fullmatch(text) is not None


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
