"""An image as a client sends it, to an upright RGB picture, within limits. It knows Pillow and data URLs, no model.

Only bytes are read: nothing is fetched here and no file is opened.
"""

import base64
import binascii
import io
import re
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageOps

from kvserve.errors import BadRequest

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What Pillow may try: raster formats of the web. Of an animation the first frame is the image."""

Image.init()  # else Pillow knows only some of these until it has failed once

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>(?:;[^,;]*)*),", re.IGNORECASE)
_NUM_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bytes of the file and pixels of the picture that are still read."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 50_000_000


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
    """What a data URL holds."""
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
    """Before anything is decoded: a file of 1 kB can hold a gigapixel."""
    width, height = image.size
    if width < 1 or height < 1:
        raise _refused(f"it has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise _refused(f"it has {width:,} x {height:,} pixels; {limits.max_pixels:,} pixels are the limit")


def _on_white(image: Image.Image) -> Image.Image:
    """The decoded picture as RGB: what stands behind transparent pixels in the file is nothing to show a model."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"An image cannot be read: {reason}.", param="messages")
