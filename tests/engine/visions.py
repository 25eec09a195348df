"""What the tests of images share: pictures, prompts with images as the server writes them, mlx-vlm's own answers."""

import base64
import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx_vlm.generate import stream_generate
from mlx_vlm.utils import load as load_vlm
from mlx_vlm.utils import should_add_special_tokens
from PIL import Image

from kvserve.core import (
    GenerationRequest,
    ImageBlock,
    ImageInput,
    Message,
    MessageStart,
    RequestId,
    SamplingParams,
    TextBlock,
    TokenSequence,
    Turn,
)
from kvserve.engine.model import LoadedModel
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.images import Images
from kvserve.prompt.images_text import mark_of
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.laws import IS_FULL
from tests.models import tiny_model

VISION = ("qwen3_5_vl", "qwen3_vl", "gemma3_vl", "gemma4_vl", "glm4v")
QUICK = ("qwen3_5_vl", "gemma4_vl")
"""A hybrid that may pause anywhere, and a family with windows that takes images whole. The others have their rule, ids
and cold answers compared in every run (those of `of_all` in `test_vision.py`), and qwen3_vl what it keeps where its row
ends inside an image (`test_vision_cuts.py`); the rest of them is left to `make full`."""

NUM_ANSWER_TOKENS = 24 if IS_FULL else 12

type Part = str | Image.Image
"""What a user's message is made of."""


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """A picture with shapes and colours of its own, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse, "RGB").resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    stream = io.BytesIO()
    image.save(stream, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


@dataclass(frozen=True)
class Prompted:
    """A prompt as the server writes it: `text` is what mlx-vlm's processor takes for the same."""

    tokens: TokenSequence
    starts: tuple[MessageStart, ...]
    images: tuple[ImageInput, ...]
    text: str
    pictures: tuple[Image.Image, ...]

    def request(self, max_tokens: int = NUM_ANSWER_TOKENS) -> GenerationRequest:
        return GenerationRequest(
            RequestId("test"),
            self.tokens,
            max_tokens,
            SamplingParams(),
            frozenset(),
            message_starts=self.starts,
            images=self.images,
        )

    def followed_by(self, answer: Sequence[int], more: Sequence[int]) -> "Prompted":
        """The next turn: this prompt, its answer and more text."""
        return replace(self, tokens=TokenSequence((*self.tokens.ids, *answer, *more), self.tokens.images))


@dataclass(frozen=True)
class Writer:
    """Writes one model's prompts, with all that the server has for that."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stitcher: Stitcher
    images: Images
    folder: Path

    @classmethod
    def of(cls, family: str, model: LoadedModel) -> "Writer":
        folder = tiny_model(family)
        tokenizer = load_tokenizer(folder)
        template = ChatTemplate(tokenizer)
        assert model.vision is not None, model.cache_support.notes
        assert template.image_words is not None
        images = Images(model.vision.reader, model.vision.reader.words(template.image_words))
        stitcher = Stitcher.of(tokenizer, template, learn_markers(tokenizer, template))
        return cls(tokenizer, template, stitcher, images, folder)

    def prompt(self, *parts: Part, system: str = "Be brief.") -> Prompted:
        """One user's message of these parts."""
        user = Message(
            "user", tuple(ImageBlock(data_url(p)) if isinstance(p, Image.Image) else TextBlock(p) for p in parts)
        )
        return self.conversation(Message("system", (TextBlock(system),)), user)

    def conversation(self, *messages: Message) -> Prompted:
        turn = Turn(RequestId("test"), "test", None, SamplingParams(), messages=messages)
        looked = self.images.look(turn)
        written = self.template.write(self.images.marked(looked.messages), thinking=False)
        stitched = self.stitcher.tokens(self.images.worded(written, looked.images))
        text = written.text
        for image in looked.images:
            text = text.replace(mark_of(image.facts.digest), str(self.template.image_words))
        sources = [block.source for message in messages for block in message.blocks if isinstance(block, ImageBlock)]
        return Prompted(
            TokenSequence(stitched.ids, stitched.images),
            stitched.message_starts,
            looked.images,
            text,
            tuple(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) for source in sources),
        )


@functools.cache
def vlm(family: str) -> tuple[Any, Any]:
    """mlx-vlm's own model and processor."""
    return load_vlm(str(tiny_model(family)), trust_remote_code=False)


def vlm_stream(family: str, prompted: Prompted, num_tokens: int) -> Iterator[Any]:
    """What mlx-vlm's `stream_generate` tells of each token, greedily."""
    model, processor = vlm(family)
    adds = should_add_special_tokens(model.config.model_type, processor)
    results: Iterator[Any] = stream_generate(
        model,
        processor,
        for_processor(family, prompted, adds_special_tokens=adds),
        image=list(prompted.pictures) or None,
        max_tokens=num_tokens,
        temperature=0.0,
    )
    return results


def vlm_answer(family: str, prompted: Prompted, num_tokens: int = NUM_ANSWER_TOKENS) -> tuple[int, ...]:
    """What mlx-vlm's `stream_generate` writes, greedily."""
    results = vlm_stream(family, prompted, num_tokens)
    return tuple(int(result.token) for result in results)[:num_tokens]


def for_processor(family: str, prompted: Prompted, *, adds_special_tokens: bool = False) -> str:
    """The prompt's text without what the processor's tokenizer puts before every text that comes with an image, and
    before others if it is told to."""
    if not (prompted.pictures or adds_special_tokens):
        return prompted.text
    _, processor = vlm(family)
    return prompted.text.removeprefix(processor.tokenizer.decode(processor.tokenizer("")["input_ids"]))
