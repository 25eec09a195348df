"""How fast answers were decoded, from when their parts arrived; it knows no server, no model and no clock.

A pass that accepts a draft brings several tokens at once, and so may the first one. What came with an answer's first
tokens was computed before the time begins, and is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.client import BenchmarkError

BURST_SECONDS = 0.004
"""What arrives so soon after an answer's first part came of the same pass, which takes ten times as long."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """An answer of `num_tokens` as it arrived: the time of each part in seconds, and its size. Where a part does not
    say of how many tokens it is, its characters stand for them."""

    parts: tuple[tuple[float, int], ...]
    num_tokens: int

    @property
    def begun_at(self) -> float:
        """When the first pass's last part was there."""
        first = self.parts[0][0]
        return max(at for at, _ in self.parts if at <= first + BURST_SECONDS)

    @property
    def ended_at(self) -> float:
        return self.parts[-1][0]

    def num_tokens_after(self, begun_at: float) -> float:
        """Its tokens that arrived later."""
        whole = sum(size for _, size in self.parts)
        return self.num_tokens * sum(size for at, size in self.parts if at > begun_at) / whole


def tokens_per_second(answers: Sequence[Arrived]) -> float:
    """Of answers that ran beside one another, from when all have begun to the end of the last. Raises BenchmarkError
    where nothing arrived in between."""
    if not all(answer.parts for answer in answers):
        raise BenchmarkError("an answer has no text")
    begun_at = max(answer.begun_at for answer in answers)
    ended_at = max(answer.ended_at for answer in answers)
    num_tokens = sum(answer.num_tokens_after(begun_at) for answer in answers)
    if ended_at <= begun_at or not num_tokens:
        raise BenchmarkError("an answer came at once, or answers did not run beside one another")
    return num_tokens / (ended_at - begun_at)
