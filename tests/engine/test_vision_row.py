"""Where images stand in a row: positions, shifts and cuts, as arithmetic; and the entry that carries the shift."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import (
    GenerationRequest,
    ImageFacts,
    ImageInput,
    ImageSpan,
    RequestId,
    SamplingParams,
    TokenSequence,
)
from kvserve.engine.vision import RopeShift
from kvserve.engine.vision_pass import RowImages, image_index
from kvserve.errors import EngineFailure

Layout = list[tuple[int, tuple[int, int, int]]]
"""Per image: text tokens before it, and its grid."""

layouts = st.lists(
    st.tuples(st.integers(0, 5), st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))),
    min_size=1,
    max_size=3,
)


def row(layout: Layout, *, has_positions: bool = True) -> tuple[RowImages, int]:
    """Images of a row and the number of its tokens; three tokens of text come last."""
    spans: list[ImageSpan] = []
    inputs: list[ImageInput] = []
    offset = 0
    for number, (num_before, grid) in enumerate(layout):
        start = offset + num_before
        offset = start + grid[0] * grid[1] * grid[2]
        digest = f"{number:064x}"
        spans.append(ImageSpan(start, offset, digest))
        inputs.append(ImageInput(ImageFacts(digest, (7,) * (offset - start), grid), dict))
    tokens = TokenSequence((1,) * (offset + 3), tuple(spans))
    request = GenerationRequest(RequestId("t"), tokens, 1, SamplingParams(), frozenset(), images=tuple(inputs))
    images = RowImages.of(request, has_positions=has_positions)
    assert images is not None
    return images, offset + 3


def by_hand(layout: Layout) -> np.ndarray:
    """Positions written out one token after the other."""
    columns: list[tuple[int, int, int]] = []
    following = 0
    for num_before, (frames, rows, cols) in layout:
        columns += [(following + i,) * 3 for i in range(num_before)]
        first = following + num_before
        columns += [(first + t, first + r, first + c) for t in range(frames) for r in range(rows) for c in range(cols)]
        following = first + max(frames, rows, cols)
    columns += [(following + i,) * 3 for i in range(3)]
    return np.array(columns).T


@settings(max_examples=100)
@given(layouts, st.data())
def test_positions_do_not_depend_on_where_a_prefill_is_cut(layout: Layout, data: st.DataObject) -> None:
    """In pieces or in one, they are those of the definition."""
    images, num_tokens = row(layout)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=4)))
    pieces = [images.position_ids(start, end) for start, end in pairwise([0, *cuts, num_tokens])]
    assert np.array_equal(np.concatenate(pieces, axis=1), by_hand(layout))


@given(layouts)
def test_text_stands_at_its_offset_and_a_shift(layout: Layout) -> None:
    """Behind each image the shift is what its tokens have more than its positions."""
    images, num_tokens = row(layout)
    positions = by_hand(layout)
    for offset in range(num_tokens):
        if not images.within(offset, offset + 1):
            assert (positions[:, offset] == offset + images.shift_at(offset)).all()


@settings(max_examples=100)
@given(layouts, st.data())
def test_a_whole_chunk_cuts_no_image(layout: Layout, data: st.DataObject) -> None:
    """It ends at or behind what was asked, and the least that is needed."""
    images, num_tokens = row(layout)
    end = data.draw(st.integers(1, num_tokens))
    whole = images.whole(0, end)
    assert whole >= end
    assert all(not span.start < whole < span.end for span in images.spans)
    assert whole == end or whole in [span.end for span in images.spans if span.start < end]


def test_families_that_count_tokens_only_have_no_shift() -> None:
    """Positions are offsets there."""
    images, _ = row([(2, (1, 2, 3)), (1, (1, 4, 4))], has_positions=False)
    assert images.shifts == (0, 0, 0)


def test_the_index_tells_images_from_text() -> None:
    """Also for a chunk that begins and ends inside images."""
    images, _ = row([(1, (1, 1, 3)), (2, (1, 2, 2))])
    assert image_index(images.within(2, 8), 2, 8).tolist() == [0, 0, -1, -1, 1, 1]


def test_an_image_that_was_not_given_is_an_error() -> None:
    """Of that row alone."""
    tokens = TokenSequence((1, 7, 7), (ImageSpan(1, 3, "a" * 64),))
    request = GenerationRequest(RequestId("t"), tokens, 1, SamplingParams(), frozenset())
    with pytest.raises(EngineFailure, match="not given"):
        RowImages.of(request, has_positions=True)


def test_shifts_follow_their_rows_through_a_batch() -> None:
    """Merged, extended, filtered and taken out again; without any shift there is no array."""
    batch = RopeShift.merge([RopeShift([-3]), RopeShift([0])])
    batch.extend(RopeShift([-5]))
    batch.filter([2, 0])
    assert batch.rows == [-5, -3]
    assert batch.extract(1).rows == [-3]
    assert batch.array is not None and batch.array.tolist() == [-5, -3]
    assert RopeShift([0, 0]).array is None
