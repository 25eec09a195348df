"""The arithmetic of a row's memory, in full precision and quantised."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.engine.model import KvSize

FULL = KvSize(fixed=100, per_token=8)
PACKED = KvSize(fixed=100, per_token=8, per_packed_token=2, packed_from=50)


def test_without_quantisation_every_token_costs_the_same() -> None:
    """Live, at its peak and kept, a row is its fixed bytes and so many per token."""
    assert FULL.live(10) == FULL.peak(10) == FULL.kept(0, 10) == 180
    assert FULL.kept(4, 10) == 148


def test_what_a_model_works_out_again_is_live_and_not_kept() -> None:
    """A row holds it; the prefix cache makes no room for it."""
    sizes = KvSize(fixed=100, per_token=8, memo_per_token=6)
    assert (sizes.live(10), sizes.held(10), sizes.kept(0, 10)) == (180, 180, 120)


def test_a_live_row_is_smaller_from_its_start_on_what_is_kept_only_behind_it() -> None:
    """The first tokens stay in full precision in the prefix cache, and only there."""
    assert (PACKED.live(50), PACKED.live(51), PACKED.live(100)) == (100 + 50 * 8, 100 + 51 * 2, 300)
    assert PACKED.peak(100) == 100 + 50 * 10
    assert PACKED.kept(0, 100) == 100 + 50 * 8 + 50 * 2
    assert PACKED.kept(60, 100) == 100 + 40 * 2


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_parts_that_are_kept_add_up_and_no_row_is_above_its_peak(first: int, second: int, third: int) -> None:
    """Where a segment ends changes nothing but the number of states; the peak bounds every length before."""
    start, middle, end = sorted((first, second, third))
    for sizes in (FULL, PACKED):
        assert sizes.kept(start, middle) + sizes.kept(middle, end) == sizes.kept(start, end) + sizes.fixed
        assert sizes.peak(end) >= sizes.live(middle)
