"""Who may enter, by number and by bytes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.engine.admission import ANSWER_ALLOWANCE_TOKENS, Admission, Budget
from kvserve.engine.kv_buffers import num_slots
from kvserve.engine.kv_size import KvSize
from kvserve.engine.rows import Row
from kvserve.errors import MemoryExhausted

BUDGET = Budget(max_rows=3, max_bytes=1000, sizes=KvSize(fixed=100, per_token=1))


def test_a_long_answer_is_counted_with_its_allowance() -> None:
    """max_tokens counts up to the allowance, so that agents' large limits do not block the others."""
    assert BUDGET.reserved_tokens(10, 5) == 15
    assert BUDGET.reserved_tokens(10, 10**6) == 10 + ANSWER_ALLOWANCE_TOKENS


def test_a_row_that_never_fits_is_known_at_once() -> None:
    """The fixed bytes of a row count."""
    assert BUDGET.can_ever_hold(900)
    assert not BUDGET.can_ever_hold(901)


def test_rows_enter_by_number_and_by_bytes_with_padding() -> None:
    """A row enters while places and bytes last; the padding of the running batches is part of the bytes."""
    assert BUDGET.can_hold(300, [500], 0)
    assert not BUDGET.can_hold(301, [500], 0)
    assert not BUDGET.can_hold(300, [500], 1)
    assert not BUDGET.can_hold(1, [1, 1, 1], 0)


def test_a_row_that_will_be_quantised_is_admitted_with_its_peak() -> None:
    """Ten times smaller from token 400 on: longer rows fit, but for a moment the first 400 are there twice."""
    budget = Budget(max_rows=3, max_bytes=1000, sizes=KvSize(100, 1, 0.1, packed_from=400))
    assert budget.sizes.peak(400) == 500
    assert budget.sizes.peak(401) == budget.sizes.peak(4000) == 540
    assert budget.sizes.peak(8000) == 900
    assert budget.can_ever_hold(9000) and not budget.can_ever_hold(9001)


AT_PEAK = Budget(max_rows=3, max_bytes=3000, sizes=KvSize(fixed=0, per_token=1, slot_tokens=100, copy_share=0.5))
"""Rows that hold places ahead, and of which half is there twice for a moment."""


def test_a_row_is_counted_at_its_peak() -> None:
    """Places ahead and what is copied count; what never fits is refused with both numbers and the setting."""
    assert AT_PEAK.peak_bytes(900) == 1500
    assert AT_PEAK.can_hold(900, [900], 0) and not AT_PEAK.can_hold(901, [900], 0)
    assert AT_PEAK.padding_left([900], 0) == 1000 and AT_PEAK.padding_left([900, 900], 10) == 0
    large = Budget(1, 2**30, KvSize(0, 2**20))
    with pytest.raises(MemoryExhausted, match=r"about 1\.95 GiB .* 1\.00 GiB may be used \(MAX_BATCH_BYTES\)"):
        large.check(1900, 100)
    large.check(900, 100)


@given(st.integers(0, 10_000), st.integers(0, 8_000), st.none() | st.integers(0, 3_000))
def test_the_longest_row_fits_and_the_next_one_does_not(max_bytes: int, at_most: int, packed_from: int | None) -> None:
    """Also where rows are quantised from some token on."""
    sizes = KvSize(10, 1, 0.25, packed_from, slot_tokens=100, copy_share=0.5)
    budget = Budget(1, max_bytes, sizes)
    most = budget.most_tokens(at_most)
    assert most == at_most or not budget.can_ever_hold(most + 1)
    assert most < 0 or budget.can_ever_hold(most)


@dataclass(frozen=True)
class LongRow:
    """A row of which memory and places are counted; its prompt has 300 tokens."""

    num_tokens: int
    was_put_back: bool = True
    request: Any = field(default_factory=lambda: SimpleNamespace(prompt=[1] * 300, max_tokens=10**6), compare=False)


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_row_that_was_put_back_is_counted_with_the_room_of_its_buffers(is_longer: bool) -> None:
    """What outgrew its allowance gets a buffer with room to grow when it enters again: counted by its tokens it would
    enter, and be put back at once, without end."""
    again = LongRow(300 + ANSWER_ALLOWANCE_TOKENS + is_longer)
    decoding: list[Row] = []
    pool: Any = SimpleNamespace(rows=lambda: decoding, padding_bytes=lambda: 0.0, bytes_besides=lambda _: 0)
    admission = Admission(Budget(3, 10_000, KvSize(fixed=0, per_token=1)), cast(Any, None), pool)
    counted = num_slots(again.num_tokens) if is_longer else again.num_tokens
    assert admission.padding_left([cast(Row, again)]) == 10_000 - counted
    decoding.append(cast(Row, again))
    assert admission.padding_left(decoding) == 10_000 - again.num_tokens
