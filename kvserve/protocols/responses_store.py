"""Stores the responses that clients may name again, and their items, bounded, in one SQLite file.

It knows the wire's ids and items and their principals, no turns and no tokens. The process owns it; any thread may call
it.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.core import NOBODY, JsonObject, Principal
from kvserve.core.keeping import Scope
from kvserve.errors import NotFound
from kvserve.protocols.responses_items import answer_of_item
from kvserve.protocols.responses_stream import response_id

MAX_RESPONSES = 2_000
MAX_BYTES = 256 * 2**20
KEEP_SECONDS = 30 * 86_400.0
"""As long as OpenAI keeps them."""

TIDY_SECONDS = 600.0
"""How often expired responses are deleted from the file; lookups ignore them before that."""

VERSION = 2
"""A file of another version is replaced: version 1 did not record principals."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS responses ("
    "id TEXT PRIMARY KEY, key_digest TEXT NOT NULL, user_digest TEXT NOT NULL, session TEXT, previous TEXT, "
    "body TEXT NOT NULL, items TEXT NOT NULL, num_bytes INTEGER NOT NULL, used REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used)",
    f"PRAGMA user_version = {VERSION}",
)
_SELECT = """
SELECT body, items, previous, key_digest, user_digest, session FROM responses
WHERE id = ? AND key_digest = ? AND user_digest = coalesce(?, user_digest) AND used > ?
"""
_FORGET = "DELETE FROM responses WHERE is_covered(:session, :principal, key_digest, user_digest, session)"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items of its request, the response that it continues, and the request's principal and session."""

    body: JsonObject
    items: tuple[JsonObject, ...]
    previous: str | None
    principal: Principal = NOBODY
    session: str | None = None

    @property
    def output(self) -> tuple[JsonObject, ...]:
        """The items of the answer."""
        output = self.body.get("output")
        return tuple(output) if isinstance(output, list) else ()


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The responses that a client with a key's digest and a user may name: its own. All others are not found. `user` is
    "" if the request names no user; None matches every user of the key: a path names no user."""

    store: "ResponseStore"
    key: str
    user: str | None

    def get(self, wanted: str) -> StoredResponse:
        """One response. Raises NotFound."""
        found = self.store.find(wanted, self.key, self.user)
        if found is None:
            raise NotFound(f"The response {wanted!r} is not kept here.", param="response_id")
        return found

    def delete(self, wanted: str) -> None:
        """Forget a response. Raises NotFound."""
        self.get(wanted)
        self.store.delete(wanted)

    def items_until(self, wanted: str) -> Sequence[JsonObject]:
        """All items up to and with a response, oldest first. Raises NotFound, also if an older response is not kept."""
        turns: list[StoredResponse] = []
        seen: set[str] = set()
        following: str | None = wanted
        while following is not None and following not in seen:
            seen.add(following)
            found = self.store.find(following, self.key, self.user)
            if found is None:
                message = f"The response {following!r} is not kept here (any more); send the whole conversation."
                raise NotFound(message, param="previous_response_id")
            turns.append(found)
            following = found.previous
        self.store.touch(seen)
        return [item for turn in reversed(turns) for item in (*turn.items, *turn.output)]

    def item(self, item_id: str) -> JsonObject:
        """One item of an answer. Raises NotFound."""
        request_id = answer_of_item(item_id)
        found = self.store.find(response_id(request_id), self.key, self.user) if request_id is not None else None
        for item in found.output if found is not None else ():
            if item.get("id") == item_id:
                return item
        raise NotFound(f"The item {item_id!r} is not kept here; send it whole.", param="input")


class ResponseStore:
    """Keeps the `max_responses` used last, in `max_bytes` of JSON, for `keep_seconds` after their last use: being made
    or being continued. `path` None keeps them in memory.

    A fault of the file is reported and loses the stored responses; no request fails because of it.
    """

    def __init__(
        self,
        path: Path | None,
        report: Callable[[str], None],
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        keep_seconds: float = KEEP_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._report = report
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.keep_seconds = keep_seconds
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        self._tidied_at = 0.0

    # --- what requests ask for ---------------------------------------------------------------------------------------

    def of(self, asker: Principal) -> OwnResponses:
        """What a request of `asker` may name and continue; its prompt will hold the items."""
        return OwnResponses(self, asker.key, asker.user)

    def of_key(self, key: str) -> OwnResponses:
        """What a path may name for a client with this key; a path names no user."""
        return OwnResponses(self, key, None)

    def put(self, response: StoredResponse) -> None:
        """Keep a response; beyond the limits, forget the least recently used ones."""
        body, items = json.dumps(response.body), json.dumps(response.items)
        whose = response.principal.key, response.principal.user, response.session
        num_bytes = len(body) + len(items)
        row = (response.body["id"], *whose, response.previous, body, items, num_bytes, self._wall_clock())
        with self._lock:
            try:
                self._insert(row)
            except sqlite3.Error as error:
                self._give_up(error)
                with suppress(sqlite3.Error):  # the file is new now; a full disk was reported already
                    self._insert(row)

    def _insert(self, row: tuple[Any, ...]) -> None:
        with self._database as database:
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._forget_oldest(database)

    def find(self, wanted: str, key: str, user: str | None) -> StoredResponse | None:
        """One response of a key and a user; None if it is not kept."""
        with self._lock:
            return self._find(wanted, key, user)

    def touch(self, used: set[str]) -> None:
        """These responses were used now."""
        values = [(self._wall_clock(), name) for name in used]
        with self._lock:
            try:
                with self._database as database:
                    database.executemany("UPDATE responses SET used = ? WHERE id = ?", values)
            except sqlite3.Error as error:
                self._give_up(error)

    # --- forgetting --------------------------------------------------------------------------------------------------

    def delete(self, wanted: str) -> None:
        """Forget a response."""
        with self._lock:
            self._erase("DELETE FROM responses WHERE id = ?", (wanted,))

    def forget(self, scope: Scope) -> int:
        """Forget the responses in `scope`. Returns how many there were."""
        with self._lock:
            return self._erase(_FORGET, {"session": scope.session, "principal": scope.principal})

    def tidy(self) -> None:
        """Delete expired responses, at most once in `TIDY_SECONDS`; opens the file if there is one."""
        now = self._wall_clock()
        with self._lock:
            if 0 <= now - self._tidied_at < TIDY_SECONDS:
                return
            self._tidied_at = now
            if self._opened is not None or (self._path is not None and self._path.exists()):
                self._erase("DELETE FROM responses WHERE used <= ?", (now - self.keep_seconds,))

    def _erase(self, statement: str, values: tuple[Any, ...] | dict[str, Any]) -> int:
        """The number of rows that a DELETE removed, from the write-ahead log too."""
        try:
            with self._database as database:
                num_rows = database.execute(statement, values).rowcount
            if num_rows:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        except sqlite3.Error as error:
            self._give_up(error)
            return 0
        return num_rows

    def close(self) -> None:
        """Close the file; no call may follow."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    # --- the file ----------------------------------------------------------------------------------------------------

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        """The opened file. Raises sqlite3.Error, also if its folder cannot be made."""
        if self._path is None:
            database = sqlite3.connect(":memory:", check_same_thread=False)
        else:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(mode=0o600, exist_ok=True)
            except OSError as error:
                raise sqlite3.OperationalError(str(error)) from error
            database = sqlite3.connect(self._path, check_same_thread=False)
        try:
            for name, value in (("secure_delete", "ON"), ("journal_mode", "WAL"), ("synchronous", "NORMAL")):
                database.execute(f"PRAGMA {name} = {value}")
            database.create_function("is_covered", 5, _is_covered, deterministic=True)
            _make_tables(database)
        except UnicodeDecodeError as error:  # SQLite's message quotes the broken name of a table
            database.close()
            raise sqlite3.DatabaseError("the file is damaged: its tables have no names") from error
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _find(self, wanted: str, wanted_key: str, wanted_user: str | None) -> StoredResponse | None:
        oldest = self._wall_clock() - self.keep_seconds
        try:
            with closing(self._database.execute(_SELECT, (wanted, wanted_key, wanted_user, oldest))) as rows:
                row = rows.fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        if row is None:
            return None
        body, items, previous, key, user, session = row
        try:
            return StoredResponse(json.loads(body), tuple(json.loads(items)), previous, Principal(key, user), session)
        except ValueError as error:
            self._report(f"the stored response {wanted!r} is broken: {error}")
            return None

    def _forget_oldest(self, database: sqlite3.Connection) -> None:
        count, size = database.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        if count <= self._max_responses and size <= self._max_bytes:
            return
        for name, num_bytes in database.execute("SELECT id, num_bytes FROM responses ORDER BY used").fetchall():
            if count <= self._max_responses and size <= self._max_bytes:
                return
            database.execute("DELETE FROM responses WHERE id = ?", (name,))
            count, size = count - 1, size - num_bytes

    def _give_up(self, error: Exception) -> None:
        """Continue with an empty file, or in memory if the file cannot be written."""
        self._report(f"stored responses are lost: {error}")
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        path, self._path = self._path, None
        if path is None or not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
            return
        try:  # the file is not a database: replace it
            for name in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
                name.unlink(missing_ok=True)
            self._path = path
        except OSError as fault:
            self._report(f"stored responses are kept in memory: {fault}")


def _is_covered(session: str | None, principal: str | None, key: str, user: str, own_session: str | None) -> bool:
    """Whether a row is in the scope to forget."""
    return Scope(session, principal).covers(str(Principal(key, user)), own_session)


def _make_tables(database: sqlite3.Connection) -> None:
    """Replace the tables of another version, and overwrite their rows, in free pages too. Of two servers that open the
    file at once, one does it."""

    def version() -> int:
        return int(database.execute("PRAGMA user_version").fetchone()[0])

    if version() == VERSION:
        return
    with database:
        database.execute("BEGIN IMMEDIATE")
        was = version()
        if was != VERSION:
            database.execute("DROP TABLE IF EXISTS responses")
            for statement in _SCHEMA:
                database.execute(statement)
    if was not in (0, VERSION):
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            with suppress(sqlite3.OperationalError):  # another server reads it at this moment
                database.execute(statement).close()
