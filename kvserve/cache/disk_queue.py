"""The blobs between RAM and disk: those that wait to be written, and those that were read and not taken yet.

Order and bytes only. The disk tier's lock guards both; any thread may read single numbers.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable

from kvserve.cache.disk_blob import Blob
from kvserve.cache.disk_records import Entry, Load, Write

STUCK_SECONDS = 0.2
"""A request that waits for the disk takes what was read between two steps; one that takes nothing for so long blocks no
other."""


class WriteQueue:
    """Blobs to write, in order. One that was taken out counts until it is done."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[Write] = deque()
        self._own: dict[Entry, int] = {}
        self._writing: Write | None = None
        self.num_bytes = 0
        self.num_own_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a payload may be put; a payload larger than the whole queue waits in it alone."""
        return not self._waiting or self.num_bytes + num_bytes <= self._max_bytes

    def put(self, write: Write, *, is_own: bool = False) -> None:
        """Add a write. `is_own`: these bytes are not in the RAM tier any more."""
        self._waiting.append(write)
        self.num_bytes += write.num_bytes
        if is_own:
            self._hold(write)

    def evicted_from_ram(self, entries: Collection[Entry]) -> None:
        """These were evicted from RAM: until they are written, only the queue has their bytes."""
        pending = [*self._waiting, *([self._writing] if self._writing is not None else ())]
        for write in pending:
            if write.entry in entries:
                self._hold(write)

    def take(self) -> Write:
        """Take the first write; call `done` for it."""
        self._writing = self._waiting.popleft()
        return self._writing

    def done(self, write: Write) -> None:
        """Drop a write: it is written, or failed."""
        self._writing = None
        self._forget(write)

    def clear(self) -> None:
        """Drop all that waits."""
        for write in self._waiting:
            self._forget(write)
        self._waiting.clear()

    def _hold(self, write: Write) -> None:
        if write.entry not in self._own:
            self._own[write.entry] = write.num_bytes
            self.num_own_bytes += write.num_bytes

    def _forget(self, write: Write) -> None:
        self.num_bytes -= write.num_bytes
        self.num_own_bytes -= self._own.pop(write.entry, 0)


class ReadAhead:
    """Blobs that were read for waiting requests and not taken yet."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._moved_at = 0.0
        self.num_bytes = 0

    def next_of(self, loads: Iterable[Load]) -> Load | None:
        """The first load that may continue: its next blob fits beside all that is there, or nothing is there. If none
        was taken for a while, each load without a blob gets one: a request that takes waits for none that does not."""
        is_stuck = time.monotonic() - self._moved_at >= STUCK_SECONDS
        for load in loads:
            num_next_bytes = load.entries[load.num_read].num_bytes
            fits = not self.num_bytes or self.num_bytes + num_next_bytes <= self._max_bytes
            if fits or (is_stuck and not load.ready):
                return load
        return None

    def arrived(self, load: Load, blob: Blob | None, num_bytes: int) -> None:
        """Add a blob that was read, unless its load was cancelled meanwhile."""
        if load.is_cancelled:
            return
        self._moved_at = time.monotonic()
        load.ready.append((blob, num_bytes))
        load.ready_bytes += num_bytes
        self.num_bytes += num_bytes

    def taken(self, load: Load) -> list[Blob | None]:
        """Take the first blob that is there, if any."""
        if not load.ready:
            return []
        blob, num_bytes = load.ready.popleft()
        load.ready_bytes -= num_bytes
        self.num_bytes -= num_bytes
        self._moved_at = time.monotonic()
        return [blob]

    def cancelled(self, load: Load) -> None:
        """Drop a load and what was read for it."""
        load.is_cancelled = True
        load.ready.clear()
        self.num_bytes -= load.ready_bytes
        load.ready_bytes = 0
