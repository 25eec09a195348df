"""An image as a client sends it: upright RGB, or a refusal that says why."""

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from kvserve.errors import BadRequest
from kvserve.prompt.images import ImageLimits, read_image

LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000)


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header names a size that its few bytes do not hold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


RED = Image.new("RGB", (8, 4), (255, 0, 0))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_formats_of_the_web_are_read(form: str) -> None:
    """Each becomes RGB of its own size; what the URL calls it does not matter."""
    image = read_image(url(encoded(RED, form), "image/whatever"), LIMITS)
    assert (image.mode, image.size) == ("RGB", (8, 4))
    assert image.getpixel((3, 2))[0] > 240  # type: ignore[index]


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "LA", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    """Grey, palettes, four colours and sixteen bits."""
    form = "JPEG" if mode == "CMYK" else "PNG"
    assert read_image(url(encoded(Image.new(mode, (5, 5)), form)), LIMITS).mode == "RGB"


def test_exif_turns_the_picture_upright() -> None:
    """A camera held sideways writes the turn into the file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    left = Image.new("RGB", (8, 4))
    left.paste((255, 0, 0), (0, 0, 4, 4))
    image = read_image(url(encoded(left, "JPEG", exif=exif, quality=95)), LIMITS)
    assert image.size == (4, 8)
    assert image.getpixel((2, 1))[0] > 200 > 60 > image.getpixel((2, 6))[0]  # type: ignore[index]


def test_transparency_is_white() -> None:
    """What an editor left behind transparent pixels is not shown."""
    hidden = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert read_image(url(encoded(hidden)), LIMITS).getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_counts() -> None:
    """An animated GIF is its first frame."""
    frames = [Image.new("RGB", (6, 6), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=10)
    assert read_image(url(animated), LIMITS).getpixel((1, 1)) == (255, 0, 0)


def test_a_data_url_may_have_parameters_and_line_breaks() -> None:
    """As mail programs write them."""
    text = base64.encodebytes(encoded(RED)).decode()
    assert read_image(f"data:image/png;charset=utf-8;base64,{text}", LIMITS).size == (8, 4)


BAD = {
    "broken base64": ("data:image/png;base64,@@@@", "base64 is broken"),
    "not base64": ("data:image/png,abc", "must be base64"),
    "nothing": ("data:image/png;base64,", "is empty"),
    "truncated": (url(encoded(Image.effect_noise((64, 64), 50).convert("RGB"))[:-900]), "broken or not one of"),
    "a gigapixel in a kilobyte": (url(png_of(30_000, 30_000)), "pixels"),
    "too many pixels": (url(png_of(1001, 1000)), "1,001 x 1,000 pixels"),
    "no pixels": (url(png_of(0, 0)), "cannot be read"),
    "svg": (url(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml"), "broken or not one of"),
    "text": (url(b"not an image at all"), "broken or not one of"),
    "tiff": (url(encoded(RED, "TIFF"), "image/tiff"), "broken or not one of"),
    "too many bytes": (url(bytes(300_000)), "more than 200,000 bytes"),
    "a path": ("/etc/passwd", "fetches nothing and opens no files"),
    "a file": ("file:///etc/passwd", "fetches nothing and opens no files"),
    "an address": ("http://127.0.0.1:8080/health", "fetches nothing and opens no files"),
    "a remote one": ("https://example.com/a.png", "fetches nothing and opens no files"),
    "no text at all": ("", "fetches nothing and opens no files"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_usable_image_is_refused(case: str) -> None:
    """A 400 that says what was wrong, before anything large is decoded."""
    source, reason = BAD[case]
    with pytest.raises(BadRequest) as refused:
        read_image(source, LIMITS)
    assert reason in refused.value.message
    assert refused.value.param == "messages"
    assert len(refused.value.message) < 400
