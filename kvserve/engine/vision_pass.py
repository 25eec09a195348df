"""One pass of a prefill over a prompt with images: embeddings, positions and whatever else the chunk needs.

It joins a row's images with the decoder and the tower; it keeps nothing.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvserve.core import ImageSpan
from kvserve.engine.vision import VisionContext, VisionDecoder
from kvserve.engine.vision_row import RowImages, image_index
from kvserve.engine.vision_tower import Features, Tower


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
