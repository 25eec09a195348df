"""What an admitted row will start from, and what is told of the disk that gives it. Nouns of the engine thread."""

import math
import time
from dataclasses import dataclass, field

from kvserve.cache.disk_records import DiskStats, Load
from kvserve.cache.node import Lease
from kvserve.cache.remote_fetch import Fetch
from kvserve.cache.remote_tier import RemoteStats
from kvserve.core import TokenSequence, Unshared
from kvserve.engine.disk_goals import Goal
from kvserve.engine.snapshot import StateSnapshot

STALLED_SECONDS = 5.0
"""A disk that gives nothing for so long, and twice what its largest file should take, is not waited for."""


def patience_for(num_bytes: float, bytes_per_second: float) -> float:
    """How long to wait for a disk of this speed that has a file of this size to read."""
    return STALLED_SECONDS + 2 * num_bytes / bytes_per_second


@dataclass(frozen=True, slots=True)
class DiskReport:
    """The disk tier's own figures, how many rows have ended that could be written, and what came back: rows that began
    with it, tokens, and how often reading would have been slower than computing."""

    stats: DiskStats
    num_turns: int
    num_restores: int
    num_restored_tokens: int
    num_declined: int
    remote: RemoteStats | None = None


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """What an admitted row will start from, kept from eviction; `load`, at most `room_bytes`, is what the disk gives,
    and `base` the state that was read last, on which the next one builds. `fetch` is what the shared cache gives, and
    `num_shared_tokens` what has come of it, `unshared` why no more has."""

    tokens: TokenSequence
    lease: Lease
    is_settled: bool = False
    partition: str = ""
    owner: str = ""
    goal: Goal | None = None
    load: Load | None = None
    fetch: Fetch | None = None
    num_shared_tokens: int = 0
    unshared: Unshared | None = None
    base: StateSnapshot | None = None
    num_taken: int = 0
    num_matched_tokens: int = 0
    num_restored_tokens: int = 0
    last_news_at: float = field(default_factory=time.monotonic)
    room_bytes: float = math.inf
    patience_seconds: float = field(default_factory=lambda: STALLED_SECONDS)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has come for too long."""
        return time.monotonic() - self.last_news_at > self.patience_seconds
