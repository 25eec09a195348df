"""The file of what the dashboard keeps: an archive's rows, which its thread writes behind the requests. It knows no
row's meaning, and joins rooms: records of conversations are written by the same.
"""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvserve.sessions.archive import Archive, Upkeep
from kvserve.sessions.archive_file import FILE_NAME, FileHeld, begin_anew, remove_file
from kvserve.sessions.journal import Rows

type HistoryKind = Literal["ended request", "step", "salt"]
type StoredRows = Rows

MAX_BYTES = 32 * 2**20
ERASE_SECONDS = 10.0
CLOSE_SECONDS = 5.0


class HistoryFile:
    """One server's rows in `folder`: another one that runs cannot have them. `put` and `drop` never wait for the disk;
    `open`, `erase` and `close` do. Safe for several threads.

    On the file's thread the owner of the rows is asked to put all of them into a new file, to drop what is too old, and
    to drop some where the file is too large.
    """

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        *,
        put_all: Callable[[], None],
        expire: Callable[[], None],
        make_room: Callable[[], None],
    ) -> None:
        self._path = folder / FILE_NAME
        self._report = report
        self._upkeep = Upkeep(put_all, expire, make_room)
        self._opening = threading.Lock()
        self._archive: Archive | None = None
        self._is_closed = False

    def open(self, take: Callable[[StoredRows], None]) -> None:
        """Open it where it is not open, and hand over what is there; `take` raises ValueError for rows of another form,
        which are deleted. Where it cannot be opened that is reported once, and nothing is written."""
        with self._opening:
            if self._is_closed or (self._archive is not None and self._archive.totals().is_on):
                return
            if self._archive is not None:
                self._archive.close(CLOSE_SECONDS)  # its thread waits for what never comes
            archive = Archive(
                self._path.parent, max_bytes=MAX_BYTES, report=self._report, subject="The dashboard's requests"
            )
            if not archive.totals().is_on:
                return
            self._archive = archive
            try:
                take(archive.take_rows())
            except ValueError as error:
                archive.reject(str(error))
            archive.start(self._upkeep)

    def put(self, kind: HistoryKind, key: bytes, body: Callable[[], bytes]) -> None:
        """Set a row. `body` is called later, on another thread."""
        if (archive := self._archive) is not None:
            archive.put(kind, key, body)

    def drop(self, kind: HistoryKind, key: bytes) -> None:
        """Delete a row."""
        if (archive := self._archive) is not None:
            archive.drop(kind, key)

    def erase(self) -> bool:
        """Wait until no file holds what was dropped. One that cannot be written is removed: what it holds is worth less
        than that promise. False where another server has it, or nothing helps."""
        with self._opening:
            archive = self._archive
            if archive is not None and archive.erase(ERASE_SECONDS):
                return True
            is_own = archive is not None and archive.totals().is_on
            if archive is not None:
                archive.close(CLOSE_SECONDS)
                self._archive = None
            if not self._path.exists():
                return True
            try:
                begin_anew(self._path).file.close()
            except FileHeld:
                if not is_own:
                    return False
            except (OSError, sqlite3.Error):
                pass  # it is removed then
            else:
                return True
            with suppress(OSError):
                remove_file(self._path)
            return not self._path.exists()

    def close(self) -> None:
        """Write what is left and end the thread; nothing is written from now on."""
        with self._opening:
            self._is_closed = True
            if self._archive is not None:
                self._archive.close(CLOSE_SECONDS)
