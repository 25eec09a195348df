"""The images of a turn: named by what they show, measured once."""

import base64
import hashlib
import io
import weakref
from dataclasses import replace

import numpy as np
from PIL import Image

from kvserve.core import (
    ImageBlock,
    ImageFacts,
    ImageWords,
    MeasuredImage,
    Message,
    RequestId,
    SamplingParams,
    TextBlock,
    ToolResultBlock,
    Turn,
)
from kvserve.prompt.images import Images


class MeasuresImage:
    """Names a picture by its pixels, and counts how often it was asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, picture: Image.Image) -> MeasuredImage:
        self.num_calls += 1
        digest = hashlib.sha256(picture.tobytes()).hexdigest()
        return MeasuredImage(ImageFacts(digest, (7,) * picture.width), {"width": picture.width})


def url(colour: str, form: str = "PNG", size: int = 4) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(stream, form)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def turn(*messages: Message) -> Turn:
    return Turn(RequestId("t"), "test", None, SamplingParams(), messages=messages)


def user(*sources: str) -> Message:
    return Message("user", (TextBlock("see"), *map(ImageBlock, sources)))


WORDS = ImageWords("<", ">", ())


def sources(looked: Turn) -> list[str]:
    return [block.source for message in looked.messages for block in message.blocks if isinstance(block, ImageBlock)]


def test_an_image_is_named_by_what_it_shows() -> None:
    """The same pixels in two files are one image; nothing of the file stays in the turn."""
    looked = Images(MeasuresImage(), WORDS).look(turn(user(url("red"), url("red", "BMP"), url("blue"))))
    first, same, other = sources(looked)
    assert first == same != other
    assert [image.facts.digest for image in looked.images] == [first, other]
    assert len(repr(looked.messages)) < 500


def test_a_picture_is_measured_once() -> None:
    """A file that was seen before is neither decoded nor measured, until the tower must look at it again."""
    reader = MeasuresImage()
    images = Images(reader, WORDS)
    images.look(turn(user(url("red"))))
    [image] = images.look(turn(user(url("red")))).images
    assert image.load() == {"width": 4}
    assert reader.num_calls == 1
    assert image.load() == {"width": 4}
    assert reader.num_calls == 2


def test_what_was_measured_is_held_within_a_number_of_bytes() -> None:
    """Of a request with many large pictures; the rest is measured again when the tower comes to it."""
    made: list[weakref.ref[np.ndarray]] = []

    class Large(MeasuresImage):
        def __call__(self, picture: Image.Image) -> MeasuredImage:
            pixels = np.full(250_000, picture.getpixel((0, 0))[0], dtype=np.float32)  # type: ignore[index]
            made.append(weakref.ref(pixels))
            return replace(super().__call__(picture), tower_input={"pixels": pixels})

    images = Images(Large(), WORDS, max_input_bytes=3_000_000)
    looked = images.look(turn(user(*(url(f"rgb({shade}, 0, 0)") for shade in range(10)))))
    assert len(made) == len(looked.images) == 10
    assert sum(pixels() is not None for pixels in made) == 3
    for shade, image in enumerate(looked.images):
        pixels = image.load()["pixels"]
        assert isinstance(pixels, np.ndarray) and pixels[0] == shade
        del pixels
    assert not any(pixels() is not None for pixels in made), "what the tower has seen is held no more"


def test_images_of_tool_results_are_taken() -> None:
    """Those too are named."""
    looked = Images(MeasuresImage(), WORDS).look(
        turn(Message("tool", (ToolResultBlock("c", (ImageBlock(url("red")),)),)))
    )
    [block] = looked.messages[0].blocks
    assert isinstance(block, ToolResultBlock)
    assert isinstance(block.blocks[0], ImageBlock)
    assert len(block.blocks[0].source) == 64


def test_a_turn_without_images_stays_as_it_is() -> None:
    """Not even its messages are copied."""
    given = turn(user())
    assert Images(MeasuresImage(), WORDS).look(given).messages[0] is given.messages[0]


def test_an_image_of_the_assistants_is_words() -> None:
    """No template takes one there, but a client's history may hold one that another server drew."""
    looked = Images(MeasuresImage(), WORDS).look(
        turn(Message("assistant", (TextBlock("Here:"), ImageBlock(url("red")))))
    )
    assert looked.images == ()
    [message] = looked.messages
    assert message.blocks == (TextBlock("Here:"), TextBlock("\n[An image that this model cannot see]\n", is_ours=True))
