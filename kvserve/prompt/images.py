"""The images of a turn: each is decoded and measured once, from then on known by the bytes that it came in.

It joins what a client sent (`images_source`) and what a prompt says (`images_text`); how many tokens an image has is
answered by a reader that is handed in. Safe for several threads.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from PIL import Image

from kvserve.core import (
    Block,
    ImageBlock,
    ImageFacts,
    ImageInput,
    ImageWords,
    MeasuredImage,
    Message,
    ToolResultBlock,
    Turn,
)
from kvserve.prompt.images_remote import RemotePictures, Visit
from kvserve.prompt.images_source import ImageLimits, decode_image, is_remote, read_image
from kvserve.prompt.images_text import with_marks, with_words
from kvserve.prompt.images_unseen import unseen
from kvserve.prompt.memo import Memo
from kvserve.prompt.template import PromptText

LIMITS = ImageLimits()
MEMO_BYTES = 16 * 2**20
_FACTS_BYTES = 512
_BYTES_PER_TOKEN = 8
INPUT_BYTES = 512 * 2**20
"""Of what the towers of running and waiting requests may still look at: one picture of 16 megapixels takes 400 MB."""


type Reader = Callable[[Image.Image], MeasuredImage]
"""Raises BadRequest for a picture that the model's processor refuses."""


class Images:
    """One model's images."""

    def __init__(
        self,
        reader: Reader,
        words: ImageWords,
        limits: ImageLimits = LIMITS,
        remote: RemotePictures | None = None,
        max_input_bytes: int = INPUT_BYTES,
    ) -> None:
        """`max_input_bytes`: what was measured is held for the tower within so many; the rest is measured again."""
        self._reader = reader
        self._words = words
        self._limits = limits
        self._remote = remote
        self._known: Memo[ImageFacts] = Memo(MEMO_BYTES)
        self._inputs: Memo[Mapping[str, object]] = Memo(max_input_bytes)

    def clear(self) -> None:
        """Forget the pictures that were measured before."""
        self._known.clear()
        self._inputs.clear()

    def look(self, turn: Turn) -> Turn:
        """The turn with every image named by its digest, and its images. Raises BadRequest.

        A picture that was measured before is not decoded again, unless the model must look at it again.
        """
        inputs: dict[str, ImageInput] = {}
        visit = self._remote.visit() if self._remote is not None else None

        def digest_of(block: ImageBlock) -> ImageBlock:
            image = self._input(block.source, visit)
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

    def _input(self, source: str, visit: Visit | None) -> ImageInput:
        """What a picture is known by: a data URL by its text, one behind an address by the bytes that are there now."""
        if visit is None or not is_remote(source):
            key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
            return self._of(key, lambda: read_image(source, self._limits))
        content = visit.read(source, self._limits.max_bytes)
        return self._of(hashlib.sha256(content).digest(), lambda: decode_image(content, self._limits))

    def _of(self, key: bytes, picture: Callable[[], Image.Image]) -> ImageInput:
        facts = self._known.get(key)
        if facts is None:
            measured = self._reader(picture())
            facts = measured.facts
            self._known.put(key, facts, _FACTS_BYTES + _BYTES_PER_TOKEN * len(facts.ids))
            self._inputs.put(facts.digest, measured.tower_input, _num_bytes(measured.tower_input))
        return ImageInput(facts, lambda: self._tower_input(facts.digest, picture))

    def _tower_input(self, digest: str, picture: Callable[[], Image.Image]) -> Mapping[str, object]:
        """What the picture was measured with, if that is still held: the tower looks once, so it is let go of."""
        held = self._inputs.take(digest)
        return self._reader(picture()).tower_input if held is None else held


def _num_bytes(tower_input: Mapping[str, object]) -> int:
    return sum(getattr(value, "nbytes", 0) for value in tower_input.values())


def _with_images(message: Message, name: Callable[[ImageBlock], ImageBlock]) -> Message:
    """The message with its images replaced, those in tool results too. The same object where there are none."""
    if not any(_holds_image(block) for block in message.blocks):
        return message
    if message.role == "assistant":  # no template takes one there
        return unseen(message)
    blocks = tuple(
        name(block)
        if isinstance(block, ImageBlock)
        else replace(block, blocks=tuple(name(b) if isinstance(b, ImageBlock) else b for b in block.blocks))
        if isinstance(block, ToolResultBlock)
        else block
        for block in message.blocks
    )
    return replace(message, blocks=blocks)


def _holds_image(block: Block) -> bool:
    if isinstance(block, ToolResultBlock):
        return any(isinstance(part, ImageBlock) for part in block.blocks)
    return isinstance(block, ImageBlock)
