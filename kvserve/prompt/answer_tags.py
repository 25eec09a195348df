"""Finds the tags around what an answer says, at load, where the model writes them itself: prompts end before them.

They are tokens of the model and carry no text, so readers of answers leave them out. It knows words in rendered texts.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.probe import Prober, in_order, talk
from kvserve.prompt.steps import PromptStep, ThinkTags, WireForm
from kvserve.prompt.switches import keep_arguments
from kvserve.prompt.thinking_tags import own_thinking_tags
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.writing import REASONING_TAGS

_SAID = "kwsaid"
_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_FIRST_TAG, _LAST_TAG = re.compile(_TAG), re.compile(rf"(?:{_TAG})\Z")


@dataclass(frozen=True, slots=True)
class ReadingTags:
    """How a model's answers are read: its template's own tags of thinking, those around what an answer says, and the
    part of thinking's closing tag that stands before calls too, if that is not all of it."""

    thinking: ThinkTags | None
    around: tuple[str, ...] = ()
    between: tuple[str, ...] = ()


def reading_tags(tokenizer: Tokenizer) -> ReadingTags:
    """Those of a model's template. Raises ModelLoadError."""
    thinking = own_thinking_tags(tokenizer)
    if tokenizer.chat_template is None:
        return ReadingTags(thinking)
    tokens = tuple(token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
    stops = {tokenizer.decode([id]) for id in tokenizer.stop_token_ids}
    template = CompiledTemplate(tokenizer.chat_template, tokenizer.template_variables)
    around = answer_tags(template, {*tokens} - stops, thinking)
    if thinking is None or not around or not thinking[1].endswith(around[0]):
        return ReadingTags(thinking, around)
    # thinking, words and calls are messages of one turn: the end of one and the header of the next stand between them
    between = thinking[1].removesuffix(around[0])
    headers = (between.removeprefix(closing) for closing in around[1:] if between.startswith(closing))
    silent = (*around, *(header for header in headers if header.startswith(tokens)))
    return ReadingTags(thinking, silent, (between,) if between.startswith(tokens) else ())


def answer_tags(
    template: CompiledTemplate, tokens: Collection[str], thinking: ThinkTags | None = None
) -> tuple[str, ...]:
    """The opening tag and, where there is one, the closing tag; none where an answer begins right where a prompt ends,
    or with more than a tag. Only `tokens` can be such tags, and no tags of thinking."""
    prober, asked = Prober(template, arguments=keep_arguments(template)), talk(["user"])
    known = {tag for pair in REASONING_TAGS if pair[0] in template.source for tag in pair} | {*(thinking or ())}
    prompts = {_bare(text, known) for text in _behind(prober, [asked], asked[0].text, tail=True)}
    answered = [*asked, PromptStep("assistant", _SAID)]
    texts = [*_behind(prober, [answered, [*answered, *talk(["user"])]], asked[0].text, tail=False)]
    if not prompts or not all(_SAID in text for text in texts):
        return ()
    leads, ends = {text.partition(_SAID)[0].rstrip() for text in texts}, {text.partition(_SAID)[2] for text in texts}
    opening = _only(_LAST_TAG.search(lead) for lead in leads)
    if opening not in tokens or opening in known:
        return ()
    if not {_bare(lead.removesuffix(opening), known) for lead in leads} <= prompts:
        return ()
    closing = _only(_FIRST_TAG.match(end.lstrip()) for end in ends)
    return (opening, closing) if closing in tokens and closing not in known else (opening,)


def _bare(text: str, tags: Collection[str]) -> str:
    """The text without white space and these tags."""
    for tag in sorted(tags, key=len, reverse=True):
        text = text.replace(tag, "")
    return "".join(text.split())


def _only(found: Iterable[re.Match[str] | None]) -> str:
    """The text that all have found; "" where they differ."""
    texts = {match.group() if match is not None else "" for match in found}
    return texts.pop() if len(texts) == 1 else ""


def _behind(prober: Prober, talks: list[list[PromptStep]], asked: str, *, tail: bool) -> Iterator[str]:
    """What stands behind the question in each of these, whether earlier thinking is kept or not."""
    for steps in talks:
        for keep in (False, True):
            text = prober.render(steps, WireForm(), tail=tail, keep=keep)
            if isinstance(text, str) and in_order(text, [asked]):
                yield text.partition(asked)[2]
