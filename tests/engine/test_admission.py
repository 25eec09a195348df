"""Who may enter, by number and by bytes."""

from kvserve.engine.admission import ANSWER_ALLOWANCE_TOKENS, Budget
from kvserve.engine.row_bytes import RowBytes

BUDGET = Budget(max_rows=3, max_bytes=1000, sizes=RowBytes(fixed=100, per_token=1))


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
    budget = Budget(max_rows=3, max_bytes=1000, sizes=RowBytes(100, 1, 0.1, packed_from=400))
    assert budget.row_bytes(400) == 500
    assert budget.row_bytes(401) == budget.row_bytes(4000) == 540
    assert budget.row_bytes(8000) == 900
    assert budget.can_ever_hold(9000) and not budget.can_ever_hold(9001)
