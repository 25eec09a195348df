"""Which prefill a new row waits for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.cache.in_flight import MIN_GAIN_TOKENS, InFlight, Wait, plan_wait
from kvserve.cache.token_run import pack
from kvserve.core import ImageSpan, TokenSequence

SYSTEM = tuple(range(4000))


def prompt(number: int, images: tuple[ImageSpan, ...] = ()) -> TokenSequence:
    return TokenSequence((*SYSTEM, *range(10_000 * number, 10_000 * number + 200)), images)


def flight(number: int, done: int, stored: int = 0, stops: tuple[int, ...] = ()) -> InFlight:
    return InFlight(pack(prompt(number)), done, stored, stops)


@pytest.mark.parametrize("needs_checkpoints", [True, False])
def test_agents_that_start_together_prefill_their_system_prompt_once(needs_checkpoints: bool) -> None:
    """The first computes, the others wait for it where their prompts part, asking it to stop there."""
    rows = [flight(1, done=256)]
    for number in range(2, 9):
        wait = plan_wait(prompt(number), 0, rows, needs_checkpoints=needs_checkpoints)
        assert wait == Wait(0, 4000, is_new_stop=True)


def test_a_planned_stop_is_not_planned_again() -> None:
    """The other row stops there anyway."""
    wait = plan_wait(prompt(2), 0, [flight(1, 256, stops=(4000,))], needs_checkpoints=True)
    assert wait == Wait(0, 4000, is_new_stop=False)


def test_a_state_that_was_passed_is_gone() -> None:
    """A row that computed past the common prefix without stopping cannot help a model without cuts; at the very
    offset it still can; rows that can be cut come with the next segment."""
    assert plan_wait(prompt(2), 0, [flight(1, 4001)], needs_checkpoints=True) is None
    assert plan_wait(prompt(2), 0, [flight(1, 4000)], needs_checkpoints=True) == Wait(0, 4000, is_new_stop=True)
    assert plan_wait(prompt(2), 0, [flight(1, 4001, 2048)], needs_checkpoints=False) == Wait(0, 4000, False)


def test_what_is_stored_is_found_by_lookup() -> None:
    """No wait for what is there, nor for a gain of a few tokens."""
    assert plan_wait(prompt(2), 4000, [flight(1, 4100, 4100)], needs_checkpoints=False) is None
    assert plan_wait(prompt(2), 4000 - MIN_GAIN_TOKENS + 1, [flight(1, 256)], needs_checkpoints=True) is None
    assert plan_wait(prompt(2), 4000 - MIN_GAIN_TOKENS, [flight(1, 256)], needs_checkpoints=True) is not None


def test_the_longest_common_prefix_wins() -> None:
    """Of several prefills the one that shares most."""
    longer = TokenSequence((*prompt(3).ids[:4150], 5, 6))
    wait = plan_wait(longer, 0, [flight(1, 256), flight(3, 256)], needs_checkpoints=True)
    assert wait == Wait(1, 4150, is_new_stop=True)


def test_a_repeated_prompt_waits_for_all_but_its_last_token() -> None:
    """The last token is computed by each row."""
    wait = plan_wait(prompt(1), 0, [flight(1, 256)], needs_checkpoints=True)
    assert wait == Wait(0, len(prompt(1)) - 1, is_new_stop=True)


def test_a_wait_is_for_a_place_where_prefills_are_cut() -> None:
    """Where these have a place of their own the row stops at the last one before the prompts part."""
    wait = plan_wait(prompt(2), 0, [flight(1, 256)], needs_checkpoints=True, cut_tokens=256)
    assert wait == Wait(0, 3840, is_new_stop=True)


def test_no_wait_inside_an_image() -> None:
    """Prompts that part inside an image (two sizes of one picture) part before it; another picture is a difference."""
    new = prompt(2, (ImageSpan(3900, 4000, "cat"),))
    other = InFlight(pack(prompt(1, (ImageSpan(3900, 4000, "dog"),))), 256, 0)
    same = InFlight(pack(prompt(1, (ImageSpan(3900, 3950, "cat"),))), 256, 0)
    for row in (other, same):
        assert plan_wait(new, 0, [row], needs_checkpoints=True) == Wait(0, 3900, is_new_stop=True)


@given(
    ids=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=200), min_size=2, max_size=4),
    usable=st.integers(0, 50),
    needs=st.booleans(),
)
def test_a_wait_is_worth_it_and_comes_true(ids: list[list[int]], usable: int, needs: bool) -> None:
    """The offset lies in the common prefix, ahead of the row, and gains tokens."""
    new = TokenSequence(tuple(ids[0]))
    rows = [InFlight(pack(TokenSequence(tuple(other))), len(other) // 3, 0) for other in ids[1:]]
    wait = plan_wait(new, usable, rows, needs_checkpoints=needs)
    if wait is not None:
        assert wait.offset - usable >= MIN_GAIN_TOKENS
        assert tuple(ids[0][: wait.offset]) == tuple(ids[1:][wait.row][: wait.offset])
        assert wait.offset < min(len(ids[0]), len(ids[1:][wait.row]))
        assert not needs or wait.offset >= rows[wait.row].num_done_tokens
