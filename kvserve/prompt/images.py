"""Reads the images of a turn: decodes and measures each once, within limits, and remembers it by its bytes. It knows
Pillow and data URLs; a reader that is handed in counts an image's tokens.

It opens no file, and only `images_remote` fetches. Thread-safe.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from PIL import Image, ImageOps

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
from kvserve.errors import BadRequest
from kvserve.prompt.images_remote import RemotePictures, Visit
from kvserve.prompt.images_text import with_marks, with_words
from kvserve.prompt.images_unseen import unseen
from kvserve.prompt.memo import Memo
from kvserve.prompt.template import PromptText

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that Pillow may try: raster formats of the web. An animation's first frame is the image."""

Image.init()  # else Pillow knows only some of these until it has failed once

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>(?:;[^,;]*)*),", re.IGNORECASE)
_NUM_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest file and picture that are read."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 50_000_000


LIMITS = ImageLimits()
MEMO_BYTES = 16 * 2**20
_FACTS_BYTES = 512
_BYTES_PER_TOKEN = 8
INPUT_BYTES = 512 * 2**20
"""For the tower inputs of running and waiting requests: one picture of 16 megapixels takes 400 MB."""


type MeasuresImage = Callable[[Image.Image], MeasuredImage]
"""Raises BadRequest for a picture that the model's processor refuses."""


class Images:
    """One model's images."""

    def __init__(
        self,
        reader: MeasuresImage,
        words: ImageWords,
        limits: ImageLimits = LIMITS,
        remote: RemotePictures | None = None,
        max_input_bytes: int = INPUT_BYTES,
    ) -> None:
        """Tower inputs are kept within `max_input_bytes`; the others are made again."""
        self._reader = reader
        self._words = words
        self._limits = limits
        self._remote = remote
        self._known: Memo[ImageFacts] = Memo(MEMO_BYTES)
        self._inputs: Memo[Mapping[str, object]] = Memo(max_input_bytes)

    def clear(self) -> None:
        """Forget all measured pictures."""
        self._known.clear()
        self._inputs.clear()

    def look(self, turn: Turn) -> Turn:
        """The turn with every image named by its digest, and its images. Raises BadRequest.

        A measured picture is decoded again only if the model must look at it again.
        """
        inputs: dict[str, ImageInput] = {}
        visit = self._remote.visit() if self._remote is not None else None

        def digest_of(block: ImageBlock) -> ImageBlock:
            image = self._input(block.source, visit)
            # Equal pixels in another file are the same image; the first one was measured, if any was.
            inputs.setdefault(image.facts.digest, image)
            return ImageBlock(image.facts.digest)

        messages = tuple(_with_images(message, digest_of) for message in turn.messages)
        return replace(turn, messages=messages, images=tuple(inputs.values()))

    def marked(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """The messages for a chat template, with marks for images."""
        return with_marks(messages, self._words)

    def worded(self, prompt: PromptText, images: Iterable[ImageInput]) -> PromptText:
        """A rendered prompt for the stitcher, with the family's words around images."""
        runs = {image.facts.digest: image.facts.ids for image in images}
        return replace(prompt, text=with_words(prompt.text, self._words), runs=runs)

    def _input(self, source: str, visit: Visit | None) -> ImageInput:
        """The picture's input, found by the text of its data URL, or by the bytes behind its address."""
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
        """The picture's tower input, kept or made again. A kept one is dropped: the tower reads it once."""
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


# --- from what a client sent to a picture ----------------------------------------------------------------------------


def read_image(source: str, limits: ImageLimits) -> Image.Image:
    """The picture behind a data URL: mode RGB, turned as its EXIF says, transparency on white.

    Raises BadRequest for anything else than a whole, small enough image in one of `FORMATS`.
    """
    return decode_image(_bytes_of(source, limits), limits)


def is_remote(source: str) -> bool:
    """Whether it is an address of another server, which the operator may have allowed."""
    return source[:8].lower() == "https://"


def decode_image(content: bytes, limits: ImageLimits) -> Image.Image:
    """The picture in a file's bytes, as `read_image` gives it. Raises BadRequest."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(image, limits)
            return _on_white(ImageOps.exif_transpose(image))
    except BadRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _refused(f"it is too large to be decoded ({error})") from error
    except Exception as error:  # Pillow's readers raise anything for a broken file
        known = "PNG, JPEG, WebP, GIF, BMP"
        raise _refused(f"it is broken or not one of {known} ({type(error).__name__})") from error


def _bytes_of(source: str, limits: ImageLimits) -> bytes:
    """The bytes in a data URL."""
    match = _DATA_URL.match(source)
    if match is None:
        shown = source[:_NUM_SHOWN_CHARS] + ("..." if len(source) > _NUM_SHOWN_CHARS else "")
        raise BadRequest(
            f"Images are taken as data: URLs (data:image/png;base64,...), not from {shown!r}: this server fetches "
            "nothing and opens no files, but for https: addresses of the hosts in IMAGE_HOSTS. Send the image's bytes "
            "in the request.",
            param="messages",
        )
    if "base64" not in match["parameters"].lower().split(";"):
        raise _refused("its data: URL must be base64 (data:image/png;base64,...)")
    encoded = source[match.end() :]
    if len(encoded) * 3 // 4 > limits.max_bytes + 3:
        raise _refused(f"it has more than {limits.max_bytes:,} bytes")
    try:
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"its base64 is broken ({error})") from error
    if not content:
        raise _refused("it is empty")
    return content


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    """Checks the size before decoding: a file of 1 kB can hold a gigapixel."""
    width, height = image.size
    if width < 1 or height < 1:
        raise _refused(f"it has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise _refused(f"it has {width:,} x {height:,} pixels; {limits.max_pixels:,} pixels are the limit")


def _on_white(image: Image.Image) -> Image.Image:
    """The decoded picture as RGB; transparent pixels become white, whatever color the file stores for them."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"An image cannot be read: {reason}.", param="messages")
