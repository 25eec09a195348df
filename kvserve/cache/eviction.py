"""The score of each eviction candidate. It knows figures, not the tree.

Candidates are evicted in the order of their urgency, a line over time, slope x (now - since):

    value = tokens x chance x (1 + age / 60 s)^-4 / bytes          the lowest is evicted first, as the highest of
    urgency = (tokens x chance / bytes)^-1/4 x (age + 60 s)

So no rank changes because time passes: two lines of one slope never cross (`eviction_order.py`).

Reuse of prompt tokens on 56 recorded agent conversations, six at a time, beside other scores
(benchmarks/eviction_scores.py; benchmarks/results/eviction.md has all figures):

    RAM per user in tokens of KV     value   given   LRU     LFU (negative control)
    dense, 25,000                    0.923   0.922   0.923   0.145
    dense, 100,000                   0.929   0.929   0.929   0.534
    27B hybrid, 25,000               0.910   0.881   0.878   0.187
    27B hybrid, 100,000              0.926   0.927   0.926   0.924
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

RECENT_SECONDS = 60.0
"""For about this long after its last use KV is as likely to be used again: an agent's tool runs that long."""

AGEING_POWER = 4
"""How steeply the chance of reuse falls beyond RECENT_SECONDS. Below 2 big old conversations displace running ones."""

REWIND_CHANCE = 0.05
"""How often an agent returns to a given place inside a branch, relative to continuing at its end."""

BRIEF_TOKENS = 512
"""Fewer tokens behind system and tools are a request that is seldom continued: a title, a file's name, a first try.
It takes a moment to compute again."""

BRIEF_HANDICAP_SECONDS = 1800.0
"""A brief request counts as used so much earlier: a conversation outlives it for as long as KV stays in RAM by
default."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An eviction candidate: the tokens `[start, end)` would be prefilled again, `num_bytes` would be freed.

    `is_end`: no stored tokens follow `end`. `is_brief`: it is all or a part of a request of few tokens behind the end
    of its system prompt and tools.
    """

    start: int
    end: int
    num_bytes: int
    num_uses: int
    used_at: float
    is_end: bool = True
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class Ageing:
    """How urgent a candidate's eviction is, as a line over time. `slope` is positive, or infinite for what no request
    can use; then `since` does not matter."""

    slope: float
    since: float

    def urgency(self, now: float) -> float:
        """The highest is evicted first."""
        return self.slope * (now - self.since)


type Score = Callable[[Candidate], Ageing]
"""How urgent a candidate's eviction is, at any time."""


def value_score(candidate: Candidate) -> Ageing:
    """Tokens to compute again x chance of reuse / bytes: the lowest is evicted first.

    The longer time that deep tokens take does not count: they would displace whole shorter conversations. The chance
    falls with the time since the last use. The number of uses does not count: the busiest places of a conversation that
    is over would stay.
    """
    num_tokens = candidate.end - candidate.start
    if num_tokens <= 0:
        return Ageing(math.inf, -math.inf)
    chance = 1.0 if candidate.is_end else REWIND_CHANCE
    used_at = candidate.used_at - (BRIEF_HANDICAP_SECONDS if candidate.is_brief else 0.0)
    slope = (num_tokens * chance / max(candidate.num_bytes, 1)) ** (-1 / AGEING_POWER)
    return Ageing(slope, used_at - RECENT_SECONDS)
