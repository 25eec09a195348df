"""How much of a draft a pass takes, from chances and measured seconds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.drafting.width import best_width, seconds_of_widths
from tests.laws import num_examples

CHANCES = st.lists(st.floats(0, 1), max_size=12)
SECONDS = st.dictionaries(st.integers(2, 16), st.floats(0.01, 10), max_size=4).map(lambda found: {1: 0.5, **found})


def _rate(chances: list[float], num: int, seconds: list[float]) -> float:
    expected, reached = 1.0, 1.0
    for chance in chances[:num]:
        reached *= chance
        expected += reached
    return expected / seconds[num]


@settings(max_examples=num_examples(100), deadline=None)
@given(chances=CHANCES, seconds_by_width=SECONDS)
def test_no_width_gives_more_tokens_a_second(chances: list[float], seconds_by_width: dict[int, float]) -> None:
    """A plain step among them: nothing is tried that promises less than it, or as much."""
    seconds = seconds_of_widths(len(chances) + 1, seconds_by_width)
    rates = [_rate(chances, num, seconds) for num in range(len(seconds))]
    best = best_width(chances, seconds_by_width)
    assert rates[best] == max(rates)
    assert best == rates.index(max(rates))


@pytest.mark.parametrize(
    ("chances", "seconds_by_width", "expected"),
    [
        ([0.9, 0.9], {1: 1.0, 2: 1.0, 3: 1.0}, 2),
        ([0.9, 0.9], {1: 1.0, 2: 1.95, 3: 3.0}, 0),  # a pass that costs what it gives
        ([0.5, 0.0, 0.9], {1: 1.0, 4: 1.0}, 1),  # nothing behind what is surely wrong
        ([0.99] * 8, {1: 1.0, 4: 1.5}, 3),  # no wider than what was measured
        ([0.99] * 8, {1: 1.0}, 0),
        ([], {1: 1.0, 4: 1.0}, 0),
    ],
)
def test_the_expected_gain_decides(chances: list[float], seconds_by_width: dict[int, float], expected: int) -> None:
    """What is not measured, not there or not worth its pass is not tried."""
    assert best_width(chances, seconds_by_width) == expected


def test_between_measured_widths_seconds_lie_on_a_line() -> None:
    """And there are none behind the widest."""
    assert seconds_of_widths(9, {1: 1.0, 3: 2.0, 4: 4.0}) == [1.0, 1.5, 2.0, 4.0]
    assert seconds_of_widths(2, {1: 1.0, 3: 2.0}) == [1.0, 1.5]


def test_without_a_measured_plain_step_there_is_nothing_to_compare_with() -> None:
    """It says so instead of guessing."""
    with pytest.raises(ValueError, match="plain step"):
        best_width([0.5], {2: 1.0})
