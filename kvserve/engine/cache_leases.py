"""Puts the KV of rows into the prefix cache, while they run and when they end, and counts what is held besides
meanwhile. A cache that raises is reported, and never costs an answer. Belongs to the engine thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from kvserve.core import TokenSequence
from kvserve.engine.borders import ShortMemory, costs_no_row
from kvserve.engine.cache_records import LONG_ROW_TOKENS, CacheLease
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import ExtractedRow
from kvserve.engine.kv_room import NO_ROOM
from kvserve.engine.kv_size import KvSize
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import Row

NOT_KEPT = "KV could not be kept and will be computed again"


class CacheLeases:
    """The rows that have begun, and their leases."""

    def __init__(
        self,
        cache: PrefixCache,
        sizes: KvSize,
        memory: ShortMemory,
        report: Callable[[str], None],
        account: Callable[[], None],
    ) -> None:
        """`account` is called when what is held beside batches has changed."""
        self._cache = cache
        self._sizes = sizes
        self._memory = memory
        self._report = report
        self._account = account
        self._of: dict[Row, CacheLease] = {}
        self._in_transit: dict[Row, float] = {}
        cache.kv_moves.with_second_try = memory.with_second_try

    @property
    def transit_bytes(self) -> float:
        """What rows hold that have left their batches and are not kept yet, and the states that running ones have
        besides."""
        return sum(self._in_transit.values()) + self._cache.kv_moves.held_bytes

    def begin(self, row: Row, cache_lease: CacheLease) -> None:
        """Note the lease of a row that has entered."""
        self._of[row] = cache_lease

    def get(self, row: Row) -> CacheLease | None:
        return self._of.get(row)

    @contextmanager
    def in_transit(self, *rows: Row) -> Iterator[None]:
        """Count the KV of rows on its way from a batch into the tree: it is there besides, unless it moves."""
        self._in_transit.update({row: self._sizes.held(row.num_tokens) for row in rows})
        self._account()
        try:
            yield
        finally:
            for row in rows:
                self._in_transit.pop(row, None)

    def keep(self, prefill: Prefill) -> None:
        """Store what a stop gives. What cannot be stored is computed again another time; the request continues."""
        with costs_no_row(self._report, NOT_KEPT):
            self._memory.with_second_try(
                lambda: self._cache.keep(prefill.cache_lease, prefill.caches, prefill.num_done)
            )

    def keep_rest(
        self, row: Row, caches: Sequence[Any], tokens: Sequence[int], rest: Sequence[Any] | None = None
    ) -> None:
        """Store all that a row has computed so far, whether a stop was planned there or not. Its buffers may be given
        up for it where only the `rest` of its batch has them besides."""
        if (cache_lease := self._of.get(row)) is None:
            return
        with costs_no_row(self._report, NOT_KEPT):
            extend = self._cache.extend
            self._note(row, self._memory.with_second_try(lambda: extend(cache_lease, caches, tokens, rest)))

    def keep_prefilled(self, prefill: Prefill) -> None:
        """The same of a row that has left its prefill."""
        self.keep_rest(prefill.row, prefill.caches, prefill.tokens[: prefill.num_done], ())

    def keep_prompt(
        self, row: Row, caches: Sequence[Any], tokens: Sequence[int], rest: Sequence[Any] | None = ()
    ) -> None:
        """Keep nothing of an ended row's answer, but what had moved to it from the tree, and what its prefill could not
        keep at its stops."""
        if rest is not None and (cache_lease := self._of.get(row)) is not None:
            sequence = TokenSequence(tuple(tokens), row.request.prompt.images)
            with costs_no_row(self._report, NOT_KEPT):
                self._note(row, self._cache.kv_moves.insert_prompt(cache_lease, sequence, caches, rest))

    def keep_prompt_only(self, row: Row, prefill: Prefill | None, left: ExtractedRow | None) -> None:
        """The same of a row that was ended, wherever it was, without what was kept of its answer meanwhile."""
        if prefill is not None:
            self.keep_prompt(row, prefill.caches, prefill.tokens)
        elif left is not None:
            self.keep_prompt(row, left.caches, left.tokens, left.rest)
        self.retract_answer(row)

    def keep_long_answers(self, pool: DecodePool, send_tokens: Callable[[], None]) -> None:
        """Keep what long answers have so far, so that it is on disk before they end: a crash loses their last tokens
        only. Tokens that wait are sent before."""
        if (stride := self._cache.answer_stride_tokens()) is None:
            return
        for row in pool.rows():
            cache_lease = self._of.get(row)
            if (
                cache_lease is None
                or row.num_tokens - (start := cache_lease.lease.num_tokens) <= stride
                or cache_lease.is_stuck
            ):
                continue
            send_tokens()
            if (left := pool.look_at(row)) is not None:
                self.keep_rest(row, left.caches, left.tokens)
            cache_lease.is_stuck = cache_lease.lease.num_tokens == start

    def retract_answer(self, row: Row) -> None:
        """Drop what was kept of a row's answer meanwhile."""
        with costs_no_row(self._report, "KV of an ended answer could not be dropped"):
            if (cache_lease := self._of.get(row)) is not None:
                self._cache.retract_answer(cache_lease)

    def release(self, row: Row, left: ExtractedRow | None) -> None:
        """Release a row; with `left` its KV is kept up to the last whole token."""
        cache_lease = self._of.pop(row, None)
        if cache_lease is not None:
            self._end(cache_lease, left)
        with costs_no_row(self._report, NO_ROOM):  # the next row makes room again
            self._cache.make_room()
        if row.num_tokens >= LONG_ROW_TOKENS:
            mx.clear_cache()

    def clear(self, *, is_cache_kept: bool) -> None:
        """Release all leases, or forget them where the cache goes too: all rows are gone."""
        if is_cache_kept:
            for cache_lease in self._of.values():
                self._cache.leave(cache_lease)
        self._of.clear()

    def _end(self, cache_lease: CacheLease, left: ExtractedRow | None) -> None:
        with costs_no_row(self._report, NOT_KEPT):
            if left is not None:
                row, finish = cache_lease.row, self._cache.finish
                is_moved = self._memory.with_second_try(
                    lambda: finish(cache_lease, left.caches, left.tokens, left.rest)
                )
                self._note(row, is_moved)
        self._cache.leave(cache_lease)

    def _note(self, row: Row, is_moved: bool) -> None:
        if is_moved:
            self._in_transit.pop(row, None)
            self._account()
