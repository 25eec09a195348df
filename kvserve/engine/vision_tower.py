"""What the vision tower made of images, by digest, within a number of bytes: it looks at each image once.

Features take the places of an image's tokens in a row's embeddings, in the form that the decoder takes. Everything here
belongs to the engine thread.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvserve.core import ImageInput
from kvserve.errors import BadRequest

FEATURE_BYTES = 512 * 2**20
HEEDED = {
    "inputs_embeds",
    "position_ids",
    "rope_deltas",
    "visual_pos_masks",
    "deepstack_visual_embeds",
    "per_layer_inputs",
}
"""What a decoder gets of an image here, or computes itself."""


@dataclass(frozen=True, slots=True)
class Features:
    """An image inside the decoder: `rows` (tokens, width) are the embeddings of its run, `deepstack` what is added to
    the output of the first layers, (tokens, width) each."""

    rows: mx.array
    deepstack: tuple[mx.array, ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.rows, *self.deepstack))


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What the tower has done: how often it looked at an image, and what is kept of that."""

    num_tower_calls: int
    num_images: int
    num_feature_bytes: int


class Tower:
    """The vision half of a checkpoint."""

    def __init__(self, model: Any, image_token: int, scale: float) -> None:
        """`model` is mlx-vlm's, of which only the vision half is used. Embeddings that it gives are `scale` times what
        the decoder takes."""
        self._model = model
        self._image_token = image_token
        self._scale = scale
        self._max_bytes = FEATURE_BYTES
        self._known: OrderedDict[tuple[str, str], Features] = OrderedDict()
        self.num_bytes = 0
        self.num_calls = 0

    def features(self, image: ImageInput, partition: str = "") -> Features:
        """What the tower sees in an image; it is asked only if that is not known in this partition. Raises
        BadRequest."""
        key = partition, image.facts.digest
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        made = self.look(image.load(), len(image.facts.ids))
        self.num_calls += 1
        self._known[key] = made
        self.num_bytes += made.num_bytes
        while self.num_bytes > self._max_bytes and len(self._known) > 1:
            self.num_bytes -= self._known.popitem(last=False)[1].num_bytes
        return made

    def report(self) -> ImageReport:
        """Figures of the moment, for any thread."""
        return ImageReport(self.num_calls, len(self._known), self.num_bytes)

    def clear(self) -> None:
        """Forget every image."""
        self._known.clear()
        self.num_bytes = 0

    def begin(self, max_bytes: int) -> None:
        """Begin anew within so many bytes: nothing known, nothing counted."""
        self.clear()
        self.num_calls = 0
        self._max_bytes = max_bytes

    def look(self, tower_input: Mapping[str, object], num_tokens: int) -> Features:
        """Run the tower. Raises BadRequest where its tokens are not those that the prompt has."""
        arrays = {name: mx.array(value) for name, value in tower_input.items() if isinstance(value, np.ndarray)}
        ids, mask = arrays.pop("input_ids"), arrays.pop("attention_mask", None)
        made = self._model.get_input_embeddings(ids, arrays.pop("pixel_values"), mask=mask, **arrays)
        if unheeded := self._unheeded(made):
            raise BadRequest(f"The model's decoder wants {', '.join(unheeded)} with an image.", param="messages")
        places = np.flatnonzero(np.array(ids[0]) == self._image_token)
        first, end = int(places[0]), int(places[-1]) + 1
        if end - first != num_tokens:
            raise BadRequest(f"The image has {end - first} tokens instead of {num_tokens}.", param="messages")
        rows = made.inputs_embeds[0, first:end]
        if self._scale != 1.0:
            rows = rows / self._scale
        deepstack = tuple(self._spread(layer, places - first, num_tokens) for layer in _layers(made))
        mx.eval(rows, deepstack)
        # A slice would keep the whole array alive.
        features = Features(mx.contiguous(rows), deepstack)
        mx.eval(features.rows)
        return features

    def _unheeded(self, made: Any) -> list[str]:
        """What mlx-vlm's decoder would take with an image, and the one here is not told."""
        takes = inspect.signature(type(self._model.language_model).__call__).parameters
        given = {name for name, value in made.to_dict().items() if value is not None}
        return sorted(given & takes.keys() - HEEDED)

    def _spread(self, layer: mx.array, places: Any, num_tokens: int) -> mx.array:
        """What belongs to image tokens, with nothing for the others of the run."""
        if len(places) == num_tokens:
            return layer
        spread = mx.zeros((num_tokens, layer.shape[-1]), layer.dtype)
        spread[mx.array(places)] = layer
        return spread


def _layers(made: Any) -> Sequence[mx.array]:
    deepstack = getattr(made, "deepstack_visual_embeds", None)
    return () if deepstack is None else list(deepstack)


def embedding_scale(vlm_embed: Callable[[mx.array], mx.array], embed: Callable[[mx.array], mx.array]) -> float:
    """How many times the decoder's own embeddings those of mlx-vlm are: some decoders scale inside, some before."""
    ids = mx.arange(1, 9)[None]
    theirs, ours = vlm_embed(ids).astype(mx.float32), embed(ids).astype(mx.float32)
    return float((mx.abs(theirs).sum() / mx.abs(ours).sum()).item())  # type: ignore[arg-type]
