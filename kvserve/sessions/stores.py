"""All that is kept of one model's conversations: its stores within one number of bytes, and on disk what is to outlive
the process. What the stores hold is theirs; this file knows how much each may hold and what is done to all of them.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvserve.sessions.archive import Archive, ArchiveTotals, Upkeep
from kvserve.sessions.healing import HealingStore
from kvserve.sessions.hot_prefixes import HotPrefixes
from kvserve.sessions.journal import UNWRITTEN, JournalSwitch, Rows
from kvserve.sessions.lineage import SessionIndex
from kvserve.sessions.telemetry_values import TelemetryValues
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
"""How the bytes of one setting are shared out. The last three are not for these stores but for what is remembered of
messages, of the places that templates gave them, and of the tokens of earlier prompts."""

LINEAGE_BYTES_PER_MESSAGE = 512
"""A message's digest in a branch and the way from it to the branch, as Python holds them."""

ROOM_SHARE = 0.9
"""What is left of each store where the disk's copy became too large."""

FLUSH_SECONDS = 2.0
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bytes for everything together, in RAM and again on disk; how long a session may be idle where nothing outlives
    the process (0 = always); how long what is written down is kept after its last use."""

    max_bytes: int = 512 << 20
    idle_seconds: float = 1_800.0
    keep_seconds: float = 86_400.0

    @property
    def memo_bytes(self) -> int:
        """What may be remembered of earlier prompts' tokens."""
        return int(self.max_bytes * MEMO_SHARE)

    @property
    def familiar_bytes(self) -> int:
        """What may be remembered of messages that were sent before."""
        return int(self.max_bytes * FAMILIAR_SHARE)

    @property
    def placed_bytes(self) -> int:
        """What may be remembered of conversations as a template's dialects placed them."""
        return int(self.max_bytes * PLACED_SHARE)


class Stores:
    """The stores of one model. With an archive they begin with what it holds, and what changes is told to it."""

    def __init__(
        self,
        limits: StoreLimits,
        archive: Archive | None = None,
        clock: Callable[[], float] = time.time,
        *,
        awaits_archive: bool = False,
    ) -> None:
        """`clock`: seconds since the epoch. `awaits_archive`: one will be there later (`attach`), for what is
        remembered before too."""
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
        """Let what changes be written there from now on, and all that is remembered already. Where it holds something
        that takes the place of what was remembered meanwhile: nodes have numbers, two sets of them cannot be joined.
        Returns whether that was so; nothing is done where there is an archive, or all is over."""
        with self._attaching:
            if self._is_closed or self._archive is not None:
                archive.close(CLOSE_SECONDS)
                return False
            has_taken = self._begin_with(archive)
            if not has_taken:
                self.put_all()
        return has_taken

    def _begin_with(self, archive: Archive) -> bool:
        """Begin with what an archive holds, if there is anything in it. Whether there was."""
        self._archive, self._outlives, found = archive, True, archive.take_rows()
        if found:
            self._journal = JournalSwitch(archive)  # who still holds the stores of before tells nobody
            try:
                self._make()
                self._load(found)
            except (ValueError, LookupError, TypeError, RecursionError) as error:  # whole rows, of a faulty program
                self._make()
                archive.reject(f"what it holds does not fit together: {error!r}")
        self._journal.to = archive
        archive.start(Upkeep(self.put_all, self.expire, self.make_room))
        self.expire()
        return bool(found)

    def detach(self) -> None:
        """Nothing is written any more, and what was remembered is forgotten in RAM: it is not this model's. What is in
        the archive stays there."""
        with self._attaching:
            archive, self._archive, self._outlives = self._archive, None, False
            self._journal.to, self._journal = UNWRITTEN, JournalSwitch()
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

    def _load(self, rows: Rows) -> None:
        self.turns.load(rows)
        self.healing.load(rows)
        self.index.load(rows)
        self.hot_prefixes.load(rows)
        self.telemetry.load(rows)

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def until(self, ttl_seconds: float | None) -> float | None:
        """Until when what a request leaves is written down: as long as KV on disk, to which it leads. None: not at all,
        as the request wants it (`ttl_seconds` 0; any other time is for RAM) or as there will be no archive."""
        if not self._outlives or ttl_seconds == 0:
            return None
        return self.now() + self._limits.keep_seconds

    def archive_totals(self) -> ArchiveTotals:
        """What is on disk."""
        return ArchiveTotals(False, 0, 0, 0) if self._archive is None else self._archive.totals()

    def clear(self) -> None:
        """Forget everything, on disk too: there it is gone when this returns, unless the disk hangs."""
        self.healing.clear()
        self.turns.clear()
        self.index.clear()
        self.hot_prefixes.clear()
        self.telemetry.clear()
        self.flush()

    def flush(self) -> bool:
        """Wait until all of this is on disk; False where it could not be in time."""
        return self._archive is None or self._archive.flush(FLUSH_SECONDS)

    def erase(self) -> bool:
        """The same, and nothing that was dropped is in a file any more."""
        return self._archive is None or self._archive.erase(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what is left. What is remembered later is not kept."""
        with self._attaching:
            self._is_closed = True
        if self._archive is not None:
            self._archive.close(CLOSE_SECONDS)

    # --- what the archive asks, on its thread -------------------------------------------------------------------------

    def put_all(self) -> None:
        """Tell the archive everything that is to last."""
        self.turns.put_all()
        self.healing.put_all()
        self.index.put_all()
        self.hot_prefixes.put_all()
        self.telemetry.put_all()

    def expire(self) -> None:
        """Forget what was not used for so long that its rows may go."""
        now = self.now()
        self.turns.expire(now)
        self.healing.expire(now)
        self.index.expire(now)
        self.hot_prefixes.expire(now)
        self.telemetry.expire(now)

    def make_room(self) -> None:
        """Forget the least recently used tenth: its rows are larger than what they are in RAM."""
        self.turns.shrink(ROOM_SHARE)
        self.healing.shrink(ROOM_SHARE)
