"""Which row computes next: waiting rows are admitted, prefilled one chunk at a time, and decoded together.

    waiting -> admitted: lookup -> prefill from an offset -> decode -> finished: insert
               (lookup and insert are the prefix cache's two seams)

Between two prefill chunks every decoding row gets its step. Everything here belongs to the engine thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from kvserve.core import StopReason
from kvserve.engine.admission import Budget
from kvserve.engine.constraint import GrammarProcessor
from kvserve.engine.decode import DecodePool, Decoder, Step
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefill import ChunkLength, Prefill
from kvserve.engine.rows import Row
from kvserve.engine.sampling import processors_for, sampler_for
from kvserve.errors import EngineFailure

CHUNK_SECONDS_BESIDE_STREAMS = 0.2
CHUNK_SECONDS_ALONE = 1.0
LONG_ROW_TOKENS = 4096
"""A row this long leaves buffers behind that MLX would keep for ever: its cache is emptied when the row goes."""


class Scheduler:
    """All rows of one model. `tick` does one unit of work; nothing here blocks or raises for a single row's fault."""

    def __init__(
        self,
        model: LoadedModel,
        budget: Budget,
        *,
        prefill_step_size: int,
        watchdog_seconds: float,
        grammar_tokenizer: Callable[[int], Any],
        report: Callable[[str], None],
    ) -> None:
        self._model = model
        self._budget = budget
        self._watchdog_seconds = watchdog_seconds
        self._grammar_tokenizer = grammar_tokenizer
        self._report = report
        self._waiting: deque[Row] = deque()
        self._prefilling: list[Prefill] = []
        self._pool = DecodePool(model, budget.max_rows)
        self._chunk_length = ChunkLength(prefill_step_size)
        self._num_chunks = 0

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def num_decoding(self) -> int:
        return self._pool.num_rows

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._pool.num_rows)

    def add(self, row: Row) -> None:
        """Queue a row behind those that wait."""
        self._waiting.append(row)

    def tick(self) -> None:
        """Free rows that must go, admit rows that fit, then one prefill chunk and one token for every stream."""
        self._drop_leavers()
        self._admit()
        if self._prefilling:
            self._prefill_chunk(self._next_prefill())
            self._settle(self._pool.step_all())
        else:
            self._settle(self._pool.step())

    def drain(self) -> list[Row]:
        """Take every row out, whatever its stage; generators and caches are thrown away."""
        rows = [*self._waiting, *(prefill.row for prefill in self._prefilling), *self._pool.discard()]
        self._waiting.clear()
        self._prefilling.clear()
        return rows

    # --- leaving and entering -----------------------------------------------------------------------------------------

    def _drop_leavers(self) -> None:
        """Free the rows whose client left or whose time is up, between two steps."""
        for row, reason in list(self._leavers()):
            if row in self._waiting:
                self._waiting.remove(row)
            self._prefilling = [prefill for prefill in self._prefilling if prefill.row is not row]
            self._pool.remove([row])
            row.finish(reason)
            self._release(row)

    def _leavers(self) -> Iterator[tuple[Row, StopReason]]:
        now = time.monotonic()
        for row in [*self._waiting, *(prefill.row for prefill in self._prefilling), *self._pool.rows()]:
            if row.generation.is_cancelled:
                yield row, "cancelled"
            elif row.is_overdue(self._watchdog_seconds, now):
                yield row, "watchdog"

    def _admit(self) -> None:
        """Let waiting rows in, first come first served, as long as they fit."""
        while self._waiting:
            decoding = self._pool.rows()
            reserved = [self._reserved(row) for row in [*decoding, *(prefill.row for prefill in self._prefilling)]]
            padding = self._pool.padded_tokens() - sum(row.num_tokens for row in decoding)
            if not self._budget.can_hold(self._reserved(self._waiting[0]), reserved, padding):
                return
            self._begin_prefill(self._waiting.popleft())

    def _reserved(self, row: Row) -> int:
        return self._budget.reserved_tokens(len(row.request.prompt), row.request.max_tokens)

    def _begin_prefill(self, row: Row) -> None:
        """Here the prefix cache will look up how much of the prompt is known and restore it."""
        row.prefill_started_at = row.prefill_started_at or time.monotonic()
        self._prefilling.append(Prefill(row, self._model.new_caches(), num_done=0))

    # --- computing ----------------------------------------------------------------------------------------------------

    def _next_prefill(self) -> Prefill:
        """Oldest and shortest take turns: neither a long prompt nor a flood of short ones starves the others."""
        self._num_chunks += 1
        if self._num_chunks % 2:
            return self._prefilling[0]
        return min(self._prefilling, key=lambda prefill: prefill.num_left)

    def _prefill_chunk(self, prefill: Prefill) -> None:
        seconds = CHUNK_SECONDS_BESIDE_STREAMS if self._pool.num_rows else CHUNK_SECONDS_ALONE
        try:
            if prefill.num_left:
                prefill.step(self._model.module, self._chunk_length, seconds)
            if not prefill.num_left:
                self._pool.enter(prefill.row, prefill.caches, self._decoder(prefill.row))
                self._prefilling.remove(prefill)
        except Exception as error:  # noqa: BLE001 - a prefill touches no other row, so its failure stays its own
            self._prefilling.remove(prefill)
            prefill.row.fail(error)
            self._release(prefill.row)

    def _decoder(self, row: Row) -> Decoder:
        sampling, num_prompt_tokens = row.request.sampling, len(row.request.prompt)
        processors = processors_for(sampling, num_prompt_tokens)
        if row.request.grammar is not None:
            tokenizer = self._grammar_tokenizer(self._model.vocab_size)
            processors.append(GrammarProcessor(row.request.grammar, tokenizer, num_prompt_tokens))
        return Decoder(sampler_for(sampling, self._model.vocab_size), processors, sampling.seed is not None)

    def _settle(self, step: Step) -> None:
        """What a decode step left to do. Here the prefix cache will take in the KV of finished rows."""
        for row in step.finished:
            self._release(row)
        for row in step.failed:
            row.fail(row.failure or EngineFailure("The row failed for an unknown reason."))
            self._release(row)
        for row in step.evicted:
            self._report(f"A decode batch failed; request {row.request.request_id} is computed again from its tokens.")
            self._begin_prefill(row)

    def _release(self, row: Row) -> None:
        if row.num_tokens >= LONG_ROW_TOKENS:
            mx.clear_cache()
