"""What must outlive the process, written behind by a thread of its own: nobody waits for the disk.

    put, drop -> what changed since the last write, by row -> one transaction, a tenth of a second later

It knows rows by kind and key, not what is in them. Whatever goes wrong is said once and counted, and the server goes
on: a file that cannot be believed is begun anew, one that cannot be written now is tried again, one that cannot be had
at all leaves everything in RAM.
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
    is_damage,
    open_file,
    remove_file,
)
from kvserve.sessions.journal import Kind, Rows

GATHER_SECONDS = 0.1
"""A request's rows, and those of its neighbours, go into one transaction."""

RETRY_SECONDS = 5.0
SWEEP_SECONDS = 600.0
MAX_PENDING = 200_000
"""A disk that takes nothing for so many rows is given up until the next start; what it holds is of a past moment."""

MAX_RENEWALS = 3
"""A disk that damages file after file is left alone."""


type Pending = dict[tuple[Kind, bytes], Callable[[], bytes] | None]
"""What is to be written: how each row's body is made, None where the row goes."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What the archive asks of those who own the rows, on its thread: to put all of them again into a new file, to drop
    what is out of date, and to drop the least recently used where the file is too large."""

    put_all: Callable[[], None]
    expire: Callable[[], None]
    make_room: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ArchiveTotals:
    """`is_on`: rows are kept at all. `num_faults` counts everything that went wrong since the start."""

    is_on: bool
    num_rows: int
    num_bytes: int
    num_faults: int


class Archive:
    """The rows of one model in `folder`. Implements `Journal`; every method may be called from any thread."""

    def __init__(self, folder: Path, *, max_bytes: int, report: Callable[[str], None], min_free_bytes: int = 0) -> None:
        """Opens the file, or begins it. `max_bytes` bounds its rows, `min_free_bytes` stay free on its volume, `report`
        takes lines for a person."""
        self._path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._report = report
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
        """Where its file is."""
        return self._path.parent

    def take_rows(self) -> Rows:
        """What was found in the file, once."""
        found, self._found = self._found, {}
        return found

    def reject(self, reason: str) -> None:
        """What was found does not fit together: the file is begun anew. Only before `start`."""
        self._renew(reason)

    def start(self, upkeep: Upkeep) -> None:
        """Write from now on."""
        self._upkeep = upkeep
        if self._file is not None:
            self._thread = threading.Thread(target=self._run, name="kvserve-records", daemon=True)
            self._thread.start()

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """This row is now so; written within a moment."""
        self._note(kind, key, body)

    def drop(self, kind: Kind, key: bytes) -> None:
        """This row is gone."""
        self._note(kind, key, None)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything that was told before is written; False where it could not be in time."""
        with self._changed:
            wanted = self._num_changes
            return self._changed.wait_for(lambda: self._num_written >= wanted or self._file is None, timeout_seconds)

    def erase(self, timeout_seconds: float) -> bool:
        """Wait until nothing that was dropped before is in the file any more; False where it could not be in time, or
        where there is a file that cannot be had."""
        self.drop("counter", b"")  # there is none: something to write, so that the file is looked at
        with self._changed:
            self._erased_until = self._num_changes
        return self.flush(timeout_seconds) and (self._file is not None or not self._path.exists())

    def close(self, timeout_seconds: float) -> None:
        """Write what is left and end the thread. What is told later is not kept."""
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
        """What is kept now."""
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
                self._give_up("their writer has ended")  # by a defect of ours; nothing is gathered that nobody writes

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
                raise Damaged("it is gone")
            if any(pending.values()) and shutil.disk_usage(self._path.parent).free < self._min_free_bytes:
                self._put_back(pending, "what is to stay free on the volume is all that is left")
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
                self._count_fault(f"Records of conversations keep their room: {self._path}: {error}")

    def _after_write(self, file: ArchiveFile, num_bytes_before: int, num_changes: int) -> None:
        if self._is_failing:
            self._report("Records of conversations are written again.")
        if num_changes >= self._erased_until > self._num_written or file.num_bytes < num_bytes_before / 2:
            file.compact()  # what was cleared leaves the disk at once
        if file.num_bytes > self._max_bytes and self._upkeep is not None:
            self._upkeep.make_room()

    def _encoded(self, pending: Pending) -> Changes:
        """One after the other, as they are written: together they may be as large as all that is held."""
        for place, body in pending.items():
            try:
                row = body() if body is not None else None
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                # A client's own template arguments or tools, nested beyond what JSON takes: that row is not kept.
                row = None
                self._count_fault(f"A {place[0]} row cannot be written: {error}")
            yield place, row

    # --- when something is wrong --------------------------------------------------------------------------------------

    def _open(self) -> Opened | None:
        try:
            opened = open_file(self._path)
        except (OSError, sqlite3.Error) as error:
            is_taken = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            self._give_up("another server has it open" if is_taken else str(error))
            return None
        if opened.fault is not None:
            self._count_fault(f"Records of conversations begin anew: {self._path}: {opened.fault}")
        return opened

    def _put_back(self, pending: Pending, reason: str) -> None:
        """It may be written later; what was told meanwhile is newer."""
        with self._changed:
            self._pending = {**pending, **self._pending}
            was_failing, self._is_failing = self._is_failing, True
            is_too_much = len(self._pending) > MAX_PENDING
        if is_too_much:
            self._give_up(f"nothing could be written for too long: {reason}")
        elif not was_failing:
            self._count_fault(f"Records of conversations cannot be written now: {self._path}: {reason}")

    def _renew(self, reason: str) -> None:
        """A new file with everything that is held now in the place of one that cannot be believed."""
        self._count_fault(f"Records of conversations begin anew: {self._path}: {reason}")
        self._num_renewals += 1
        file, opened = self._file, None
        if file is not None:
            file.close()
        if self._num_renewals <= MAX_RENEWALS:
            try:
                remove_file(self._path)
                opened = self._open()
            except OSError as error:
                self._give_up(str(error))
        else:
            self._give_up("file after file was damaged")
        with self._changed:
            self._pending.clear()
            self._file = opened.file if opened is not None else None
            self._changed.notify_all()
        if self._file is not None and self._upkeep is not None:
            self._upkeep.put_all()

    def _give_up(self, reason: str) -> None:
        """From now on nothing is written; nobody waits for it, and nothing is gathered for it."""
        self._count_fault(f"Records of conversations are kept in RAM only: {self._path}: {reason}")
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
    """What is done to an archive within the block is no use of it: `sweep_stale` goes by the time when it was written
    last. Raises OSError where it cannot be had, FileNotFoundError where there is none."""
    file = folder / FILE_NAME
    before = file.stat()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's: its time is now
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def sweep_stale(cache_dir: Path, *, keep: Path, older_than: float, report: Callable[[str], None]) -> int:
    """Remove the archives of models that nobody served since `older_than` (seconds since the epoch); how many went.

    Only files of this name in folders directly below `cache_dir` are looked at, `keep` is left alone.
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
            report(f"An old archive of records stays: {path}: {error}")
    return num_removed
