"""How many bytes are between RAM and the disk: blobs that wait to be written, and those that were read and not taken
yet.

Figures and order only. The disk tier's lock guards both; single numbers may be read from any thread.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable

from kvserve.cache.disk_blob import Blob
from kvserve.cache.disk_entries import Entry
from kvserve.cache.disk_records import Load, Write

STUCK_SECONDS = 0.2
"""Whoever waits for the disk takes what was read between two steps; somebody who is away for so long is not waited
for."""


class WriteQueue:
    """Blobs that are to be written, in order. One that was taken out counts until it is done."""

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
        """Whether a payload may be put: one that is larger than the whole queue waits in it alone."""
        return not self._waiting or self.num_bytes + num_bytes <= self._max_bytes

    def put(self, write: Write, *, is_own: bool = False) -> None:
        """`is_own`: RAM has these bytes here only, not in what it keeps."""
        self._waiting.append(write)
        self.num_bytes += write.num_bytes
        if is_own:
            self._hold(write)

    def evicted_from_ram(self, entries: Collection[Entry]) -> None:
        """These have left what RAM keeps: until they are written, their bytes are here only."""
        pending = [*self._waiting, *([self._writing] if self._writing is not None else ())]
        for write in pending:
            if write.entry in entries:
                self._hold(write)

    def take(self) -> Write:
        """The first; call `done` for it."""
        self._writing = self._waiting.popleft()
        return self._writing

    def done(self, write: Write) -> None:
        """It is written, or given up."""
        self._writing = None
        self._forget(write)

    def clear(self) -> None:
        """Nothing that waits is written."""
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
    """Bytes that were read for all who wait, and not taken yet."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._moved_at = 0.0
        self.num_bytes = 0

    def next_of(self, loads: Iterable[Load]) -> Load | None:
        """The first load that may go on: its next blob fits beside all that is there, or nothing is. Where nobody has
        taken anything for a while, those of whom nothing is there have a blob each: whoever takes waits for nobody who
        does not."""
        is_stuck = time.monotonic() - self._moved_at >= STUCK_SECONDS
        for load in loads:
            num_next_bytes = load.entries[load.num_read].num_bytes
            fits = not self.num_bytes or self.num_bytes + num_next_bytes <= self._max_bytes
            if fits or (is_stuck and not load.ready):
                return load
        return None

    def arrived(self, load: Load, blob: Blob | None, num_bytes: int) -> None:
        """A blob was read; nobody wants that of a load that was given up meanwhile."""
        if load.is_cancelled:
            return
        self._moved_at = time.monotonic()
        load.ready.append((blob, num_bytes))
        load.ready_bytes += num_bytes
        self.num_bytes += num_bytes

    def taken(self, load: Load) -> list[Blob | None]:
        """The first that is there; nothing where none is."""
        if not load.ready:
            return []
        blob, num_bytes = load.ready.popleft()
        load.ready_bytes -= num_bytes
        self.num_bytes -= num_bytes
        self._moved_at = time.monotonic()
        return [blob]

    def cancelled(self, load: Load) -> None:
        """Nobody wants the rest."""
        load.is_cancelled = True
        load.ready.clear()
        self.num_bytes -= load.ready_bytes
        load.ready_bytes = 0
