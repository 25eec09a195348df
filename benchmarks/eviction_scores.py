"""The score that decides what leaves the cache, and those that it is compared with, by name. Not for use."""

import math
from collections.abc import Mapping

from kvserve.cache.eviction import Ageing, Candidate, Score, value_score


def age_length_frequency_score(candidate: Candidate) -> Ageing:
    """The given score, age / (sqrt(length) * log(frequency)): the highest leaves."""
    length = max(candidate.end - candidate.start, 1)
    return Ageing(1 / (math.sqrt(length) * math.log(2 + candidate.num_uses)), candidate.used_at)


def recency_score(candidate: Candidate) -> Ageing:
    """Least recently used first."""
    return Ageing(1.0, candidate.used_at)


def frequency_score(candidate: Candidate) -> Ageing:
    """Least frequently used first, without ageing: keeps what was popular once. A negative control."""
    return Ageing(1.0, candidate.num_uses)


SCORES: Mapping[str, Score] = {
    "value": value_score,
    "age_length_frequency": age_length_frequency_score,
    "lru": recency_score,
    "lfu": frequency_score,
}
