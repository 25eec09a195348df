"""One SQLite file of rows, read whole or begun anew, written in transactions. This file knows no row's meaning.

    rows      kind, key, digest, body          digest: of kind, key and body
    contents  format, num_rows, digest         digest: the sum of all rows' digests, so a row that is lost is seen too

A file that does not add up is not used: a history with a hole in it could be taken for another one.
"""

import contextlib
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvserve.core.file_lock import wait_for_lock
from kvserve.sessions.journal import Kind, Rows

FORMAT = 2
"""Raised with every change of a row's form; a file of another format is begun anew."""

FILE_NAME = "records.sqlite"
LOCK_WAIT_SECONDS = 3.0
"""How long a server that is just ending may hold the file, and one that is just starting the folder."""

ROW_BYTES = 64
"""What a row takes beside its key and body, roughly."""

_DIGEST_BYTES = 16
_DIGESTS = 1 << (8 * _DIGEST_BYTES)

_ELSEWHERE = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_AUTH,
    }
)
"""Errors that do not mean that the file is damaged."""

_ELSEWHERE_LATER = _ELSEWHERE | {sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR}
"""Nor do these once the file was opened whole; before that, a damaged header may cause them. A used-up quota is an
input or output error."""

_PRAGMAS = (
    "locking_mode = EXCLUSIVE",  # one server per file, for as long as it lives; the lock ends with the process
    "auto_vacuum = INCREMENTAL",
    "journal_mode = WAL",
    "synchronous = NORMAL",  # a commit outlives the process; one that is lost with the power leaves the one before
    "secure_delete = FAST",  # what is dropped is overwritten where its page is written anyway; `compact` does the rest
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "journal_size_limit = 16777216",
)

_SCHEMA = """
CREATE TABLE rows (kind TEXT NOT NULL, key BLOB NOT NULL, digest BLOB NOT NULL, body BLOB NOT NULL,
                   PRIMARY KEY (kind, key));
CREATE TABLE contents (format INTEGER NOT NULL, num_rows INTEGER NOT NULL, digest BLOB NOT NULL);
"""

type Changes = Iterable[tuple[tuple[Kind, bytes], bytes | None]]
"""New bodies with their (kind, key); None: the row is deleted."""


class FileHeld(OSError):
    """Another server has the file open."""


class Damaged(Exception):
    """The file's content is not what was written."""


@dataclass(frozen=True, slots=True)
class _Totals:
    num_rows: int = 0
    num_bytes: int = 0
    digest: int = 0

    def plus(self, digest: bytes, num_bytes: int) -> "_Totals":
        total = (self.digest + int.from_bytes(digest)) % _DIGESTS
        return _Totals(self.num_rows + 1, self.num_bytes + num_bytes, total)

    def minus(self, digest: bytes, num_bytes: int) -> "_Totals":
        total = (self.digest - int.from_bytes(digest)) % _DIGESTS
        return _Totals(self.num_rows - 1, self.num_bytes - num_bytes, total)


class ArchiveFile:
    """An open file, locked against other processes. For one thread at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection, totals: _Totals) -> None:
        self._path = path
        self._connection = connection
        self._totals = totals
        self._inode = os.stat(path).st_ino

    @property
    def num_rows(self) -> int:
        return self._totals.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, about what the file takes."""
        return self._totals.num_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to this file; a user may have cleared the folder."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def write(self, changes: Changes) -> None:
        """Make all of the changes, or none. Raises sqlite3.Error, Damaged."""
        execute, totals = self._connection.execute, self._totals
        execute("BEGIN IMMEDIATE")
        try:
            for (kind, key), body in changes:
                old = execute(
                    "SELECT rowid, digest, length(body) FROM rows WHERE kind = ? AND key = ?", (kind, key)
                ).fetchone()
                if old is not None:
                    if not isinstance(old[1], bytes):
                        raise Damaged("a row is not what was written")
                    totals = totals.minus(old[1], _row_bytes(key, old[2]))
                if body is None and old is not None:
                    execute("DELETE FROM rows WHERE rowid = ?", old[:1])
                if body is None:
                    continue
                digest = _digest(kind, key, body)
                totals = totals.plus(digest, _row_bytes(key, len(body)))
                if old is not None:
                    execute("UPDATE rows SET digest = ?, body = ? WHERE rowid = ?", (digest, body, old[0]))
                else:
                    execute("INSERT INTO rows VALUES (?, ?, ?, ?)", (kind, key, digest, body))
            execute("UPDATE contents SET num_rows = ?, digest = ?", (totals.num_rows, _as_bytes(totals.digest)))
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                execute("ROLLBACK")
            raise
        self._totals = totals

    def compact(self) -> None:
        """Give free pages back to the volume. Raises sqlite3.Error."""
        self._connection.execute("PRAGMA incremental_vacuum").fetchall()
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close it; what is written stays."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


@dataclass(frozen=True, slots=True)
class Opened:
    """A file, the rows that it held, and what was wrong with the one before it (None: nothing)."""

    file: ArchiveFile
    rows: Rows
    fault: str | None = None


def open_file(path: Path) -> Opened:
    """The file with its rows, or a new one where there is none or a damaged one.

    Its folder is made for this user alone. Raises FileHeld where another server has the file, OSError or sqlite3.Error
    where it cannot be opened or created: another user's folder, a volume that is full or read-only.
    """
    _own_folder(path.parent)
    with _alone(path.parent):
        if not path.exists() or not path.stat().st_size:
            return Opened(_create(path), {})
        try:
            return _read(path)
        except sqlite3.Error as error:
            if _code(error) in _ELSEWHERE:
                raise
            fault = str(error)
        except (Damaged, UnicodeError, MemoryError) as error:  # a broken name or length
            fault = str(error)
        return Opened(_create(path), {}, fault)


def begin_anew(path: Path) -> Opened:
    """A new file in place of this server's own, which is closed. Raises the errors of `open_file`: where that one was
    removed, another server's may stand there."""
    _own_folder(path.parent)
    with _alone(path.parent):
        if path.exists():
            with contextlib.suppress(sqlite3.Error, UnicodeError):  # damaged, or with a broken name
                _connect(path).close()
        return Opened(_create(path), {})


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error of an open file means that its content is damaged, and not its place, lock or room."""
    return _code(error) not in _ELSEWHERE_LATER


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # some are Python's own, about a value


def remove_file(path: Path) -> None:
    """Remove a file and what SQLite keeps beside it. Raises OSError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, if its volume has any, while a file is opened: of two servers that start together neither
    removes what the other one has just begun. Raises FileHeld."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not wait_for_lock(descriptor, fcntl.LOCK_EX, LOCK_WAIT_SECONDS):
            raise FileHeld("another server has it open")
        yield
    finally:
        os.close(descriptor)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN IMMEDIATE")  # takes the lock, which stays
        connection.execute("COMMIT")
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY:
            raise FileHeld("another server has it open") from error
        raise
    return connection


def _create(path: Path) -> ArchiveFile:
    remove_file(path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = _connect(path)
    try:
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        connection.execute("INSERT INTO contents VALUES (?, 0, ?)", (FORMAT, _as_bytes(0)))
        return ArchiveFile(path, connection, _Totals())
    except BaseException:
        connection.close()
        raise


def _read(path: Path) -> Opened:
    connection = _connect(path)
    try:
        totals, rows = _rows(connection)
        return Opened(ArchiveFile(path, connection, totals), rows)
    except BaseException:
        connection.close()
        raise


def _rows(connection: sqlite3.Connection) -> tuple[_Totals, Rows]:
    contents = connection.execute("SELECT format, num_rows, digest FROM contents").fetchall()
    if len(contents) != 1 or contents[0][0] != FORMAT:
        raise Damaged(f"its format is not {FORMAT}")
    rows: dict[Kind, list[tuple[bytes, bytes]]] = {}
    totals = _Totals()
    for kind, key, digest, body in connection.execute("SELECT kind, key, digest, body FROM rows"):
        is_typed = isinstance(kind, str) and all(isinstance(each, bytes) for each in (key, digest, body))
        if not is_typed or digest != _digest(kind, key, body):
            raise Damaged("a row is not what was written")
        totals = totals.plus(digest, _row_bytes(key, len(body)))
        rows.setdefault(kind, []).append((key, body))
    if contents[0][1:] != (totals.num_rows, _as_bytes(totals.digest)):
        raise Damaged("rows are missing")
    return totals, rows


def _digest(kind: str, key: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(f"{FORMAT} {kind} {len(key)} ".encode(), digest_size=_DIGEST_BYTES)
    digest.update(key)
    digest.update(body)
    return digest.digest()


def _as_bytes(digest: int) -> bytes:
    return digest.to_bytes(_DIGEST_BYTES)


def _row_bytes(key: bytes, num_body_bytes: int) -> int:
    return ROW_BYTES + len(key) + num_body_bytes
