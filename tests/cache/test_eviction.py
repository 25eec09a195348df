"""The scores: which of two candidates is worth more."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.eviction_scores import SCORES
from kvserve.cache.eviction import (
    BRIEF_HANDICAP_SECONDS,
    RECENT_SECONDS,
    REWIND_CHANCE,
    Candidate,
)
from tests.laws import num_examples

NOW = 10_000.0
BASE = Candidate(start=1000, end=2000, num_bytes=1000, num_uses=2, used_at=NOW - 100)


def worth(candidate: Candidate, score: str = "value") -> float:
    """The lowest leaves first."""
    return -SCORES[score](candidate).urgency(NOW)


candidates = st.builds(
    Candidate,
    start=st.just(0),
    end=st.integers(1, 10**6),
    num_bytes=st.integers(1, 10**9),
    num_uses=st.integers(0, 100),
    used_at=st.floats(0, NOW),
    is_end=st.booleans(),
    is_brief=st.booleans(),
)


@given(one=candidates, other=candidates)
@settings(max_examples=num_examples(100))
def test_the_order_is_that_of_tokens_times_chance_per_byte(one: Candidate, other: Candidate) -> None:
    """The line that a queue can keep orders as the figure does that it stands for."""

    def figure(candidate: Candidate) -> float:
        age_seconds = NOW - candidate.used_at + BRIEF_HANDICAP_SECONDS * candidate.is_brief
        chance = (1 + age_seconds / RECENT_SECONDS) ** -4 * (1.0 if candidate.is_end else REWIND_CHANCE)
        return candidate.end * chance / candidate.num_bytes

    assume(not math.isclose(figure(one), figure(other), rel_tol=1e-9))
    assert (worth(one) < worth(other)) == (figure(one) < figure(other))


@pytest.mark.parametrize(
    "better",
    [
        replace(BASE, end=3000),
        replace(BASE, num_bytes=500),
        replace(BASE, used_at=NOW - 10),
    ],
)
def test_value_grows_with_what_it_saves_and_falls_with_what_it_costs(better: Candidate) -> None:
    """More tokens, fewer bytes, a more recent use: each is worth more."""
    assert worth(better) > worth(BASE)


def test_places_inside_a_branch_are_worth_less_than_its_end() -> None:
    """Agents go on at the end and rarely come back to one given place before it."""
    assert worth(replace(BASE, is_end=False)) < worth(BASE)


def test_what_is_brief_counts_as_used_half_an_hour_earlier() -> None:
    """A conversation that waits is worth more than what was asked once and shortly, until it leaves for its age."""
    asked_now = replace(BASE, used_at=NOW, is_brief=True)
    assert worth(asked_now) < worth(replace(BASE, used_at=NOW - 1790))
    assert worth(asked_now) > worth(replace(BASE, used_at=NOW - 1810))
    assert worth(asked_now) > worth(replace(asked_now, used_at=NOW - 10))


@pytest.mark.parametrize("name", ["value", "age_length_frequency", "lru"])
def test_all_but_the_negative_control_age(name: str) -> None:
    """What was not used for long leaves before the same thing used lately."""
    assert worth(replace(BASE, used_at=NOW - 1e5), name) < worth(BASE, name)


def test_no_score_fails_on_edges() -> None:
    """Never used, just used, no tokens, no bytes: every score is a number, and what has no tokens leaves first."""
    edge = Candidate(0, 0, 0, 0, NOW)
    assert not any(math.isnan(worth(edge, name)) for name in SCORES)
    assert worth(edge) < worth(replace(BASE, used_at=0.0))


def test_deep_tokens_are_worth_no_more_than_others() -> None:
    """They take longer to compute, but by that a long conversation would push out shorter ones whole."""
    assert worth(replace(BASE, start=50_000, end=51_000)) == worth(BASE)
