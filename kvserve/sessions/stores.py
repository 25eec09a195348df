"""The stores of one model's conversations: how many bytes each may hold, and what is done to all of them. What a store
holds is its own.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvserve.sessions.archive import Archive, ArchiveTotals, Upkeep
from kvserve.sessions.first_values import TelemetryValues
from kvserve.sessions.healing import HealingStore
from kvserve.sessions.hot_prefixes import HotPrefixes
from kvserve.sessions.journal import JournalSwitch
from kvserve.sessions.lineage import SessionIndex
from kvserve.sessions.seen import Conflicts
from kvserve.sessions.turns import TurnStore

PATHS_SHARE = 10 / 32
RECORDS_SHARE = 7 / 32
HEALING_SHARE = 4 / 32
LINEAGE_SHARE = 2 / 32
TOOLS_SHARE = 1 / 32
HOT_PREFIXES_SHARE = 1 / 64
FAMILIAR_SHARE = 2 / 32
PLACED_SHARE = 1 / 32
MEMO_SHARE = 9 / 64
"""The shares of the bytes of one setting. The last three are not for these stores but for memos of messages, of where
templates placed them, and of the tokens of earlier prompts."""

LINEAGE_BYTES_PER_MESSAGE = 512
"""A message's digest in a branch and the entry that leads from it to the branch, as Python holds them."""

ROOM_SHARE = 0.9
"""What is left of each store where its rows on disk became too large."""

FLUSH_SECONDS = 20.0
"""Who has something deleted hears that it is gone, on a disk that takes seconds for it too."""

CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bytes for everything together, in RAM and again on disk; how long a session may be idle where nothing outlives
    the process (0 = always); how long rows are kept after their last use."""

    max_bytes: int = 512 << 20
    idle_seconds: float = 1_800.0
    keep_seconds: float = 86_400.0

    @property
    def memo_bytes(self) -> int:
        """Bytes for the tokens of earlier prompts."""
        return int(self.max_bytes * MEMO_SHARE)

    @property
    def familiar_bytes(self) -> int:
        """Bytes for messages that were sent before."""
        return int(self.max_bytes * FAMILIAR_SHARE)

    @property
    def placed_bytes(self) -> int:
        """Bytes for conversations as a template's dialects placed them."""
        return int(self.max_bytes * PLACED_SHARE)


class Stores:
    """The stores of one model. With an archive they begin with its rows and write their changes to it."""

    def __init__(
        self,
        limits: StoreLimits,
        archive: Archive | None = None,
        clock: Callable[[], float] = time.time,
        *,
        awaits_archive: bool = False,
    ) -> None:
        """`clock`: seconds since the epoch. `awaits_archive`: one follows (`attach`), also for what is remembered
        before."""
        self._limits = limits
        self._archive: Archive | None = None
        self._clock = clock
        self._outlives = awaits_archive or archive is not None
        self._journal = JournalSwitch()
        self._attaching = threading.Lock()
        self._is_closed = False
        self._make()
        if archive is not None:
            self._begin_with(archive)

    @property
    def archive_folder(self) -> Path | None:
        """Where the archive is, if there is one now."""
        archive = self._archive
        return archive.folder if archive is not None else None

    @property
    def awaits_archive(self) -> bool:
        """Whether what is remembered will be written down, and is not yet."""
        return self._outlives and self._archive is None

    def attach(self, archive: Archive) -> bool:
        """Write all that is remembered, and later changes, to this archive. Where it holds rows, these replace what was
        remembered meanwhile, as two sets of numbered nodes cannot be joined; returns whether they did. Closes the
        archive where there is one already or the stores are closed."""
        with self._attaching:
            if self._is_closed or self._archive is not None:
                archive.close(CLOSE_SECONDS)
                return False
            has_taken = self._begin_with(archive)
            if not has_taken:
                self.put_all()
        return has_taken

    def _begin_with(self, archive: Archive) -> bool:
        """Begin with an archive's rows; returns whether it had any."""
        self._archive, self._outlives, found = archive, True, archive.take_rows()
        if found:
            self._journal = JournalSwitch(archive)  # a request that holds the old stores writes nothing
            try:
                self._make()
                for store in self._all:
                    store.load(found)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                self._make()  # intact rows of a faulty program
                archive.reject(f"its rows do not fit together: {error!r}")
        self._journal.to = archive
        archive.start(Upkeep(self.put_all, self.expire, self.make_room))
        self.expire()
        return bool(found)

    def detach(self) -> None:
        """Write no more and clear the stores in RAM: what they hold is not this model's. The archive's file stays."""
        with self._attaching:
            archive, self._archive, self._outlives = self._archive, None, False
            self._journal.to, self._journal = None, JournalSwitch()
            self._make()
        if archive is not None:
            archive.close(CLOSE_SECONDS)

    def _make(self) -> None:
        limits, journal = self._limits, self._journal
        self.healing = HealingStore(max_bytes=int(limits.max_bytes * HEALING_SHARE), journal=journal)
        self.turns = TurnStore(
            max_bytes=int(limits.max_bytes * PATHS_SHARE),
            max_record_bytes=int(limits.max_bytes * RECORDS_SHARE),
            max_tool_bytes=int(limits.max_bytes * TOOLS_SHARE),
            journal=journal,
        )
        self.telemetry = TelemetryValues(journal=journal)
        self.hot_prefixes = HotPrefixes(max_bytes=int(limits.max_bytes * HOT_PREFIXES_SHARE), journal=journal)
        self.index = SessionIndex(
            max_messages=int(limits.max_bytes * LINEAGE_SHARE / LINEAGE_BYTES_PER_MESSAGE),
            idle_seconds=limits.keep_seconds if self._outlives else limits.idle_seconds,
            journal=journal,
        )

    @property
    def _all(self) -> tuple[TurnStore | HealingStore | SessionIndex | HotPrefixes | TelemetryValues, ...]:
        return self.turns, self.healing, self.index, self.hot_prefixes, self.telemetry

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def until(self, ttl_seconds: float | None) -> float | None:
        """Until when a request's rows are kept: as long as the KV on disk that they lead to. None: nothing is written,
        as the request asks (`ttl_seconds` 0; another time is for RAM) or as there will be no archive."""
        if not self._outlives or ttl_seconds == 0:
            return None
        return self.now() + self._limits.keep_seconds

    def conflicts(self, chains: Sequence[bytes]) -> list[Conflicts]:
        """What is unknown of each of these places, also where it is known of a path that was evicted since."""
        ambiguous, known = self.healing.ambiguous(chains), self.turns.conflicts(chains)
        pairs = zip(chains, known, strict=True)
        return [replace(each, is_doubtful=each.is_doubtful or chain in ambiguous) for chain, each in pairs]

    def archive_totals(self) -> ArchiveTotals:
        """What is on disk."""
        return ArchiveTotals(False, 0, 0, 0) if self._archive is None else self._archive.totals()

    def clear(self) -> None:
        """Delete everything. It is gone from the disk too when this returns, unless the disk hangs."""
        for store in self._all:
            store.clear()
        self.flush()

    def flush(self) -> bool:
        """Wait until all changes are on disk; False where that took too long."""
        return self._archive is None or self._archive.flush(FLUSH_SECONDS)

    def erase(self) -> bool:
        """`flush`, after which no file holds anything that was dropped."""
        return self._archive is None or self._archive.erase(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what is left. What is remembered later is not kept."""
        with self._attaching:
            self._is_closed = True
        if self._archive is not None:
            self._archive.close(CLOSE_SECONDS)

    # --- what the archive asks, on its thread -------------------------------------------------------------------------

    def put_all(self) -> None:
        """Tell the archive everything that has a row."""
        for store in self._all:
            store.put_all()

    def expire(self) -> None:
        """Drop everything whose rows have expired."""
        now = self.now()
        for store in self._all:
            store.expire(now)

    def make_room(self) -> None:
        """Evict the least recently used tenth: rows are larger than what they are in RAM."""
        self.turns.shrink(ROOM_SHARE)
        self.healing.shrink(ROOM_SHARE)
