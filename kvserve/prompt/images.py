"""The images of a turn: each is decoded and measured once, from then on known by the bytes that it came in.

It joins what a client sent (`images_source`) and what a prompt says (`images_text`); how many tokens an image has is
answered by a reader that is handed in. Safe for several threads.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from PIL import Image

from kvserve.core import ImageBlock, ImageFacts, ImageInput, ImageWords, MeasuredImage, Message, ToolResultBlock, Turn
from kvserve.errors import BadRequest
from kvserve.prompt.images_source import ImageLimits, read_image
from kvserve.prompt.images_text import with_marks, with_words
from kvserve.prompt.memo import Memo
from kvserve.prompt.template import PromptText

LIMITS = ImageLimits()
MEMO_BYTES = 16 * 2**20
_FACTS_BYTES = 512
_BYTES_PER_TOKEN = 8


type Reader = Callable[[Image.Image], MeasuredImage]
"""Raises BadRequest for a picture that the model's processor refuses."""


class Images:
    """One model's images."""

    def __init__(self, reader: Reader, words: ImageWords, limits: ImageLimits = LIMITS) -> None:
        self._reader = reader
        self._words = words
        self._limits = limits
        self._known: Memo[ImageFacts] = Memo(MEMO_BYTES)

    def look(self, turn: Turn) -> Turn:
        """The turn with every image named by its digest, and its images. Raises BadRequest.

        A picture that was measured before is not decoded again, unless the model must look at it again.
        """
        inputs: dict[str, ImageInput] = {}

        def digest_of(block: ImageBlock) -> ImageBlock:
            image = self._input(block.source)
            # The same pixels in another file are the same image; the first has been measured, if any was.
            inputs.setdefault(image.facts.digest, image)
            return ImageBlock(image.facts.digest)

        messages = tuple(_with_images(message, digest_of) for message in turn.messages)
        return replace(turn, messages=messages, images=tuple(inputs.values()))

    def marked(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """The messages as a chat template reads them."""
        return with_marks(messages, self._words)

    def worded(self, prompt: PromptText, images: Iterable[ImageInput]) -> PromptText:
        """A rendered prompt as the stitcher reads it."""
        runs = {image.facts.digest: image.facts.ids for image in images}
        return replace(prompt, text=with_words(prompt.text, self._words), runs=runs)

    def _input(self, source: str) -> ImageInput:
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        facts = self._known.get(key)
        if facts is not None:
            return ImageInput(facts, lambda: self._measured(source).tower_input)
        measured = self._measured(source)
        self._known.put(key, measured.facts, _FACTS_BYTES + _BYTES_PER_TOKEN * len(measured.facts.ids))
        return ImageInput(measured.facts, lambda: measured.tower_input)

    def _measured(self, source: str) -> MeasuredImage:
        return self._reader(read_image(source, self._limits))


def _with_images(message: Message, name: Callable[[ImageBlock], ImageBlock]) -> Message:
    """The message with its images replaced, those in tool results too. The same object where there are none."""
    if message.role == "assistant" and any(isinstance(block, ImageBlock) for block in message.blocks):
        raise BadRequest("An assistant's message cannot hold an image.", param="messages")
    blocks = tuple(
        name(block)
        if isinstance(block, ImageBlock)
        else replace(block, blocks=tuple(name(b) if isinstance(b, ImageBlock) else b for b in block.blocks))
        if isinstance(block, ToolResultBlock) and any(isinstance(b, ImageBlock) for b in block.blocks)
        else block
        for block in message.blocks
    )
    return message if blocks == message.blocks else replace(message, blocks=blocks)
