"""Marks images inside text: a mark stands for an image from the message to the model's tokens. It decodes no image.

    message blocks -> text with marks -> chat template -> the family's words around each mark -> ids and spans

A client cannot write a mark by accident, and a barrier cuts what it writes like the model's own placeholder, so that
its tokens are those of plain text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.core import Block, ImageBlock, ImageSpan, ImageWords, Message, TextBlock, ToolBlock, ToolResultBlock

EDGE = "\ufdd0"
"""Around every mark: a noncharacter of Unicode, which texts for interchange do not hold."""

BARRIER = EDGE + EDGE
_MARK = re.compile(f"{EDGE}([0-9a-f]{{64}})?{EDGE}")

SEES_NOTHING = ImageWords("", "", ())
"""For a model without images, whose prompts have no marks."""

type Runs = Mapping[str, tuple[int, ...]]
"""The ids that stand for each image, by its digest."""


@dataclass(frozen=True, slots=True)
class MarkedIds:
    """The ids of a text, and which of them stand for images."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


def mark_of(digest: str) -> str:
    """The mark of an image; `digest` is 64 hexadecimal digits."""
    return f"{EDGE}{digest}{EDGE}"


def with_marks(messages: Iterable[Message], words: ImageWords) -> tuple[Message, ...]:
    """The messages with a mark for every image, whose `source` is its digest, and typed placeholders cut.

    The text right before and behind an image stays on its line: templates write nothing between parts. A message
    without anything to mark stays the same object, so that memos find it.
    """
    return tuple(
        message
        if message.role == "assistant" or not any(_needs_marks(block, words) for block in message.blocks)
        else replace(message, blocks=tuple(_marked_blocks(message.blocks, words)))
        for message in messages
    )


def with_words(text: str, words: ImageWords) -> str:
    """A rendered prompt with the family's words around every image's mark."""
    if EDGE not in text:
        return text
    return _MARK.sub(lambda mark: f"{words.head}{mark[0]}{words.tail}" if mark[1] else mark[0], text)


def encode_marked(
    encode: Callable[..., tuple[int, ...]], text: str, runs: Runs, *, adds_special_tokens: bool = False
) -> MarkedIds:
    """The ids of a text with marks. A mark that names no image of `runs` is plain text.

    `adds_special_tokens` adds what the tokenizer puts before a text.
    """
    if EDGE not in text:
        return MarkedIds(encode(text, add_special_tokens=True) if adds_special_tokens else encode(text))
    ids: list[int] = []
    images: list[ImageSpan] = []
    if adds_special_tokens:
        ids += encode("", add_special_tokens=True)
    start = 0
    for mark in _MARK.finditer(text):
        if mark[1] is not None and mark[1] not in runs:
            continue
        ids += encode(text[start : mark.start()])
        if mark[1] is not None:
            images.append(ImageSpan(len(ids), len(ids) + len(runs[mark[1]]), mark[1]))
            ids += runs[mark[1]]
        start = mark.end()
    ids += encode(text[start:])
    return MarkedIds(tuple(ids), tuple(images))


def without_barriers(text: str) -> str:
    """A text with a client's typed placeholders as they were typed."""
    return _MARK.sub(lambda mark: mark[0] if mark[1] else "", text) if EDGE in text else text


def _needs_marks(block: Block, words: ImageWords) -> bool:
    """Whether it holds an image, or text that a barrier must cut."""
    match block:
        case TextBlock(text):
            return EDGE in text or any(token in text for token in words.guarded)
        case ToolResultBlock():
            return any(_needs_marks(part, words) for part in block.blocks)
        case _:
            return isinstance(block, ImageBlock)


def _marked_blocks(blocks: Sequence[Block], words: ImageWords) -> Iterator[Block]:
    """The blocks with adjacent text and images joined into one text; words of the server's stay apart."""
    last: TextBlock | None = None
    after_image = False
    for block in blocks:
        if isinstance(block, TextBlock | ImageBlock):
            is_image = isinstance(block, ImageBlock)
            said = _told(block, words)
            if last is not None and (is_image or after_image) and not (last.is_ours or said.is_ours):
                said = TextBlock(last.text + said.text)
            elif last is not None:
                yield last
            last, after_image = said, is_image
        else:
            if last is not None:
                yield last
            last, after_image = None, False
            yield _marked_result(block, words) if isinstance(block, ToolResultBlock) else block
    if last is not None:
        yield last


def _told(block: TextBlock | ImageBlock, words: ImageWords) -> TextBlock:
    """A text, guarded, or an image's mark."""
    if isinstance(block, ImageBlock):
        return TextBlock(mark_of(block.source))
    return replace(block, text=_guarded(block.text, words))


def _marked_result(block: ToolResultBlock, words: ImageWords) -> ToolResultBlock:
    parts = _marked_blocks(block.blocks, words)
    return replace(block, blocks=tuple(part for part in parts if isinstance(part, TextBlock | ToolBlock)))


def _guarded(text: str, words: ImageWords) -> str:
    """A client's text in which the model's placeholders cannot become tokens, nor noncharacters marks."""
    text = text.replace(EDGE, "\ufffd")
    for token in words.guarded:
        text = text.replace(token, token[:1] + BARRIER + token[1:])
    return text
