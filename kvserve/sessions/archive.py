"""Writes rows to disk behind the requests, on a thread of its own.

    put, drop -> what changed since the last write, by row -> one transaction, a tenth of a second later

This file knows rows by kind and key, not what is in them. A failure is reported once, counted, and stops no request: a
damaged file is begun anew, a failed write is repeated, and without a file everything stays in RAM.
"""

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvserve.sessions.archive_file import (
    FILE_NAME,
    ArchiveFile,
    Changes,
    Damaged,
    Opened,
    begin_anew,
    is_damage,
    open_file,
    remove_file,
)
from kvserve.sessions.journal import Kind, Rows

GATHER_SECONDS = 0.1
"""The rows of requests that end within this time go into one transaction."""

RETRY_SECONDS = 5.0
SWEEP_SECONDS = 600.0
MAX_PENDING = 200_000
"""With so many rows that could not be written the file, out of date by then, is given up until the next start."""

MAX_RENEWALS = 3
"""After so many damaged files no other is begun."""


type Pending = dict[tuple[Kind, bytes], Callable[[], bytes] | None]
"""What is to be written: how each row's body is made; None: the row is deleted."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What the archive asks of the owner of the rows, on its thread: to put all of them into a new file, to drop what
    has expired, and to drop the least recently used where the file is too large."""

    put_all: Callable[[], None]
    expire: Callable[[], None]
    make_room: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ArchiveTotals:
    """`is_on`: rows are written. `num_faults` counts all failures since the start."""

    is_on: bool
    num_rows: int
    num_bytes: int
    num_faults: int


class Archive:
    """The rows of one model in `folder`. Implements `Journal`. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        report: Callable[[str], None],
        min_free_bytes: int = 0,
        subject: str = "Records of conversations",
    ) -> None:
        """Opens or creates the file. `max_bytes` bounds its rows, `min_free_bytes` stay free on its volume, `report`
        takes lines for the operator, which call the rows by `subject`."""
        self._path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._report = report
        self._subject = subject
        self._changed = threading.Condition()
        self._pending: Pending = {}
        self._num_changes = 0
        self._num_written = 0
        self._is_closing = False
        self._is_failing = False
        self._num_faults = 0
        self._num_renewals = 0
        self._erased_until = 0
        self._upkeep: Upkeep | None = None
        self._thread: threading.Thread | None = None
        self._file: ArchiveFile | None = None
        self._found: Rows = {}
        opened = self._open()
        if opened is not None:
            self._file, self._found = opened.file, opened.rows

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._path.parent

    def take_rows(self) -> Rows:
        """The rows that the file held when it was opened; the second call returns none."""
        found, self._found = self._found, {}
        return found

    def reject(self, reason: str) -> None:
        """Begin the file anew, as its rows do not fit together. Only before `start`."""
        self._renew(reason)

    def start(self, upkeep: Upkeep) -> None:
        """Start to write."""
        self._upkeep = upkeep
        if self._file is not None:
            self._thread = threading.Thread(target=self._run, name="kvserve-records", daemon=True)
            self._thread.start()

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Set a row; it is written within a moment."""
        self._note(kind, key, body)

    def drop(self, kind: Kind, key: bytes) -> None:
        """Delete a row."""
        self._note(kind, key, None)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until every earlier change is written; False where that took too long."""
        with self._changed:
            wanted = self._num_changes
            return self._changed.wait_for(lambda: self._num_written >= wanted or self._file is None, timeout_seconds)

    def erase(self, timeout_seconds: float) -> bool:
        """Wait until the file holds nothing that was dropped before; False where that took too long or it cannot be
        opened."""
        self.drop("counter", b"")  # no such row exists: a change that makes the thread look at the file
        with self._changed:
            self._erased_until = self._num_changes
        return self.flush(timeout_seconds) and (self._file is not None or not self._path.exists())

    def close(self, timeout_seconds: float) -> None:
        """Write what is left and end the thread. Later changes are not kept."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return  # the disk hangs; the thread ends with the process
        if self._file is not None:
            self._file.close()
            self._file = None

    def totals(self) -> ArchiveTotals:
        """What the file holds now."""
        file = self._file
        if file is None:
            return ArchiveTotals(False, 0, 0, self._num_faults)
        return ArchiveTotals(True, file.num_rows, file.num_bytes, self._num_faults)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _note(self, kind: Kind, key: bytes, body: Callable[[], bytes] | None) -> None:
        with self._changed:
            if self._file is None or self._is_closing:
                return
            self._pending[kind, key] = body
            self._num_changes += 1
            if len(self._pending) == 1:
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._write_behind()
        finally:
            if self._file is not None and not self._is_closing:
                self._give_up("their writer has ended")  # by a defect of ours: gather no more rows

    def _write_behind(self) -> None:
        swept_at = time.monotonic()
        while self._file is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing, SWEEP_SECONDS)
                self._changed.wait_for(lambda: self._is_closing, RETRY_SECONDS if self._is_failing else GATHER_SECONDS)
                is_closing = self._is_closing
            self._write_pending()
            if is_closing:
                return
            if time.monotonic() - swept_at >= SWEEP_SECONDS:
                swept_at = time.monotonic()
                self._sweep()

    def _write_pending(self) -> None:
        with self._changed:
            pending, self._pending = self._pending, {}
            num_changes = self._num_changes
        file = self._file
        if file is None:
            return
        try:
            if pending and not file.is_in_place:
                raise Damaged("the file is gone")
            if any(pending.values()) and shutil.disk_usage(self._path.parent).free < self._min_free_bytes:
                self._put_back(pending, "the volume has no bytes left but those that stay free")
                return
            if pending:
                num_bytes_before = file.num_bytes
                file.write(self._encoded(pending))
                self._after_write(file, num_bytes_before, num_changes)
        except (Damaged, UnicodeError) as error:
            self._renew(str(error))
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                self._renew(str(error))
            else:
                self._put_back(pending, str(error))
        else:
            with self._changed:
                self._is_failing = False
                self._num_written = num_changes
                self._changed.notify_all()

    def _sweep(self) -> None:
        if self._upkeep is not None:
            self._upkeep.expire()
            self._write_pending()
        if self._file is not None and not self._is_failing:
            try:
                self._file.compact()
            except sqlite3.Error as error:
                self._count_fault(f"The records file could not be compacted: {self._path}: {error}")

    def _after_write(self, file: ArchiveFile, num_bytes_before: int, num_changes: int) -> None:
        if self._is_failing:
            self._report(f"{self._subject} are written again.")
        if num_changes >= self._erased_until > self._num_written or file.num_bytes < num_bytes_before / 2:
            file.compact()  # what was cleared leaves the disk at once
        if file.num_bytes > self._max_bytes and self._upkeep is not None:
            self._upkeep.make_room()

    def _encoded(self, pending: Pending) -> Changes:
        """Encode row after row while they are written: together they may be as large as everything in RAM."""
        for place, body in pending.items():
            try:
                row = body() if body is not None else None
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                # A client's template arguments or tools are nested deeper than JSON allows: the row is not kept.
                row = None
                self._count_fault(f"A row of kind {place[0]} could not be written: {error}")
            yield place, row

    # --- when something is wrong --------------------------------------------------------------------------------------

    def _open(self, opener: Callable[[Path], Opened] = open_file) -> Opened | None:
        try:
            opened = opener(self._path)
        except (OSError, sqlite3.Error) as error:
            self._give_up(str(error))
            return None
        if opened.fault is not None:
            self._count_fault(f"{self._subject} begin anew: {self._path}: {opened.fault}")
        return opened

    def _put_back(self, pending: Pending, reason: str) -> None:
        """Keep the changes for the next attempt, under those that came meanwhile."""
        with self._changed:
            self._pending = {**pending, **self._pending}
            was_failing, self._is_failing = self._is_failing, True
            is_too_much = len(self._pending) > MAX_PENDING
        if is_too_much:
            self._give_up(f"nothing could be written for too long: {reason}")
        elif not was_failing:
            self._count_fault(f"{self._subject} cannot be written now: {self._path}: {reason}")

    def _renew(self, reason: str) -> None:
        """Replace a damaged file by a new one with everything that is in RAM."""
        self._count_fault(f"{self._subject} begin anew: {self._path}: {reason}")
        self._num_renewals += 1
        file, opened = self._file, None
        if file is not None:
            file.close()
        if self._num_renewals <= MAX_RENEWALS:
            opened = self._open(begin_anew)
        else:
            self._give_up("file after file was damaged")
        with self._changed:
            self._pending.clear()
            self._file = opened.file if opened is not None else None
            self._changed.notify_all()
        if self._file is not None and self._upkeep is not None:
            self._upkeep.put_all()

    def _give_up(self, reason: str) -> None:
        """Write and gather nothing from now on."""
        self._count_fault(f"{self._subject} are kept in RAM only: {self._path}: {reason}")
        with self._changed:
            file, self._file = self._file, None
            self._pending.clear()
            self._changed.notify_all()
        if file is not None:
            file.close()

    def _count_fault(self, line: str) -> None:
        self._num_faults += 1
        self._report(line)


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[None]:
    """Leave the archive's time of use, which `sweep_stale` goes by, as it was before the block. Raises OSError where
    the file cannot be read, FileNotFoundError where there is none."""
    file = folder / FILE_NAME
    before = file.stat()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def sweep_stale(cache_dir: Path, *, keep: Path, older_than: float, report: Callable[[str], None]) -> int:
    """Remove the archives of models that were not served since `older_than` (seconds since the epoch); returns how
    many.

    Only files of this name in folders directly below `cache_dir` are looked at; `keep` is left alone.
    """
    num_removed = 0
    for path in cache_dir.glob(f"*/{FILE_NAME}"):
        if path.parent == keep:
            continue
        try:
            used = max(file.stat().st_mtime for file in path.parent.glob(f"{FILE_NAME}*"))
            if used < older_than and path.parent.stat().st_uid == os.getuid():
                remove_file(path)
                num_removed += 1
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
        except (OSError, ValueError) as error:  # gone meanwhile, or not ours to remove
            report(f"An old records file could not be removed: {path}: {error}")
    return num_removed
