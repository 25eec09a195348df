"""How many tokens are drafted at a time is the operator's to say."""

import pytest

from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts
from kvserve.settings.kinds import MAX_DRAFT_TOKENS


@pytest.mark.parametrize("max_draft_tokens", [1, 8, MAX_DRAFT_TOKENS])
def test_no_more_drafted_tokens_are_worth_a_pass_than_there_may_be(max_draft_tokens: int) -> None:
    """Not even where a wider one would cost nothing; the most that can be set is the most that a pass may have."""
    costs = PassCosts(max_draft_tokens + 1)
    for width in range(1, MAX_PASS_TOKENS + 1):
        costs.note(width, 10, 1.0)
    assert costs.num_worth([1.0] * 100, 10, 0, goes_back=False) == max_draft_tokens
    assert MAX_DRAFT_TOKENS == MAX_PASS_TOKENS - 1
