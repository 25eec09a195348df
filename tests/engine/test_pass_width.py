"""How many tokens are drafted at a time: what brings most tokens a second, no more than the operator says."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.engine import pass_costs
from kvserve.engine.draft_nouns import DraftSettings, DraftsSeen
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts, pays
from kvserve.settings.kinds import MAX_DRAFT_TOKENS
from tests.engine.test_drafted_law import loaded
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


class LedModel:
    """A module whose passes take as long as they are told to. It has no layers, so no caches."""

    layers = ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.widths, self._now, self._seconds = list[int](), 0.0, seconds
        monkeypatch.setattr(pass_costs, "perf_counter", lambda: self._now)

    def __call__(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        self.widths.append(tokens.shape[1])
        self._now += self._seconds(tokens.shape[1])
        return mx.zeros((*tokens.shape, 2))


@pytest.mark.parametrize(
    ("seconds", "num_passes", "num_worth"),
    [
        pytest.param(lambda width: 1.0 + 0.1 * width, 15, 15, id="a wide pass costs little more"),
        pytest.param(lambda width: 0.97 * width, 10, 0, id="token after token"),
        pytest.param(lambda width: min(float(width), 6.1), 16, 15, id="many at once, few one by one"),
        pytest.param(lambda width: {1: 1.0, 2: 1.5}.get(width, float(width)), 15, 1, id="two at once, no more"),
    ],
)
def test_a_model_that_computes_token_after_token_is_not_slow_to_start(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], num_passes: int, num_worth: int
) -> None:
    """Most wide passes are not tried: no draft pays, not even one that is right for certain."""
    model, costs = LedModel(monkeypatch, seconds), PassCosts()
    ratios = costs.measure(model, list)
    assert len(model.widths) == num_passes
    assert pays(ratios) is (num_worth > 0)
    assert costs.num_worth([1.0] * 15, 90, 0, goes_back=False) == num_worth


def test_a_model_that_no_draft_makes_faster_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start, in figures, and drafts nothing. The next start knows it and takes no pass."""
    model = LedModel(monkeypatch, lambda width: 0.99 * width)
    tried = replace(loaded("qwen3"), module=model, leaf_forms=())
    support = find_draft_support(tried, DraftSettings(is_on=True))
    said = "Nothing is drafted: a pass of 16 tokens takes 16.0 times as long as one of a single token"
    assert (support.ways, support.notes) == (None, (f"{said}.",))
    assert support.seen is not None and DraftsSeen.from_row(support.seen.row()) == support.seen
    model.widths.clear()
    again = find_draft_support(tried, DraftSettings(is_on=True), support.seen)
    assert (again.ways, again.notes, again.seen, model.widths) == (
        None,
        (f"{said} (found at an earlier start).",),
        support.seen,
        [],
    )
