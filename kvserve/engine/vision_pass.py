"""A row's images in its prefill: the positions of its tokens, where it may pause, and what one pass over a chunk needs
beside its tokens. It joins them with the decoder and the tower, and keeps nothing.

Families that count an image by rows and columns (M-RoPE, from Qwen2-VL, Wang et al. 2024) give its tokens the position
where it begins plus their (frame, row, column), and go on behind it with the largest of these plus one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvserve.core import GenerationRequest, ImageInput, ImageSpan
from kvserve.engine.vision import VisionContext, VisionDecoder
from kvserve.engine.vision_tower import Features, Tower
from kvserve.errors import EngineFailure


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of one row, in order. `shifts[i]` is how far positions are from offsets before image i, the last one
    behind all; all 0 in families that count tokens only. `partition` is the request's."""

    spans: tuple[ImageSpan, ...]
    inputs: Mapping[str, ImageInput]
    shifts: tuple[int, ...]
    partition: str = ""

    @classmethod
    def of(cls, request: GenerationRequest, *, has_positions: bool) -> "RowImages | None":
        """Those of a request, None where it has none. Raises EngineFailure for a span that no image was given for."""
        spans = request.prompt.images
        if not spans:
            return None
        inputs = {image.facts.digest: image for image in request.images}
        if missing := [span.digest for span in spans if span.digest not in inputs]:
            raise EngineFailure(f"The prompt names the image {missing[0][:16]}, which was not given.")
        shifts = [0]
        for span in spans:
            grid = inputs[span.digest].facts.grid
            gained = max(grid) - (span.end - span.start) if has_positions and grid is not None else 0
            shifts.append(shifts[-1] + gained)
        return cls(spans, inputs, tuple(shifts), request.partition)

    @property
    def end(self) -> int:
        """The offset behind the last image."""
        return self.spans[-1].end

    def within(self, start: int, end: int) -> list[tuple[int, ImageSpan]]:
        """The images that share a token with `[start, end)`, by number."""
        return [(i, span) for i, span in enumerate(self.spans) if span.start < end and start < span.end]

    def shift_at(self, offset: int) -> int:
        """How far the position of a text token at `offset` is from it."""
        return self.shifts[sum(span.end <= offset for span in self.spans)]

    def position_ids(self, start: int, end: int) -> NDArray[np.int32]:
        """The positions of the tokens `[start, end)`: (3, end - start), frame, row and column."""
        positions = np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, end - start)).copy()
        behind = np.arange(start, end)
        for i, span in enumerate(self.spans):
            positions[:, behind >= span.end] += self.shifts[i + 1] - self.shifts[i]
        for i, span in self.within(start, end):
            first, last = max(span.start, start), min(span.end, end)
            grid = self.inputs[span.digest].facts.grid or (1, 1, span.end - span.start)
            places = np.indices(grid, dtype=np.int32).reshape(3, -1) + (span.start + self.shifts[i])
            positions[:, first - start : last - start] = places[:, first - span.start : last - span.start]
        return positions

    def whole(self, start: int, end: int) -> int:
        """The nearest end of a chunk from `start` on that cuts no image: at or behind `end`."""
        return max([end, *(span.end for _, span in self.within(start, end))])


def image_index(images: Sequence[tuple[int, ImageSpan]], start: int, end: int) -> NDArray[np.int32]:
    """Which image each token of `[start, end)` belongs to, -1 for text: (end - start,)."""
    index = np.full(end - start, -1, dtype=np.int32)
    for number, span in images:
        index[max(span.start - start, 0) : max(span.end - start, 0)] = number
    return index


def see(
    decoder: VisionDecoder, tower: Tower, images: RowImages, ids: Sequence[int], start: int, caches: list[Any]
) -> mx.array:
    """Put the tokens `ids`, which stand from `start` on, through the decoder: logits (1, length, vocabulary), lazy.

    Afterwards `caches` hold them, and the shift of the text behind them. Raises BadRequest for an image that the tower
    sees otherwise than the prompt says.
    """
    end = start + len(ids)
    touched = images.within(start, end)
    place(decoder, images, end, caches)
    if not touched:
        return decoder.look(mx.array(list(ids))[None], caches, VisionContext())
    found = [(span, tower.features(images.inputs[span.digest], images.partition)) for _, span in touched]
    # Image tokens need not be in the vocabulary, and models with embeddings per layer take the first one's for them.
    places = image_index(touched, start, end)
    text = mx.array([0 if place >= 0 else token for token, place in zip(ids, places.tolist(), strict=True)])[None]
    embedded = decoder.embed(text)
    pieces = _spliced(embedded, [(span, features.rows) for span, features in found], start)
    context = VisionContext(
        position_ids=mx.array(images.position_ids(start, end))[:, None] if decoder.has_positions else None,
        deepstack=_deepstack(embedded, found, start),
        image_index=mx.array(places),
    )
    return decoder.look(text, caches, context, pieces)


def place(decoder: VisionDecoder, images: RowImages, offset: int, caches: list[Any]) -> None:
    """Tell a row's caches how far positions are from offsets for text at `offset`."""
    if decoder.has_positions:
        caches[-1].rows = [images.shift_at(offset)]


def _spliced(embedded: mx.array, images: Sequence[tuple[ImageSpan, mx.array]], start: int) -> mx.array:
    """The embeddings (1, length, width) with the rows of images in their places."""
    length = embedded.shape[1]
    pieces: list[mx.array] = []
    done = 0
    for span, rows in images:
        first, last = max(span.start - start, 0), min(span.end - start, length)
        offset = max(start - span.start, 0)
        pieces += [embedded[:, done:first], rows[offset : offset + last - first][None].astype(embedded.dtype)]
        done = last
    return mx.concatenate([*pieces, embedded[:, done:]], axis=1)


def _deepstack(embedded: mx.array, images: Sequence[tuple[ImageSpan, Features]], start: int) -> tuple[mx.array, ...]:
    """Per layer what is added to its output: nothing at text."""
    nothing = mx.zeros_like(embedded)
    num_layers = max(len(features.deepstack) for _, features in images)
    return tuple(
        _spliced(nothing, [(span, features.deepstack[layer]) for span, features in images], start)
        for layer in range(num_layers)
    )
