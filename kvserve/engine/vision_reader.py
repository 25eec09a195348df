"""A picture to a prompt's ids and the vision tower's input, by the model's own processor from mlx-vlm.

It runs on web threads: what it returns are NumPy arrays, never an `mx.array`. Which digest names a picture is decided
here, because the processor's settings are part of it.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kvserve.core import ImageFacts, ImageWords, MeasuredImage
from kvserve.engine.borders import finding
from kvserve.errors import BadRequest, ModelLoadError

SETTINGS_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


class ImageReader:
    """One model's processor. Safe for several threads: transformers' processors are not, so they take turns."""

    def __init__(
        self, processor: Any, folder: Path, image_token: int, merge_size: int | None, other_media_tokens: Sequence[int]
    ) -> None:
        """`merge_size` patches a side make one token; None in families whose positions do not follow images.

        Raises ModelLoadError for a processor that cannot be used.
        """
        self._processor = processor
        self._image_token = image_token
        self._merge_size = merge_size
        self._other_media_tokens = tuple(other_media_tokens)
        self._settings = b"".join((folder / name).read_bytes() for name in SETTINGS_FILES if (folder / name).exists())
        self._lock = threading.Lock()
        self.placeholder = self._find_placeholder()

    def __call__(self, picture: Image.Image) -> MeasuredImage:
        """Raises BadRequest for a picture that the processor refuses."""
        try:
            inputs = self._process(self.placeholder, picture)
        except Exception as error:  # processors raise anything for a shape that they did not expect
            size = f"{picture.width} x {picture.height}"
            raise BadRequest(f"The model's processor refuses an image of {size}: {error}", param="messages") from error
        ids = self._run(inputs)
        if not ids:
            raise BadRequest("The model's processor gives no token for an image.", param="messages")
        return MeasuredImage(ImageFacts(self._digest(picture), ids, self._grid(inputs, len(ids))), inputs)

    def words(self, template_words: str) -> ImageWords:
        """What the prompt has around an image where the chat template writes `template_words` for one.

        Raises ModelLoadError where the processor finds no place for an image in them.
        """
        try:
            all_ids = [int(token) for token in self._process(template_words, noise_picture(0, 96, 160))["input_ids"][0]]
            # Some tokenizers put a token before every text; the chat template writes that one itself.
            before = list(self._tokenizer("")["input_ids"])
            all_ids = all_ids[len(before) :] if before and all_ids[: len(before)] == before else all_ids
            first = all_ids.index(self._image_token)
        except Exception as error:
            raise ModelLoadError(f"{template_words!r} has no place for an image: {error}") from error
        end = len(all_ids) - all_ids[::-1].index(self._image_token)
        head, tail = all_ids[:first], all_ids[end:]
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        guarded = {*all_ids, *self._other_media_tokens} & special
        return ImageWords(self._text(head), self._text(tail), tuple(sorted(self._text([token]) for token in guarded)))

    @property
    def _tokenizer(self) -> Any:
        return self._processor.tokenizer

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def _process(self, text: str, picture: Image.Image) -> Mapping[str, Any]:
        from mlx_vlm.utils import prepare_inputs

        with self._lock:
            made = prepare_inputs(self._processor, images=[picture], prompts=[text])  # type: ignore[no-untyped-call]
            return {name: np.array(value) for name, value in made.items() if value is not None}

    def _run(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids from the first to the last token of the image.

        One object for each id: thousands of equal ones, each an object of its own, take five times the memory.
        """
        ids = [int(token) for token in inputs["input_ids"][0]]
        places = [place for place, token in enumerate(ids) if token == self._image_token]
        objects: dict[int, int] = {}
        return tuple(objects.setdefault(token, token) for token in ids[places[0] : places[-1] + 1]) if places else ()

    def _sample_ids(self, text: str) -> tuple[int, ...]:
        """The ids that the processor has for an image where it reads `text`. Raises what it raises."""
        return self._run(self._process(text, noise_picture(0, 96, 160)))

    def _grid(self, inputs: Mapping[str, Any], num_tokens: int) -> tuple[int, int, int] | None:
        if self._merge_size is None:
            return None
        frames, height, width = (int(side) for side in np.array(inputs["image_grid_thw"])[0])
        grid = (frames, height // self._merge_size, width // self._merge_size)
        if grid[0] * grid[1] * grid[2] != num_tokens:
            raise BadRequest(f"An image of {grid} has {num_tokens} tokens.", param="messages")
        return grid

    def _digest(self, picture: Image.Image) -> str:
        settings = hashlib.sha256(self._settings).digest()
        size = f"{picture.mode} {picture.width} {picture.height} ".encode()
        return hashlib.sha256(settings + size + picture.tobytes()).hexdigest()

    def _find_placeholder(self) -> str:
        """What the processor takes for an image: its names for that differ between families."""
        names = ("vision_start_token", "image_token", "vision_end_token")
        tokens = [str(getattr(self._processor, name, None) or "") for name in names]
        tried = ["".join(tokens), tokens[1], str(getattr(self._processor, "boi_token", ""))]
        reasons = []
        for text in dict.fromkeys(filter(None, tried)):
            ids = finding(partial(self._sample_ids, text))
            if isinstance(ids, Exception):
                reasons.append(f"{text}: {ids}")
            elif ids:
                return text
        raise ModelLoadError(f"its processor takes no image ({'; '.join(reasons) or 'it names no placeholder'})")


def noise_picture(seed: int, height: int, width: int) -> Image.Image:
    """A picture to try a processor with: let it be neither square nor even."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise, "RGB")
