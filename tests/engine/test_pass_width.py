"""How many tokens are drafted at a time: what brings most tokens a second, no more than the operator says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts
from kvserve.settings.kinds import MAX_DRAFT_TOKENS
from tests.laws import num_examples

CHANCES = st.lists(st.floats(0, 1), max_size=12)
SECONDS = st.dictionaries(st.integers(2, 16), st.floats(0.01, 10), max_size=4).map(lambda found: {1: 0.5, **found})


@settings(max_examples=num_examples(100), deadline=None)
@given(chances=CHANCES, seconds_by_width=SECONDS)
def test_no_width_gives_more_tokens_a_second(chances: list[float], seconds_by_width: dict[int, float]) -> None:
    """A plain step among them: nothing is tried that promises less than it, or as much."""
    costs = PassCosts()
    for width, seconds in seconds_by_width.items():
        costs.note(width, 10, seconds)
    rates, expected, reached = list[float](), 1.0, 1.0
    for width, chance in enumerate((*chances, 0.0), 1):
        rates.append(expected / (costs.seconds(width, 10) or 0.0))
        reached *= chance
        expected += reached
    assert costs.num_worth(chances, 10, 0, goes_back=False) == rates.index(max(rates))


@pytest.mark.parametrize("max_draft_tokens", [1, 8, MAX_DRAFT_TOKENS])
def test_no_more_drafted_tokens_are_worth_a_pass_than_there_may_be(max_draft_tokens: int) -> None:
    """Not even where a wider one would cost nothing; the most that can be set is the most that a pass may have."""
    costs = PassCosts(max_draft_tokens + 1)
    for width in range(1, MAX_PASS_TOKENS + 1):
        costs.note(width, 10, 1.0)
    assert costs.num_worth([1.0] * 100, 10, 0, goes_back=False) == max_draft_tokens
    assert MAX_DRAFT_TOKENS == MAX_PASS_TOKENS - 1
