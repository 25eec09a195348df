"""Prefill: whose prompts go through the model next, alone or together, and what happens when one of them breaks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.engine.model import LoadedModel
from kvserve.engine.prefill import ChunkLength, Prefill
from kvserve.engine.prefill_together import companions, step_together
from kvserve.engine.rows import Row
from kvserve.engine.stretches import Stretches


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
        self._stretches = Stretches(chunk_length)
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
        self.end_stretch()

    def step(self, *, is_beside_streams: bool) -> PrefillStep | None:
        """One chunk of one row, or of several in one pass; None where nobody is left or a stretch is at its end. A row
        that fails is taken out, one that is through stays until it is taken out."""
        first = self._stretches.next(self._prefills, is_beside_streams=is_beside_streams)
        if first is None:
            return None
        seconds = self._stretches.chunk_seconds()
        group = [first]
        if self._can_share:
            group = companions(first, self._prefills, self._model, self._chunk_length, seconds)
        for prefill in group:
            prefill.row.prefill_started_at = prefill.row.prefill_started_at or time.monotonic()
        return self._step_together(group) if len(group) > 1 else self._step_alone(first, seconds)

    def end_stretch(self) -> bool:
        """End the stretch that runs; returns whether there was one."""
        return self._stretches.end()

    def _step_alone(self, prefill: Prefill, seconds: float) -> PrefillStep:
        try:
            num_tokens = prefill.step(self._model, self._chunk_length, seconds) if prefill.num_left else 0
        except Exception as error:  # noqa: BLE001 - a prefill touches no other row, so its failure stays its own
            self._prefills.remove(prefill)
            return PrefillStep(failed=(prefill, error))
        return PrefillStep((prefill,), num_tokens)

    def _step_together(self, group: list[Prefill]) -> PrefillStep:
        try:
            num_tokens = step_together(group, self._model, self._chunk_length)
        except Exception as error:  # noqa: BLE001 - whose failure it is shows when each computes alone
            self._can_share = False
            trouble = f"Short prompts are prefilled one by one from now on: {type(error).__name__}: {error}"
            return PrefillStep(trouble=trouble)
        return PrefillStep(tuple(group), num_tokens)
