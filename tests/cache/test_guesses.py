"""What is computed ahead of requests takes nothing from anybody: it is no use of its beginning, and it leaves first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import ROOMY, ROW_BYTES, STATE_BYTES, Clock, WholeState, keys_of, make_tree, rows_of, store
from tests.integrity import check_integrity
from tests.laws import IS_FULL, num_examples

GUESSER = 0
"""The session whose next turns are guessed."""


@dataclass(frozen=True)
class Turn:
    """A session says so many tokens more and is answered; then, maybe, its next prompt is guessed: what it has so far
    but for the last `num_wrong` tokens, and as many others."""

    session: int
    num_tokens: int
    seconds: float
    num_wrong: int | None


turns = st.lists(
    st.builds(
        Turn,
        session=st.integers(0, 3),
        num_tokens=st.integers(1, 12),
        seconds=st.sampled_from([0.0, 1.0, 30.0, 400.0]),
        num_wrong=st.sampled_from([None, 0, 1, 5, 9]),
    ),
    min_size=4,
    max_size=24,
)


def guess(tree: PrefixTree, prompt: TokenSequence, *, is_guess: bool = True) -> None:
    """Compute a prefix nobody asked for, in free RAM only, as the warmer does."""
    match = tree.lookup(prompt)
    num_bytes = ROW_BYTES * (len(prompt) - match.num_usable_tokens)
    if not tree.room().fits(num_bytes + STATE_BYTES, STATE_BYTES):
        return
    lease = tree.acquire(match, is_guess=is_guess)
    keys = keys_of(prompt)
    tree.extend(lease, prompt, len(prompt), rows_of(prompt), lambda: WholeState(keys))
    tree.release(lease)


def play(
    traffic: Sequence[Turn], num_bytes: int, *, needs_checkpoints: bool, with_guesses: bool, are_known: bool = True
) -> list[int]:
    """Each turn's tokens that were reused. `are_known`: guesses are known to be guesses."""
    clock = Clock()
    limits = replace(ROOMY, max_bytes=num_bytes, max_checkpoint_bytes=num_bytes // 2, max_entries_per_owner=2)
    tree = make_tree(limits, needs_checkpoints=needs_checkpoints, clock=clock)
    said: dict[int, list[int]] = {}
    reused: list[int] = []
    for number, turn in enumerate(traffic):
        clock.now += turn.seconds
        history = said.setdefault(turn.session, [1000 * turn.session])
        history += [1000 * turn.session + 20 * number + place for place in range(turn.num_tokens)]
        prompt = TokenSequence(tuple(history))
        reused.append(tree.lookup(prompt).num_usable_tokens)
        tree.evict(ROW_BYTES * (len(prompt) - reused[-1]))
        store(tree, prompt, (max(1, len(prompt) - 1), len(prompt)), owner=str(turn.session))
        tree.evict()
        if with_guesses and turn.session == GUESSER and turn.num_wrong is not None:
            kept = history[: max(1, len(history) - turn.num_wrong)]
            guess(
                tree, TokenSequence((*kept, *(50_000 + 100 * number + place for place in range(8)))), is_guess=are_known
            )
    check_integrity(tree)
    return reused


@pytest.mark.parametrize("needs_checkpoints", [False, True])
@given(traffic=turns, num_bytes=st.integers(100, 1200))
@settings(max_examples=num_examples(150) if IS_FULL else 40, deadline=None)
def test_guesses_never_lower_what_other_sessions_reuse(
    needs_checkpoints: bool, traffic: list[Turn], num_bytes: int
) -> None:
    """Any traffic in any RAM: each turn of a session that is not guessed reuses at least what it would without them."""
    without = play(traffic, num_bytes, needs_checkpoints=needs_checkpoints, with_guesses=False)
    with_guesses = play(traffic, num_bytes, needs_checkpoints=needs_checkpoints, with_guesses=True)
    others = [place for place, turn in enumerate(traffic) if turn.session != GUESSER]
    assert all(with_guesses[place] >= without[place] for place in others), (without, with_guesses)


def test_a_guess_that_left_leaves_no_branch_behind() -> None:
    """What it branched off from is in one piece again, so that bytes are taken from it as they would have been."""
    said = [(0, 12, 0.0, None), (0, 12, 0.0, 5), (0, 3, 0.0, None), (1, 4, 30.0, None), (1, 8, 0.0, None)]
    said += [(2, 10, 400.0, None), (3, 5, 0.0, None), (0, 4, 0.0, None), (2, 1, 0.0, None)]
    traffic = [Turn(*each) for each in said]
    without, guessed = (
        play(traffic, 400, needs_checkpoints=True, with_guesses=with_guesses) for with_guesses in (False, True)
    )
    assert guessed == without == [0, 13, 25, 0, 5, 0, 0, 24, 10]


def test_of_two_places_worth_the_same_the_older_one_leaves() -> None:
    """Which of them does not depend on a guess that was made meanwhile, and that left."""
    said = [(0, 9, None), (0, 10, None), (1, 1, None), (1, 11, None), (1, 11, None), (2, 2, None), (2, 2, None)]
    said += [(1, 3, None), (0, 1, 0), (1, 1, None), (1, 1, None)]
    traffic = [Turn(session, num_tokens, 0.0, num_wrong) for session, num_tokens, num_wrong in said]
    without, guessed = (
        play(traffic, 184, needs_checkpoints=False, with_guesses=with_guesses) for with_guesses in (False, True)
    )
    assert guessed == without


@pytest.mark.parametrize(("needs_checkpoints", "num_bytes"), [(False, 128), (True, 240)])
def test_a_guess_that_counted_as_a_use_would(needs_checkpoints: bool, num_bytes: int) -> None:
    """Negative control: in free RAM too, what was guessed would outlive what another session said before it."""
    said = [(1, 10, None), (0, 2, 0), (0, 8, 0), (0, 10, None), (1, 7, None)]
    if needs_checkpoints:
        said = [(0, 1, 0), (1, 8, None), (0, 10, None), (1, 1, None)]
    traffic = [Turn(session, num_tokens, 0.0, num_wrong) for session, num_tokens, num_wrong in said]
    without = play(traffic, num_bytes, needs_checkpoints=needs_checkpoints, with_guesses=False)
    known = play(traffic, num_bytes, needs_checkpoints=needs_checkpoints, with_guesses=True)
    unknown = play(traffic, num_bytes, needs_checkpoints=needs_checkpoints, with_guesses=True, are_known=False)
    assert unknown[-1] < without[-1] <= known[-1]
