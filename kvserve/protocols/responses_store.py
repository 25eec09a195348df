"""The responses that clients may name again, with the items that led to them: bounded, on disk in one SQLite file.

It knows ids and items of the wire, no turns and no tokens. One owner: the process; any thread may call it.
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

from kvserve.core import JsonObject
from kvserve.errors import NotFound
from kvserve.protocols.responses_items import answer_of_item
from kvserve.protocols.responses_stream import response_id

MAX_RESPONSES = 2_000
MAX_BYTES = 256 * 2**20

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, body TEXT NOT NULL, items TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used);
PRAGMA user_version = 1;
"""
_SELECT = "SELECT body, items, previous FROM responses WHERE id = ?"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the items of its own request, and the response that both go on from."""

    body: JsonObject
    items: tuple[JsonObject, ...]
    previous: str | None

    @property
    def output(self) -> tuple[JsonObject, ...]:
        """The items of the answer."""
        output = self.body.get("output")
        return tuple(output) if isinstance(output, list) else ()


class ResponseStore:
    """Keeps the `max_responses` used last, in `max_bytes` of JSON. `path` None keeps them in memory.

    What goes wrong with the file is reported, and costs what was kept: a request never fails for it.
    """

    def __init__(
        self,
        path: Path | None,
        report: Callable[[str], None],
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path = path
        self._report = report
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    # --- what requests ask for ---------------------------------------------------------------------------------------

    def put(self, response: StoredResponse) -> None:
        """Keep a response, and forget those used longest ago beyond the limits."""
        body, items = json.dumps(response.body), json.dumps(response.items)
        row = (response.body["id"], response.previous, body, items, len(body) + len(items), time.time())
        with self._lock:
            try:
                self._insert(row)
            except sqlite3.Error as error:
                self._give_up(error)
                with suppress(sqlite3.Error):  # what is in its place is fresh; a full disk was told of already
                    self._insert(row)

    def _insert(self, row: tuple[Any, ...]) -> None:
        with self._database as database:
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            self._forget_oldest(database)

    def get(self, wanted: str) -> StoredResponse:
        """One response. Raises NotFound."""
        with self._lock:
            found = self._find(wanted)
        if found is None:
            raise NotFound(f"The response {wanted!r} is not kept here.", param="response_id")
        return found

    def delete(self, wanted: str) -> None:
        """Forget a response. Raises NotFound."""
        self.get(wanted)
        with self._lock:
            try:
                with self._database as database:
                    database.execute("DELETE FROM responses WHERE id = ?", (wanted,))
            except sqlite3.Error as error:
                self._give_up(error)

    def items_until(self, wanted: str) -> Sequence[JsonObject]:
        """All items up to and with a response, oldest first. Raises NotFound, also where an older one is not kept."""
        turns: list[StoredResponse] = []
        seen: set[str] = set()
        following: str | None = wanted
        with self._lock:
            while following is not None and following not in seen:
                seen.add(following)
                found = self._find(following)
                if found is None:
                    message = f"The response {following!r} is not kept here (any more); send the whole conversation."
                    raise NotFound(message, param="previous_response_id")
                turns.append(found)
                following = found.previous
            self._touch(seen)
        return [item for turn in reversed(turns) for item in (*turn.items, *turn.output)]

    def item(self, item_id: str) -> JsonObject:
        """One item of an answer. Raises NotFound."""
        request_id = answer_of_item(item_id)
        with self._lock:
            found = self._find(response_id(request_id)) if request_id is not None else None
        for item in found.output if found is not None else ():
            if item.get("id") == item_id:
                return item
        raise NotFound(f"The item {item_id!r} is not kept here; send it whole.", param="input")

    def close(self) -> None:
        """Nothing is asked of it any more."""
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
        """Raises sqlite3.Error, also for a folder that cannot be made."""
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
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _find(self, wanted: str) -> StoredResponse | None:
        try:
            with closing(self._database.execute(_SELECT, (wanted,))) as rows:
                row = rows.fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        if row is None:
            return None
        body, items, previous = row
        try:
            return StoredResponse(json.loads(body), tuple(json.loads(items)), previous)
        except ValueError as error:
            self._report(f"the stored response {wanted!r} is broken: {error}")
            return None

    def _touch(self, used: set[str]) -> None:
        now = time.time()
        try:
            with self._database as database:
                database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(now, name) for name in used])
        except sqlite3.Error as error:
            self._give_up(error)

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
        """Go on with an empty file, or in memory where the file cannot be written."""
        self._report(f"stored responses are lost: {error}")
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        path, self._path = self._path, None
        if path is None or not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
            return
        try:  # the file is no database: a new one takes its place
            for name in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
                name.unlink(missing_ok=True)
            self._path = path
        except OSError as fault:
            self._report(f"stored responses are kept in memory: {fault}")
