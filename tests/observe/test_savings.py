"""What reuse has saved, by what prefill took, and which turn of a conversation says so."""

from dataclasses import replace

import pytest

from kvserve.core import RequestId
from kvserve.observe.savings import MAX_CONVERSATIONS, MIN_MEASURED_TOKENS, Savings
from kvserve.requests.request_facts import RequestFacts

COLD = RequestFacts(RequestId("a"), "chat", "tiny", 1000, 0, num_prefilled_tokens=1000, prefill_seconds=4.0)
WARM = replace(COLD, num_cached_tokens=900, num_prefilled_tokens=20, prefill_seconds=3.0)


def test_cached_tokens_would_have_taken_what_computed_ones_took() -> None:
    """By model; a short prefill, which is mostly what every request costs, measures nothing."""
    savings = Savings()
    assert savings.seconds_saved(WARM) is None
    assert savings.seconds_saved(COLD) == 0.0
    assert savings.seconds_saved(WARM) == pytest.approx(3.6)
    assert savings.seconds_saved(replace(WARM, model="other")) is None
    faster = replace(COLD, num_prefilled_tokens=3000, prefill_seconds=4.0)
    assert savings.seconds_saved(faster) == 0.0
    assert savings.seconds_saved(WARM) == pytest.approx(900 * 8.0 / 4000)
    edge = replace(WARM, num_prefilled_tokens=MIN_MEASURED_TOKENS, prefill_seconds=80.0)
    assert savings.seconds_saved(edge) == pytest.approx(900 * 88.0 / 4032)


def test_what_was_measured_long_ago_counts_less() -> None:
    """A model that became faster, as beside fewer others, is known as such soon."""
    savings = Savings()
    for _ in range(100):
        savings.seconds_saved(COLD)
    for _ in range(400):
        savings.seconds_saved(replace(COLD, prefill_seconds=1.0))
    assert savings.seconds_saved(WARM) == pytest.approx(0.9, rel=0.2)


def test_a_request_that_measured_nothing_saves_what_is_known() -> None:
    savings = Savings()
    savings.seconds_saved(COLD)
    assert savings.seconds_saved(replace(WARM, prefill_seconds=None)) == pytest.approx(3.6)


def test_a_conversation_is_told_of_once() -> None:
    """Also by its branches; a cold turn, or a beginning that any two prompts share, tells nothing."""
    savings = Savings()
    assert not savings.is_first_warm(COLD, "a", None)
    assert not savings.is_first_warm(replace(WARM, num_cached_tokens=499), "a", None)
    assert savings.is_first_warm(WARM, "a", None)
    assert not savings.is_first_warm(WARM, "a", None)
    assert not savings.is_first_warm(WARM, "b", "a") and not savings.is_first_warm(WARM, "c", "b")
    assert savings.is_first_warm(WARM, "d", None)
    savings.clear()
    assert savings.is_first_warm(WARM, "a", None)


def test_conversations_that_are_remembered_are_bounded() -> None:
    savings = Savings()
    for number in range(MAX_CONVERSATIONS + 1):
        savings.is_first_warm(WARM, number, None)
    assert savings.is_first_warm(WARM, 0, None) and not savings.is_first_warm(WARM, MAX_CONVERSATIONS, None)
