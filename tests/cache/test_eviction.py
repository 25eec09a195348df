"""The scores: which of two candidates is worth more."""

from dataclasses import replace

import pytest

from kvserve.cache.eviction import SCORES, Candidate, value_score

BASE = Candidate(start=1000, end=2000, num_bytes=1000, num_uses=2, age_seconds=100.0)


@pytest.mark.parametrize(
    "better",
    [
        replace(BASE, end=3000),
        replace(BASE, num_bytes=500),
        replace(BASE, age_seconds=10.0),
    ],
)
def test_value_grows_with_what_it_saves_and_falls_with_what_it_costs(better: Candidate) -> None:
    """More tokens, fewer bytes, a more recent use: each is worth more."""
    assert value_score(better) > value_score(BASE)


def test_places_inside_a_branch_are_worth_less_than_its_end() -> None:
    """Agents go on at the end and rarely come back to one given place before it."""
    assert value_score(replace(BASE, is_end=False)) < value_score(BASE)


def test_what_is_brief_counts_as_used_half_an_hour_earlier() -> None:
    """A conversation that waits is worth more than what was asked once and shortly, until it leaves for its age."""
    asked_now = replace(BASE, age_seconds=0.0, is_brief=True)
    assert value_score(asked_now) < value_score(replace(BASE, age_seconds=1790.0))
    assert value_score(asked_now) > value_score(replace(BASE, age_seconds=1810.0))
    assert value_score(asked_now) > value_score(replace(asked_now, age_seconds=10.0))


@pytest.mark.parametrize("name", ["value", "age_length_frequency", "lru"])
def test_all_but_the_negative_control_age(name: str) -> None:
    """What was not used for long leaves before the same thing used lately."""
    assert SCORES[name](replace(BASE, age_seconds=1e5)) < SCORES[name](BASE)


def test_no_score_fails_on_edges() -> None:
    """Never used, just used, no tokens, no bytes: every score is a number."""
    edge = Candidate(0, 0, 0, 0, 0.0)
    assert all(isinstance(score(edge), float) for score in SCORES.values())


def test_deep_tokens_are_worth_no_more_than_others() -> None:
    """They take longer to compute, but by that a long conversation would push out shorter ones whole."""
    assert value_score(replace(BASE, start=50_000, end=51_000)) == value_score(BASE)
