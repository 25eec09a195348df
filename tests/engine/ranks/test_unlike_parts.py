"""Ranks of a pipeline keep other things of the same tokens: one may have keys and values only, another one states only.
All of them begin a row at the same place."""

import pytest

from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import Pair, answer, loaded, pair

PROMPT = prompt_of(70)
NUM_SAID, TURN_END, NEXT = 2, 3, prompt_of(20, 5)
"""An answer ends with another token than the next prompt has behind it."""

KEYS, STATES = "qwen3", "qwen3_next"
ORDERS = ((KEYS, STATES), (STATES, KEYS))


def assert_same_passes(both: Pair) -> None:
    """Of the same tokens, whatever the caches of each rank are."""
    own, other = ([(shape, ids) for shape, ids, _ in rank.passes.noted()] for rank in (both.leader, both.follower))
    assert own == other
    assert [row.generated for row in both.rows] == [both.followed[row.serial].generated for row in both.rows]


def turns(lead: str, follower: str) -> list[int]:
    """How many tokens each prompt begins with: cold, the same again, its next turn, and one that branches off."""
    said = answer(lead, tuple(PROMPT), NUM_SAID)
    with pair(lead, follower=follower) as both:
        for prompt in (PROMPT, PROMPT, [*PROMPT, *said[:-1], TURN_END, *NEXT], [*PROMPT[:40], *NEXT]):
            both.add(prompt, 9, stop=[said[-1]], turn_end=TURN_END)
            both.run()
    assert both.ended == [None]
    assert_same_passes(both)
    return [row.num_cached_tokens for row in both.rows]


@pytest.mark.parametrize(("lead", "follower"), ORDERS)
def test_all_begin_where_one_has_states(lead: str, follower: str) -> None:
    """A stop token that no prompt repeats is taken back on the rank that could do without."""
    assert len(set(answer(lead, tuple(PROMPT), NUM_SAID))) == NUM_SAID, "it would stop earlier"
    cold, again, following, branch = turns(lead, follower)
    assert (cold, branch) == (0, 0), "where it parts from what is kept no rank with states has one"
    assert again == len(PROMPT) - 1
    assert following == len(PROMPT) + NUM_SAID - 1


@pytest.mark.parametrize("lead", [KEYS])
def test_a_rank_that_could_cut_and_pad_does_not(lead: str) -> None:
    """What its caches allow alone the others' do not. An empty state marks where theirs stand."""
    alone, part = loaded(lead), loaded(lead, has_states_elsewhere=True)
    assert alone.layout.is_cuttable and alone.layout.read_state(alone.new_caches()) is None
    assert alone.cache_support.can_pad
    state = part.layout.read_state(part.new_caches())
    assert not part.layout.is_cuttable
    assert state is not None and (state.leaves, state.num_bytes) == ((), 0)
    assert not part.cache_support.can_pad
