"""What the benchmarks compute from what they measured; the measuring itself is theirs alone."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.memory import slope
from benchmarks.model_free import ModelFree, Told
from benchmarks.open_loop import Judged, Played, play, shares
from benchmarks.prompts import num_common
from benchmarks.recordings import Conversation, Reply, Request, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS
from tests.models import tiny_model


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


def told(num_prompt: int, num_cached: int, num_possible: int, *, is_first: bool = False) -> Judged:
    return Judged(Told(num_prompt, num_cached, None), Possible(num_prompt, num_possible), is_first)


def test_shares_are_pooled_over_tokens_and_leave_first_requests_out() -> None:
    """A long prompt counts for more than a short one; what nobody can know counts only when asked for."""
    first, short, long = told(50, 0, 0, is_first=True), told(100, 50, 60), told(300, 300, 300)
    played = [Played("c", "one", "f", (first, short)), Played("c", "two", "f", (long,))]
    warm, every = shares(played, with_first=False), shares(played, with_first=True)
    assert (warm.num_requests, warm.reuse, warm.oracle) == (2, 0.875, 0.9)
    assert (every.num_requests, every.reuse, every.oracle) == (3, 350 / 450, 360 / 450)
    assert not warm.is_at_oracle


def wire(*messages: tuple[str, str]) -> Request:
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return Request(body, Reply(content="It is so."))


def test_the_oracle_is_not_lowered_by_a_volatile_value_but_by_a_meaning() -> None:
    """A clock that moved is frozen, another word is not; a message that is gone takes with it what came behind."""
    oracle = FrozenOracle("qwen3", tiny_model("qwen3"))
    system, answer = "Help. Current time is 10:00", ("assistant", "It is so.")
    first = oracle.judge(wire(("system", system), ("user", "Look."), ("user", "A carrier.")))
    moved = oracle.judge(
        wire(("system", "Help. Current time is 11:11"), ("user", "Look."), answer, ("user", "And now?"))
    )
    other = oracle.judge(wire(("system", "Assist. Current time is 10:00"), ("user", "Look.")))
    assert first.num_reusable_tokens == 0
    assert 10 < moved.num_reusable_tokens < first.num_prompt_tokens
    assert other.num_reusable_tokens < 8 < moved.num_reusable_tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_conversation_without_a_model_reuses_prompt_and_answer(family: str) -> None:
    """The path without a model starts each turn where the last one ended, as the oracle beside it says."""
    folder, is_cuttable = tiny_model(family), CONVENTIONS[family].is_cuttable
    talk = [("system", "You help. " * 20), ("user", "Look."), ("assistant", "It is so."), ("user", "And now?")]
    requests = tuple(wire(*talk[:length]) for length in (2, 4))
    played = play(
        Conversation("c", "n", requests),
        family,
        ModelFree(folder, is_cuttable=is_cuttable),
        FrozenOracle(family, folder),
    )
    share = shares([played], with_first=False)
    assert share.oracle > 0.5
    assert share.is_at_oracle


def test_recordings_are_looked_for_in_and_beside_a_repository(tmp_path: Path) -> None:
    """None where there are none, so that a benchmark says so instead of failing."""
    (tmp_path / "repository").mkdir()
    assert shared_folder(tmp_path / "repository") is None
    (tmp_path / "shared").mkdir()
    assert shared_folder(tmp_path / "repository") == tmp_path / "shared"
