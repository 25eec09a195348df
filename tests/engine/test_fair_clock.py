"""The clock of equal shares beside a machine that really divides itself, and what streams are owed."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.engine.fair_clock import FairClock, StreamShare
from tests.laws import num_examples

ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), min_size=1, max_size=8)
"""When each row comes, in work that was done before, and its own work."""


def ends_by_hand(rows: list[tuple[int, int]]) -> list[Fraction]:
    """After how much work each row is through on a machine that works on all that are there at once."""
    left = {number: Fraction(work) for number, (_, work) in enumerate(rows)}
    ends, done = dict[int, Fraction](), Fraction(0)
    while left:
        there = [number for number in left if rows[number][0] <= done]
        coming = [rows[number][0] - done for number in left if number not in there]
        if not there:
            done += min(coming)
            continue
        part = min([left[number] for number in there] + [wait / len(there) for wait in coming])
        done += part * len(there)
        for number in there:
            left[number] -= part
            if not left[number]:
                ends[number] = done
                del left[number]
    return [ends[number] for number in range(len(rows))]


@settings(max_examples=num_examples(40), deadline=None)
@given(rows=ROWS)
def test_rows_end_where_a_machine_that_divides_itself_ends_them(rows: list[tuple[int, int]]) -> None:
    """In that order too, whoever comes meanwhile."""
    clock = FairClock[int]()
    coming = sorted(range(len(rows)), key=lambda number: rows[number][0])
    found, done = dict[int, float](), 0.0
    expected = ends_by_hand(rows)
    for at in map(float, sorted({*(come for come, _ in rows), *expected})):
        clock.advance(at - done)
        done = at
        for number in [number for number in coming if rows[number][0] <= at]:
            coming.remove(number)
            clock.enter(number, rows[number][1])
        for number in range(len(rows)):
            if number not in coming and number not in found and clock.now >= clock.finish(number) - 1e-6:
                found[number] = at
    assert [found[number] for number in range(len(rows))] == [float(end) for end in expected]


def test_a_row_that_was_quicker_keeps_its_place_until_the_clock_has_passed_it() -> None:
    """Else who comes after it would be put before those that were promised an earlier end."""
    clock = FairClock[str]()
    clock.enter("quick", 10)
    clock.enter("slow", 20)
    clock.advance(10)  # all of it was done for the quick one
    clock.leave("quick")
    clock.enter("later", 14)
    assert clock.now == 5
    assert (clock.finish("slow"), clock.finish("later")) == (20, 19)
    clock.advance(15)
    assert clock.now == 10  # the quick one had its part of them


def test_of_a_row_that_leaves_only_what_was_done_counts() -> None:
    clock = FairClock[str]()
    clock.enter("gone", 1000)
    clock.enter("stays", 30)
    clock.advance(10)
    clock.leave("gone", 994)
    clock.advance(3)
    assert clock.now == 7  # two until 6, then one


def test_a_row_with_more_work_than_was_known_is_through_later() -> None:
    """What was kept of its prompt has left meanwhile; less than was known changes nothing."""
    clock = FairClock[str]()
    clock.enter("row", 10)
    clock.advance(4)
    clock.correct("row", 8)
    assert clock.finish("row") == 10
    clock.correct("row", 25)
    assert clock.finish("row") == 25
    clock.advance(100)
    assert clock.now == 25


def test_who_comes_when_nobody_has_work_has_the_machine() -> None:
    clock = FairClock[str]()
    clock.enter("shared", 1000)  # another one computed most of it
    clock.advance(10)
    clock.leave("shared")
    clock.rest()
    clock.enter("row", 5)
    clock.advance(5)
    assert clock.now == clock.finish("row")
    assert clock.finish("unknown") == clock.now


@pytest.mark.parametrize(("share", "owed"), [(0.5, 0.2), (0.75, 0.6), (0.0, 0.0)])
def test_streams_are_owed_their_share_of_the_time_that_prompts_take(share: float, owed: float) -> None:
    account = StreamShare(share)
    account.prefilled(0.3, is_beside_streams=False)
    account.prefilled(0.2, is_beside_streams=True)
    assert (account.owed_seconds, account.slice_seconds) == (pytest.approx(owed), pytest.approx(0.5))
    account.stepped(1, 0.3, is_beside_prompts=True)
    assert (account.owed_seconds, account.slice_seconds) == (pytest.approx(owed - 0.3), 0.0)
    account.stepped(1, 0.3, is_beside_prompts=False)
    assert account.owed_seconds == 0.0


@pytest.mark.parametrize(("beside", "counted"), [(0.010, 0.010), (0.0203, 0.020), (0.1, 0.09)])
def test_a_step_beside_prompts_counts_as_one_of_those_that_streams_took_alone(beside: float, counted: float) -> None:
    """One that is much slower tells of the machine. Other streams have another pace, which nobody knows yet."""
    account = StreamShare(0.5)
    for seconds in (0.5, 0.02, 0.019, 0.02, 0.021):
        account.stepped(2, seconds, is_beside_prompts=False)
    account.stepped(2, beside, is_beside_prompts=True)
    assert account.owed_seconds == pytest.approx(-counted)
    account.stepped(3, beside, is_beside_prompts=True)
    assert account.owed_seconds == pytest.approx(-counted - beside)


def test_what_streams_were_owed_goes_with_the_last_of_them() -> None:
    """Else a prompt would wait for streams that came after it, or these for a longer chunk."""
    account = StreamShare(0.5)
    account.prefilled(60.0, is_beside_streams=True)
    account.prefilled(0.1, is_beside_streams=False)
    assert account.owed_seconds == 0.0
    account.stepped(1, 5.0, is_beside_prompts=True)
    account.prefilled(0.1, is_beside_streams=False)
    assert account.owed_seconds == 0.0
