"""How wide a pass may be is the operator's to say."""

import mlx.core as mx
import pytest

from kvserve.engine.pass_costs import PassCosts


@pytest.mark.parametrize("max_draft_tokens", [1, 8, 64])
def test_no_more_drafted_tokens_are_worth_a_pass_than_there_may_be(max_draft_tokens: int) -> None:
    """Not even where a wider one would cost nothing."""
    costs = PassCosts(max_draft_tokens + 1)
    for width in range(1, max_draft_tokens + 2):
        costs.note(width, 10, 1.0)
    assert costs.num_worth([1.0] * 100, 10, 0, goes_back=False) == max_draft_tokens
    assert costs.num_worth([1.0] * 100, 10, 1, goes_back=False) == max_draft_tokens - 1, "one goes through again"


def test_no_wider_pass_is_tried_at_load() -> None:
    """Each width twice, as the first may compile."""
    widths: list[int] = []

    def module(tokens: mx.array, cache: list[object]) -> mx.array:
        widths.append(tokens.shape[1])
        return mx.zeros((1, tokens.shape[1], 4))

    PassCosts(9).measure(module, list)
    assert widths == [1, 1, 2, 2, 4, 4, 8, 8]
