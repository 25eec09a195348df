"""The catalog of all blobs of all models in one SQLite file: what is there, when it was used, what is evicted first.

The files say the same of themselves, so it may be thrown away. Times are ages (`disk_age`). Every method of `Catalog`
may raise sqlite3.Error; `OpenCatalog` says what that costs.
"""

import contextlib
import json
import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate

from kvserve.cache.disk_age import Tick
from kvserve.cache.disk_blob import BlobHead, BlobName, make_head
from kvserve.cache.disk_records import Faults, Unused
from kvserve.cache.forget_users import IsForgotten, is_needed, remaining

VERSION = 2
BUSY_SECONDS = 1.0

LOG_PAGES = 128
"""The catalog's log counts in the cap like any file."""

_SCHEMA = """
CREATE TABLE blobs (
    model TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, parent TEXT NOT NULL, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, images TEXT NOT NULL, boundary TEXT NOT NULL, base TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, used_at REAL NOT NULL, PRIMARY KEY (model, name)
);
CREATE INDEX blobs_by_use ON blobs (used_at);
CREATE INDEX blobs_by_parent ON blobs (model, parent);
CREATE INDEX blobs_by_base ON blobs (model, base);
CREATE TABLE rates (name TEXT PRIMARY KEY, per_second REAL NOT NULL);
"""

_USERS = """
CREATE TABLE IF NOT EXISTS users (
    model TEXT NOT NULL, name TEXT NOT NULL, user TEXT NOT NULL, depth INTEGER NOT NULL,
    PRIMARY KEY (model, name, user)
) WITHOUT ROWID
"""
"""Outside of the version: a catalog without this table is valid, and one with it is valid for an older server."""

_CLOCK = """
CREATE TABLE IF NOT EXISTS clock (one INTEGER PRIMARY KEY CHECK (one = 1), age REAL, wall REAL, boot REAL)
"""

_PUT = """
INSERT INTO blobs VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE
SET num_bytes = excluded.num_bytes, used_at = max(used_at, excluded.used_at)
"""

_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    }
)


def is_passing(error: sqlite3.Error) -> bool:
    """Whether the catalog itself is sound: another process holds it, or the disk is full or cannot be written."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in _PASSING


@dataclass(frozen=True, slots=True)
class Listed:
    """A blob as the catalog has it."""

    head: BlobHead
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Victim:
    """A blob that may be evicted: its model and name, its bytes, and when it was used."""

    model: str
    name: BlobName
    num_bytes: int
    used_at: float


class Catalog:
    """An open catalog, for one thread at a time. `fault` says why it was created anew; None where a sound one was
    found."""

    def __init__(self, path: Path | None) -> None:
        """Opens or creates it; a file of another version, or that is no database, is made anew. None: in RAM, gone with
        the process."""
        self._path = path
        is_found = path is not None and path.exists() and path.stat().st_size
        self.fault: str | None = None if is_found else "there is none"
        self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.Error as error:
            if is_passing(error):
                raise
            self.fault = str(error)
            self._remove()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        place = self._path or ":memory:"
        db = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            if self._path is not None:
                self._path.chmod(0o600)
            db.execute("PRAGMA temp_store=MEMORY")  # no file but this one has tokens
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA secure_delete=ON")  # rows have tokens, and what is forgotten must be gone
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            db.execute(f"PRAGMA journal_size_limit={LOG_PAGES * 4096}")
            if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("the index is damaged")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            with _transaction(db):
                if version != VERSION:
                    self.fault = self.fault or f"it is of version {version}, not {VERSION}"
                    for table in ("blobs", "rates", "users", "clock"):
                        db.execute(f"DROP TABLE IF EXISTS {table}")
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version={VERSION}")
                db.execute(_USERS)
                db.execute(_CLOCK)
        except UnicodeDecodeError as error:  # SQLite's message has the broken name of a table in it
            db.close()
            raise sqlite3.DatabaseError("the index is damaged: its tables have no names") from error
        except BaseException:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        if self._path is None:
            return
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()

    def reset(self) -> None:
        """Throw the file away and begin with an empty one."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        self._remove()
        self._db = self._connect()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def listed(self, model: str) -> Iterator[Listed | BlobName]:
        """A model's blobs, parents before children; only the name of a row that contradicts it."""
        columns = "name, kind, parent, start, tokens, images, boundary, base, num_bytes, used_at"
        rows = self._db.execute(f"SELECT {columns} FROM blobs WHERE model = ? ORDER BY start", (model,))
        for name, kind, parent, start, tokens, images, boundary, base, num_bytes, used_at in rows:
            try:
                if not isinstance(tokens, bytes):
                    raise TypeError("tokens are bytes")
                head = make_head(model, kind, parent, start, tokens, images, boundary, base)
                listed = Listed(head, int(num_bytes), float(used_at))
                is_sound = head.name == name
            except (ValueError, TypeError, AttributeError, OverflowError):
                is_sound = False
            yield listed if is_sound else BlobName(str(name))

    def names(self) -> set[tuple[str, BlobName]]:
        """(model, name) of every blob."""
        return {(model, BlobName(name)) for model, name in self._db.execute("SELECT model, name FROM blobs")}

    def unused_since(self, moment: float) -> list[Victim]:
        """Blobs that were not used after a moment."""
        return self._victims("WHERE used_at < ? ORDER BY used_at", (moment,))

    def least_recent(self, limit: int) -> list[Victim]:
        """What is evicted first: the least recently used, of one moment the deepest."""
        return self._victims("ORDER BY used_at, start DESC, kind, name LIMIT ?", (limit,))

    def used_at(self, victim: Victim) -> float | None:
        """When a blob was used; None where it has no row."""
        found = self._victims("WHERE model = ? AND name = ?", (victim.model, victim.name))
        return found[0].used_at if found else None

    def with_descendants(self, victim: Victim) -> list[Victim]:
        """A blob and its descendants, which are of no use without it."""
        found, todo, seen = [victim], [victim], {victim.name}
        while todo:
            parent = todo.pop()
            by_parent = self._victims("WHERE model = ? AND parent = ?", (parent.model, parent.name))
            by_base = self._victims("WHERE model = ? AND base = ?", (parent.model, parent.name))
            children = [each for each in (*by_parent, *by_base) if each.name not in seen]
            seen |= {each.name for each in children}
            found += children
            todo += children
        return found

    def users(self, model: str) -> Iterator[tuple[BlobName, str, int]]:
        """Who used a model's blobs, and up to which offset."""
        for name, user, depth in self._db.execute("SELECT name, user, depth FROM users WHERE model = ?", (model,)):
            if isinstance(name, str) and isinstance(user, str) and isinstance(depth, int):
                yield BlobName(name), user, depth

    def unused(self, model: str, is_forgotten: IsForgotten) -> Unused:
        """The blobs with tokens that only these users, or no known user, have used, and their descendants. There is no
        trie of a model that is not loaded, so what others used of such a blob cannot be written anew. Rows that
        contradict their names are among them."""
        depths: defaultdict[BlobName, dict[str, int]] = defaultdict(dict)
        for name, user, depth in self.users(model):
            depths[name][user] = depth
        users = {user for of_blob in depths.values() for user in of_blob if is_forgotten(user)}
        deleted: dict[str, int] = {}
        for row in self.listed(model):  # parents before children
            if not isinstance(row, Listed):
                deleted[row] = 0
                continue
            others = remaining(depths[row.head.name], users.__contains__)
            if row.head.parent in deleted or row.head.base in deleted or not is_needed(others, row.head.tokens.end):
                deleted[row.head.name] = row.num_bytes
        return Unused(tuple(map(BlobName, deleted)), tuple(sorted(users)), sum(deleted.values()))

    def rate(self, name: str) -> float | None:
        """A measured rate per second; None where none was written."""
        row = self._db.execute("SELECT per_second FROM rates WHERE name = ?", (name,)).fetchone()
        is_rate = row is not None and isinstance(row[0], float) and 0 < row[0] < math.inf
        return row[0] if is_rate else None

    def clock(self) -> Tick | None:
        """The moment that was written last. A catalog of an older server has none: then the last use of any blob, whose
        age only the machine's clock tells."""
        row = self._db.execute("SELECT age, wall, boot FROM clock").fetchone()
        is_tick = row is not None and all(isinstance(each, float) and 0 <= each < math.inf for each in row)
        if is_tick:
            return Tick(*row)
        (newest,) = self._db.execute("SELECT max(used_at) FROM blobs").fetchone()
        is_past = isinstance(newest, float) and 0 <= newest <= time.time()
        return Tick(newest, newest, math.inf) if is_past else None

    def _victims(self, condition: str, values: Sequence[object]) -> list[Victim]:
        rows = self._db.execute(f"SELECT model, name, num_bytes, used_at FROM blobs {condition}", values).fetchall()
        if not all(isinstance(row[2], int) for row in rows):
            raise sqlite3.DatabaseError("a row is not what was written")
        return [Victim(model, BlobName(name), num_bytes, used_at) for model, name, num_bytes, used_at in rows]

    # --- changing -----------------------------------------------------------------------------------------------------

    def put(
        self,
        blobs: Iterable[Listed],
        model: str,
        used_at: Mapping[BlobName, float],
        depths: Mapping[tuple[BlobName, str], int | None],
    ) -> None:
        """Write, all or none: blobs (one that is there, of another server perhaps, gets no older), when blobs of a
        model were used, and by whom, up to which offset; None: that user is dropped."""
        with _transaction(self._db):
            self._db.executemany(_PUT, map(_row, blobs))
            moments = ((moment, model, name) for name, moment in used_at.items())
            self._db.executemany("UPDATE blobs SET used_at = ? WHERE model = ? AND name = ?", moments)
            noted = [(model, name, user, depth) for (name, user), depth in depths.items() if depth is not None]
            self._db.executemany("INSERT OR REPLACE INTO users VALUES (?, ?, ?, ?)", noted)
            gone = [(model, name, user) for (name, user), depth in depths.items() if depth is None]
            self._db.executemany("DELETE FROM users WHERE model = ? AND name = ? AND user = ?", gone)

    def drop(self, blobs: Collection[tuple[str, BlobName]]) -> None:
        """Delete the rows of blobs, by (model, name)."""
        with _transaction(self._db):
            self._db.executemany("DELETE FROM blobs WHERE model = ? AND name = ?", blobs)
            self._db.executemany("DELETE FROM users WHERE model = ? AND name = ?", blobs)

    def forget_users(self, model: str, users: Collection[str]) -> None:
        """Delete these users, and every trace of deleted rows in file and log."""
        with _transaction(self._db):
            self._db.executemany("DELETE FROM users WHERE model = ? AND user = ?", [(model, user) for user in users])
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def set_rate(self, name: str, per_second: float) -> None:
        """Write a measured rate."""
        with _transaction(self._db):
            self._db.execute("INSERT OR REPLACE INTO rates VALUES (?, ?)", (name, per_second))

    def set_clock(self, tick: Tick) -> None:
        """Write a moment."""
        with _transaction(self._db):
            self._db.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?)", (tick.age, tick.wall, tick.boot))


class OpenCatalog:
    """The catalog where it can be used: a locked or broken one costs order and speed, never a blob. Each question and
    change says whether it could be done. `begin_anew` is called after the catalog had to be emptied."""

    def __init__(self, open_catalog: Callable[[], Catalog], faults: Faults, begin_anew: Callable[[], None]) -> None:
        self._open_catalog = open_catalog
        self._faults = faults
        self._begin_anew = begin_anew
        self._catalog: Catalog | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._catalog is not None

    def open(self) -> Catalog | None:
        """Open it, if it is not; None where that fails now."""
        if self._catalog is None:
            try:
                self._catalog = self._open_catalog()
            except (sqlite3.Error, OSError) as error:
                self._faults.add("index", error)
        return self._catalog

    def do[**P](self, change: Callable[Concatenate[Catalog, P], None], *what: P.args, **named: P.kwargs) -> bool:
        """Change it; whether that was possible."""

        def done(catalog: Catalog) -> bool:
            change(catalog, *what, **named)
            return True

        return self.ask(done) is not None

    def ask[**P, T](self, question: Callable[Concatenate[Catalog, P], T], *what: P.args, **named: P.kwargs) -> T | None:
        """Ask it; None where it cannot be used."""
        if self._catalog is None:
            return None
        try:
            return question(self._catalog, *what, **named)
        except sqlite3.Error as error:
            self._faults.add("index", error)
            if not is_passing(error):
                self._reset()
            return None

    def _reset(self) -> None:
        """`DiskAccount.reconcile` writes rows for the files again."""
        try:
            self._begin_anew()
            if self._catalog is not None:
                self._catalog.reset()
        except (sqlite3.Error, OSError) as again:
            self._faults.add("index", again)
            self._catalog = None

    def close(self) -> None:
        """Close it; it may be opened again."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None


def _row(blob: Listed) -> tuple[object, ...]:
    head = blob.head
    images = json.dumps([(span.start, span.end, span.digest) for span in head.tokens.images])
    where = (head.model, head.name, head.kind, head.parent, head.tokens.start)
    return (*where, head.tokens.ids, images, head.boundary, head.base, blob.num_bytes, blob.used_at)


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
