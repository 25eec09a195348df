"""Prefill: prompts go through the model, alone or together, and what happens when one of them breaks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.engine.borders import described
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefill import ChunkLength, Prefill
from kvserve.engine.prefill_together import companions, step_together
from kvserve.engine.rows import Row


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What one chunk brought: the rows that have so many tokens more between them, or one that failed and its error.

    `trouble`: rows that were to compute together could not, and none will from now on.
    """

    computed: tuple[Prefill, ...] = ()
    num_tokens: int = 0
    failed: tuple[Prefill, Exception] | None = None
    trouble: str = ""


class PrefillPool:
    """All rows that are being prefilled, in the order in which they came. Owned by the engine thread."""

    def __init__(self, model: LoadedModel, chunk_length: ChunkLength) -> None:
        self._model = model
        self._chunk_length = chunk_length
        self._can_share = model.cache_support.can_pad
        self._prefills: list[Prefill] = []

    def __iter__(self) -> Iterator[Prefill]:
        return iter(self._prefills)

    def __len__(self) -> int:
        return len(self._prefills)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the newest chunk; None before there was one."""
        return self._chunk_length.tokens_per_second

    @property
    def slowest_tokens_per_second(self) -> float | None:
        """The rate that can be relied on."""
        return self._chunk_length.slowest_tokens_per_second

    def add(self, prefill: Prefill) -> None:
        """Take a row in behind the others."""
        self._prefills.append(prefill)

    def remove(self, row: Row) -> Prefill | None:
        """Take a row out between two chunks; None if it is not being prefilled."""
        found = next((prefill for prefill in self._prefills if prefill.row is row), None)
        if found is not None:
            self._prefills.remove(found)
        return found

    def discard(self) -> None:
        """Throw all of them away."""
        self._prefills.clear()

    def step(self, row: Row, seconds: float) -> PrefillStep:
        """One chunk of this row, of about so many seconds, or of several rows in one pass. One that fails is taken out,
        one that is through stays until it is taken out."""
        first = next(prefill for prefill in self._prefills if prefill.row is row)
        group = [first]
        if self._can_share:
            group = companions(first, self._prefills, self._model, self._chunk_length, seconds)
        for prefill in group:
            prefill.row.prefill_started_at = prefill.row.prefill_started_at or time.monotonic()
        try:
            num_tokens = self._compute(group, seconds)
        except Exception as error:  # noqa: BLE001 - a prefill touches no other row: a row's failure stays its own
            return self._failed(group, error)
        return PrefillStep(tuple(group), num_tokens)

    def _compute(self, group: list[Prefill], seconds: float) -> int:
        """The chunk, and its length over all rows. Raises what the model raises."""
        if len(group) > 1:
            return step_together(group, self._model, self._chunk_length)
        [prefill] = group
        return prefill.step(self._model, self._chunk_length, seconds) if prefill.num_left else 0

    def _failed(self, group: list[Prefill], error: Exception) -> PrefillStep:
        """A row that computed alone is taken out. Of several, whose failure it is shows when each computes alone."""
        if len(group) > 1:
            self._can_share = False
            return PrefillStep(trouble=f"Short prompts are prefilled one by one from now on: {described(error)}")
        [prefill] = group
        self._prefills.remove(prefill)
        return PrefillStep(failed=(prefill, error))
