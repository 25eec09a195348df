"""How long prefill may go on before running streams get their step, and whose prompt computes meanwhile."""

import time
from collections.abc import Sequence

from kvserve.engine.prefill import ChunkLength, Prefill

CHUNK_SECONDS_BESIDE_STREAMS = 0.25
CHUNK_SECONDS_ALONE = 1.0
STRETCH_SECONDS_ALONE = 2.0
"""How long prompts that come together may keep the first of them from its first token: a step with one row costs about
as much as one with all of them."""


class Stretches:
    """A stretch is one chunk, and what is left of its time for prompts that end within it, also for those that came
    meanwhile; where nobody reads an answer yet it is longer than a chunk may be.

    Short prompts that come together then decode together from the start, instead of one entering per step. Oldest and
    shortest begin a stretch by turns: neither a long prompt nor a flood of short ones starves the others.
    """

    def __init__(self, chunk_length: ChunkLength) -> None:
        self._chunk_length = chunk_length
        self._num_begun = 0
        self._ends_at: float | None = None

    def next(self, prefills: Sequence[Prefill], *, is_beside_streams: bool) -> Prefill | None:
        """Whose chunk is computed now, of prefills in the order in which they came; None at the end of a stretch."""
        if not prefills:
            return None
        shortest = min(prefills, key=lambda prefill: prefill.num_left)
        if self._ends_at is not None:
            return shortest if self._chunk_length.fits(shortest.num_left, self._seconds_left()) else None
        seconds = CHUNK_SECONDS_BESIDE_STREAMS if is_beside_streams else STRETCH_SECONDS_ALONE
        self._ends_at = time.monotonic() + seconds
        self._num_begun += 1
        return prefills[0] if self._num_begun % 2 else shortest

    def chunk_seconds(self) -> float:
        """How long the next chunk of the running stretch may take."""
        return min(self._seconds_left(), CHUNK_SECONDS_ALONE)

    def end(self) -> bool:
        """End the stretch that runs; returns whether there was one."""
        was_running = self._ends_at is not None
        self._ends_at = None
        return was_running

    def _seconds_left(self) -> float:
        return (self._ends_at or 0.0) - time.monotonic()
