"""What the benchmarks compute from what they measured; the measuring itself is theirs alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import slope
from benchmarks.prompts import num_common


@given(rise=st.floats(-100, 100), start=st.floats(-100, 100), num=st.integers(2, 50))
def test_the_slope_of_a_line_is_its_rise(rise: float, start: float, num: int) -> None:
    """Points on a line give the line back."""
    xs = [2.0 * number for number in range(num)]
    assert slope(xs, [start + rise * x for x in xs]) == pytest.approx(rise, abs=1e-6)


def test_noise_around_a_level_has_no_slope_and_a_leak_has() -> None:
    """A leak that is smaller than the noise of a single reading is seen all the same."""
    rng = random.Random(2)
    xs = [float(number) for number in range(100)]
    noise = [rng.uniform(-50, 50) for _ in xs]
    assert abs(slope(xs, noise)) < 0.3
    assert slope(xs, [value + x for value, x in zip(noise, xs, strict=True)]) > 0.7


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_beginning_is_the_longest_one(base: list[int], one: list[int], other: list[int]) -> None:
    """Equal up to there, and different or at an end behind it."""
    a, b = [*base, *one], [*base, *other]
    length = num_common(a, b)
    assert len(base) <= length and a[:length] == b[:length]
    assert length in (len(a), len(b)) or a[length] != b[length]
