"""The nouns of the prefix cache as the engine uses it: what the operator decides, a row's lease, the cache's report.
No arrays.
"""

from dataclasses import dataclass, field

from kvserve.cache.checkpoints import Stop
from kvserve.cache.node import Lease
from kvserve.cache.records import CacheStats
from kvserve.cache.token_run import TokenRun
from kvserve.engine.pinned import DiskReport
from kvserve.engine.rows import Row
from kvserve.engine.warming import WarmReport

LONG_ROW_TOKENS = 4096
"""A row this long leaves buffers behind that MLX would keep for ever: its cache is emptied when the row goes."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the operator decides about the prefix cache; `max_bytes` None leaves it to the engine."""

    max_bytes: int | None
    block_size: int
    use_index: bool
    max_entries: int
    max_entries_per_owner: int
    ttl_seconds: float
    owner_idle_seconds: float
    keep_alive_seconds: float = 0.0
    check_seconds: float = 1.0


@dataclass(slots=True, eq=False)
class CacheLease:
    """A row in the cache: the KV that it uses, where its prefill stops, and its prompt for rows that come after it.

    `is_stuck`: what it has computed cannot be taken in while it decodes. `may_evict`: a client asked for it, so that
    what it computes is worth more than what was used before; else it is kept where there is room.
    """

    row: Row
    lease: Lease
    prompt: TokenRun
    stops: list[Stop] = field(default_factory=list)
    is_stuck: bool = False
    may_evict: bool = True

    def next_stop(self, num_done: int) -> int | None:
        """The first planned offset behind `num_done`."""
        return next((stop.offset for stop in self.stops if stop.offset > num_done), None)

    def stop_at(self, offset: int) -> Stop | None:
        return next((stop for stop in self.stops if stop.offset == offset), None)

    def add_stop(self, stop: Stop) -> None:
        self.stops = sorted([*self.stops, stop], key=lambda each: each.offset)


@dataclass(frozen=True, slots=True)
class ForgottenKv:
    """What went with those who were forgotten: tokens and bytes in RAM, bytes on disk. `is_done`: all of it is gone;
    else a part of it is deleted from disk later."""

    num_tokens: int = 0
    num_ram_bytes: int = 0
    num_disk_bytes: int = 0
    is_done: bool = True


@dataclass(slots=True)
class Totals:
    """Prompt tokens of all requests that began: those found in the cache, and those computed so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What `/v1/cache` shows: the tree's own figures, its budget for kept and live KV, and the engine's counters.
    `has_lost_disk`: there is to be one, and it cannot be used."""

    stats: CacheStats
    totals: Totals
    num_hybrid_trim_misses: int
    max_bytes: int
    disk: DiskReport | None = None
    warming: WarmReport | None = None
    has_lost_disk: bool = False
