"""How many drafted tokens rows beside one another try at a time: what brings most tokens a second over all of them,
where no row waits too long for the others."""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.engine.batch_costs import MAX_BATCH_TOKENS, MAX_SLOWDOWN, BatchCosts, Hope
from kvserve.engine.pass_costs import MEASURED_WIDTHS, NUM_MEASURED_TOKENS, PassCosts
from tests.laws import num_examples

HOPES = st.lists(
    st.builds(Hope, st.lists(st.floats(0, 1), max_size=9), st.floats(0, 1)), min_size=2, max_size=4
).filter(lambda hopes: any(hope.chances for hope in hopes))


def costs_of(seconds_a_token: float) -> BatchCosts:
    """One second a pass, and so much for each token of it; plain steps of 2 to 4 rows have run."""
    single = PassCosts()
    for width in (*MEASURED_WIDTHS, MAX_BATCH_TOKENS):
        single.note(width, NUM_MEASURED_TOKENS, 1 + seconds_a_token * width)
    costs = BatchCosts(single)
    for num_rows in (2, 3, 4):
        for _ in range(2):  # the first one may have been compiled
            costs.of(num_rows).note(1, 50, 1 + seconds_a_token * num_rows)
    return costs


def expected_tokens(hope: Hope, count: int) -> float:
    found, reached = 1.0, hope.is_given
    for chance in hope.chances[:count]:
        reached *= chance
        found += reached
    return found


@given(hopes=HOPES, seconds_a_token=st.floats(0, 0.5))
@settings(max_examples=num_examples(100), deadline=None)
def test_no_other_width_gives_more_tokens_a_second_over_all_rows(hopes: list[Hope], seconds_a_token: float) -> None:
    """Of those, a plain step among them, at which no row is expected to be slowed by more than it may."""
    costs = costs_of(seconds_a_token)
    table = costs.of(len(hopes))
    plain = table.seconds(1, 50) or 0.0
    rates = {0: len(hopes) / plain}
    for count in range(1, min(table.max_width, 1 + max(len(hope.chances) for hope in hopes))):
        seconds, expected = table.seconds(1 + count, 50) or 0.0, [expected_tokens(hope, count) for hope in hopes]
        if seconds <= MAX_SLOWDOWN * plain * min(expected):
            rates[count] = sum(expected) / seconds
    assert rates[costs.num_worth(hopes, 50)] == pytest.approx(max(rates.values()))


def test_a_row_that_copies_slows_nobody_down_who_does_not() -> None:
    """However much it gains itself, but for what measuring is off; where all gain the pass is as wide as it pays."""
    copies, plain = Hope([1.0] * 7), Hope()
    dear = costs_of(0.2)
    assert dear.num_worth([copies] * 4, 50) == 7
    assert dear.num_worth([copies, plain, plain, plain], 50) == 0
    cheap = costs_of(0.01)
    seconds = [cheap.of(4).seconds(width, 50) or 0.0 for width in range(1, 9)]
    assert cheap.num_worth([copies, plain, plain, plain], 50) == 1
    assert seconds[1] <= 1.05 * seconds[0] < seconds[2]
    assert costs_of(0.0).num_worth([copies, plain, plain, plain], 50) == 7
    assert costs_of(0.0).num_worth([plain, plain], 50) == 0
    assert BatchCosts(PassCosts()).num_worth([copies, copies], 50) == 0


@given(hopes=HOPES, seconds_a_token=st.floats(0, 0.1))
@settings(max_examples=num_examples(100), deadline=None)
def test_where_no_row_may_be_left_out_no_pass_is_worth_it_that_leaves_one_out(
    hopes: list[Hope], seconds_a_token: float
) -> None:
    """Nor is it worth reading what is pending, so that nobody else is asked for a draft; where one may be left out, a
    copy beside it is worth a pass."""
    costs, left_out = costs_of(seconds_a_token), [*hopes[1:], Hope()]
    if costs.may_leave_one_out(len(left_out), 50):
        sure = [Hope([1.0] * 9)] * (len(hopes) - 1)
        assert costs.num_worth([*sure, Hope()], 50)
    elif any(hope.chances for hope in left_out):
        assert not costs.num_worth(left_out, 50)
        assert not costs.is_worth_reading(left_out, 50)
    assert not BatchCosts(PassCosts()).may_leave_one_out(2, 50)


def test_pending_tokens_are_read_where_drafts_are_likely_to_go_on_from_them() -> None:
    """Where they do not, the next pass was not described meanwhile."""
    costs = costs_of(0.0)
    costs._single.note_described(0.9)
    assert costs.is_worth_reading([Hope([1.0] * 3, 0.9), Hope()], 50)
    assert not costs.is_worth_reading([Hope([1.0] * 3, 0.05), Hope()], 50)
    assert not costs.is_worth_reading([Hope([], 0.9), Hope()], 50)


@given(hopes=HOPES, seconds_a_token=st.floats(0, 0.1), described=st.floats(0, 0.9))
@settings(max_examples=num_examples(100), deadline=None)
def test_to_read_pending_tokens_is_expected_to_cost_nothing(
    hopes: list[Hope], seconds_a_token: float, described: float
) -> None:
    """Over which of them are what drafts go on from: a pass is tried where it is worth it then, else the next plain one
    is described after they were read."""
    costs = costs_of(seconds_a_token)
    costs._single.note_described(described)
    if not costs.is_worth_reading(hopes, 50):
        return
    table, gained = costs.of(len(hopes)), 0.0
    plain = table.seconds(1, 50) or 0.0
    for right in product((True, False), repeat=len(hopes)):
        chance = prod(
            hope.is_given if is_right else 1 - hope.is_given for hope, is_right in zip(hopes, right, strict=True)
        )
        known = [Hope(hope.chances if is_right else ()) for hope, is_right in zip(hopes, right, strict=True)]
        if count := costs.num_worth(known, 50) if any(hope.chances for hope in known) else 0:
            tokens = sum(expected_tokens(hope, count) for hope in known)
            gained += chance * (tokens * plain / len(hopes) - (table.seconds(1 + count, 50) or 0.0))
        else:
            gained -= chance * described
    assert gained > -1e-6


def test_what_passes_of_rows_take_replaces_what_they_were_taken_for() -> None:
    """Only for as many rows; and no pass has more tokens than were measured. Before a plain step of so many rows ran
    nothing is known of them, though a start has remembered how many such steps passes take."""
    costs = costs_of(0.1)
    assert costs.of(4).seconds(4, 50) == pytest.approx(1 + 0.1 * 16)
    assert costs.of(5).seconds(4, 50) is None and costs.num_worth([Hope([1.0] * 7)] * 5, 50) == 0
    remembered = PassCosts()
    remembered.guess({1: 1.0, 2: 1.0, 4: 1.5, 8: 2.0, 16: 3.0, MAX_BATCH_TOKENS: 6.0})
    again = BatchCosts(remembered)
    for _ in range(2):
        again.of(4).note(1, 50, 3.0)
    assert [again.of(4).seconds(width, 50) for width in (1, 2, 4, 8)] == pytest.approx([3.0, 4.0, 6.0, 12.0])
    for _ in range(6):
        costs.of(4).note(4, 50, 9.0)
    assert costs.of(4).seconds(4, 50) == pytest.approx(9.0)
    assert costs.of(2).seconds(4, 50) == pytest.approx(1 + 0.1 * 8)
    assert [costs.of(num_rows).max_width for num_rows in (2, 4, 8, 32)] == [16, 8, 4, 1]
