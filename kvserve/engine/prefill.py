"""Prefill of one row: its prompt goes through the model in chunks, on plain caches, until one token is left.

A prefill starts at any offset whose KV the caches already hold and can be left between two chunks for as long as
something else is more urgent.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvserve.engine.cache_records import CacheLease
from kvserve.engine.kv_buffers import flat_caches, settle, with_room
from kvserve.engine.model import LoadedModel
from kvserve.engine.quantised import PackedCache
from kvserve.engine.ranks.decisions import CHUNK
from kvserve.engine.ranks.place import ALONE, Ranks
from kvserve.engine.rows import Row, expected_tokens
from kvserve.engine.vision_pass import RowImages, see

FIRST_CHUNK_TOKENS = 256
"""Before anything was measured: small enough for a large model, large enough to measure."""

ALIGNMENT_TOKENS = 16
NUM_NEWEST_CHUNKS = 3


@dataclass(slots=True)
class ChunkLength:
    """How many tokens the next chunk has, so that it takes about the seconds it may take.

    The rate is that of the newest chunks: attention makes later tokens of a long prompt dearer, and the machine may be
    busy with other things. It is the slowest of them, because what made one slow may come back with the next, and a
    running stream waits for the longest chunk, not for the average.
    """

    max_tokens: int
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST_CHUNKS))

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the newest chunk; None before there was one."""
        return self._newest[-1] if self._newest else None

    @property
    def slowest_tokens_per_second(self) -> float | None:
        """The rate that can be relied on; None before anything was measured."""
        return min(self._newest) if self._newest else None

    def within(self, seconds: float, num_last_tokens: int) -> int:
        """Tokens that fit into `seconds`, a multiple of 16 between 16 and `max_tokens`.

        At most twice as many as the same prompt's last chunk had (0: there was none): the rate may be that of another
        prompt, at another depth, and a stream must not pay for the difference.
        """
        cap = min(2 * num_last_tokens or FIRST_CHUNK_TOKENS, self.max_tokens)
        if not self._newest:
            return cap
        fitting = int(min(self._newest) * seconds) // ALIGNMENT_TOKENS * ALIGNMENT_TOKENS
        return max(ALIGNMENT_TOKENS, min(fitting, cap))

    def fits(self, num_tokens: int, seconds: float) -> bool:
        """Whether so many tokens are likely to take no longer than `seconds`."""
        return bool(self._newest) and num_tokens <= min(self._newest) * seconds

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk that was long enough to mean something."""
        if num_tokens >= ALIGNMENT_TOKENS and seconds > 0:
            self._newest.append(num_tokens / seconds)


@dataclass(slots=True, eq=False)
class Prefill:
    """One row on its way through its prompt: `caches` hold the KV of `tokens[:num_done]`, the last `num_computed` of
    them by its own chunks."""

    row: Row
    cache_lease: CacheLease
    caches: list[Any]
    num_done: int
    num_last_tokens: int = 0
    num_computed: int = 0
    images: RowImages | None = None
    ranks: Ranks = ALONE
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.row.tokens()

    @property
    def num_left(self) -> int:
        """Tokens still to prefill; the last token is not one of them: computing it gives the first answer token."""
        return len(self.tokens) - 1 - self.num_done

    @property
    def num_to_stop(self) -> int:
        """Tokens up to the next planned stop or the end. No chunk is longer, as a state can only be kept where it ends,
        unless an image must be computed in one piece."""
        stop = self.cache_lease.next_stop(self.num_done)
        return self.num_left if stop is None else min(self.num_left, stop - self.num_done)

    def step(self, model: LoadedModel, chunk_length: ChunkLength, max_seconds: float) -> int:
        """Compute the next chunk, wait for it, so that its time is known and nothing stays lazy, and say its length.

        MLX's cache of free buffers is emptied: chunks have other lengths and depths, and what one leaves behind is too
        small for the next. It costs nothing that can be measured (decision 0043).

        Where quantised KV starts the caches are converted.
        """
        self.caches = model.ready(self.caches, self.num_done)
        reserve(self.caches, expected_tokens(self.row))
        num_tokens = self.ranks.decided(CHUNK, lambda: self._length(model, chunk_length, max_seconds))
        chunk = self.tokens[self.num_done : self.num_done + num_tokens]
        started = time.perf_counter()
        self._compute(model, chunk)
        mx.eval([cache.state for cache in self.caches])
        mx.clear_cache()
        chunk_length.measured(num_tokens, time.perf_counter() - started)
        self.advance(num_tokens)
        return num_tokens

    def _length(self, model: LoadedModel, chunk_length: ChunkLength, max_seconds: float) -> int:
        """How many tokens the next chunk has."""
        if (cut_tokens := model.cache_support.cut_tokens) > 1:  # others would compute it in these chunks too
            num_tokens = min(self.num_to_stop, cut_tokens - self.num_done % cut_tokens)
        else:
            num_tokens = min(self.num_to_stop, chunk_length.within(max_seconds, self.num_last_tokens))
        if model.quantiser is not None:
            num_tokens = min(num_tokens, model.quantiser.longest_chunk(self.num_done))
        return self._whole_images(model, num_tokens)

    def advance(self, num_tokens: int) -> None:
        """Note that its caches hold so many tokens more."""
        self.num_done += num_tokens
        self.num_computed += num_tokens
        self.num_last_tokens = max(num_tokens, ALIGNMENT_TOKENS)
        self.row.report_progress(self.num_done)

    def _whole_images(self, model: LoadedModel, num_tokens: int) -> int:
        """So many tokens, or more where the chunk would cut what must be computed in one pass."""
        if self.images is None or model.vision is None or model.vision.rule == "anywhere":
            return num_tokens
        if model.vision.rule == "alone":
            return self.num_left
        return min(self.num_left, self.images.whole(self.num_done, self.num_done + num_tokens) - self.num_done)

    def _compute(self, model: LoadedModel, chunk: list[int]) -> None:
        if self.images is None or model.vision is None:
            model.module(mx.array(chunk)[None], cache=self.caches)
        else:
            decoder: Any = model.module
            see(decoder, model.vision.tower, self.images, chunk, self.num_done, self.caches)


def reserve(caches: Iterable[Any], num_tokens: int) -> None:
    """Make room for so many tokens in a row's caches, where there are some already: without it every chunk, and every
    few tokens of the answer, copy all that is there."""
    for leaf in flat_caches(caches):
        if isinstance(leaf, PackedCache):
            leaf.reserve(num_tokens)
            continue
        is_plain = type(leaf) is KVCache
        if is_plain and leaf.keys is not None and leaf.keys.shape[2] < num_tokens:
            leaf.keys = with_room(leaf.keys, leaf.offset, num_tokens)
            leaf.values = with_room(leaf.values, leaf.offset, num_tokens)
            settle(leaf.keys, leaf.values)
