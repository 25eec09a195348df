"""How the stores of conversations tell their changes, to be written down; and a store of entries by key, within bounds,
that does so. It knows neither what an entry holds nor any file.
"""

import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, Protocol

type Kind = (
    Literal[
        "node", "read", "place", "record", "tools", "layouts", "healing", "branch", "counter", "beginning", "telemetry"
    ]
    | Literal["ended request", "step", "salt"]
)
"""What a row is: a message as the model saw it; when it was last read; conflicts at a chain; a request; the first order
of a set of tools; where tools stood in a conversation; what the model wrote at a place; a branch of a session; a
counter; a system prompt and how often prompts began with it; the telemetry that came first. Of
the dashboard: a request that ended, sums of a time, what goes into its digests."""

type Rows = Mapping[Kind, Sequence[tuple[bytes, bytes]]]
"""All rows of a file: (key, body) by kind."""


class Journal(Protocol):
    """Takes changes in order, at once and without failing; called under the stores' locks."""

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Set a row. `body` is called later, on another thread: it reads immutable values only."""

    def drop(self, kind: Kind, key: bytes) -> None:
        """Delete a row."""


class JournalSwitch:
    """A journal that passes changes on to another one, which can be replaced; None: nothing is written."""

    def __init__(self, to: Journal | None = None) -> None:
        self.to = to

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Passed on."""
        if (to := self.to) is not None:  # `detach` may run on another thread
            to.put(kind, key, body)

    def drop(self, kind: Kind, key: bytes) -> None:
        """Passed on."""
        if (to := self.to) is not None:
            to.drop(kind, key)


UNWRITTEN: Journal = JournalSwitch()
"""Writes nothing."""


def number_key(number: int) -> bytes:
    """A number as a key; keys sort as their numbers do."""
    return number.to_bytes(8, "big")


ROW_LIFE_SECONDS = 3_600.0
"""The row of an entry in use is written again when it would expire so much earlier than it should, not at every use."""


@dataclass(slots=True)
class JournaledEntry:
    """`until` is when its row may be dropped, in seconds since the epoch; None: it has no row. `num_bytes` count for
    the bound of the store."""

    until: float | None = field(default=None, kw_only=True)
    num_bytes: int = field(default=0, kw_only=True)

    def is_due(self, until: float | None) -> bool:
        """Whether a row that is to be kept until then has to be written now."""
        return until is not None and (self.until is None or until - self.until > ROW_LIFE_SECONDS)


class JournaledStore[Key: Hashable, Value: JournaledEntry](ABC):
    """At most `max_entries` and `max_bytes`, the least recently used dropped first; `min_entries` stay whatever their
    bytes. Thread-safe: a subclass takes `_lock` for what it does with `_entries`."""

    def __init__(
        self, kind: Kind, journal: Journal, *, max_entries: int, max_bytes: int = sys.maxsize, min_entries: int = 0
    ) -> None:
        self._kind: Kind = kind
        self._journal = journal
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._min_entries = min_entries
        self._lock = threading.RLock()
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._num_bytes = 0
        self._num_written = 0

    @abstractmethod
    def _row_key(self, key: Key) -> bytes:
        """The key of an entry's row."""

    @abstractmethod
    def _row_body(self, key: Key, entry: Value, serial: int) -> Callable[[], bytes]:
        """The body of an entry's row, made later from values that do not change; `serial` is higher at every write."""

    @abstractmethod
    def _stored(self, row_key: bytes, body: bytes) -> tuple[float, Key, Value]:
        """The entry of a row, and what rows are in order by: their serials, or times. Raises ValueError."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def clear(self) -> None:
        """Drop all entries."""
        self._drop_where(lambda entry: True)

    def expire(self, now: float) -> None:
        """Drop the entries whose rows have expired."""
        self._drop_where(lambda entry: entry.until is not None and entry.until < now)

    def load(self, rows: Rows) -> None:
        """Take in what was written down; the store must be empty. Raises ValueError for rows of another form."""
        found = [self._stored(key, body) for key, body in rows.get(self._kind, ())]
        with self._lock:
            for serial, key, entry in sorted(found, key=itemgetter(0)):
                self._add(key, entry)
                self._num_written = int(serial) + 1
            self._shrink(self._max_bytes)

    def put_all(self) -> None:
        """Tell the journal every entry that has a row."""
        with self._lock:
            for key, entry in self._entries.items():
                if entry.until is not None:
                    self._put(key)

    def _add(self, key: Key, entry: Value) -> Value:
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        return entry

    def _first(self, key: Key, entry: Value, until: float | None) -> Value:
        """The entry that came first under this key: this one, where it is the first."""
        with self._lock:
            first = self._entries.get(key) or self._add(key, entry)
            self._entries.move_to_end(key)
            if first.is_due(until):
                first.until = until
                self._put(key)
            self._shrink(self._max_bytes)
            return first

    def _put(self, key: Key) -> None:
        body = self._row_body(key, self._entries[key], self._num_written)
        self._journal.put(self._kind, self._row_key(key), body)
        self._num_written += 1

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._num_bytes -= entry.num_bytes
        if entry.until is not None:
            self._journal.drop(self._kind, self._row_key(key))

    def _drop_where(self, is_gone: Callable[[Value], bool]) -> None:
        with self._lock:
            for key in [key for key, entry in self._entries.items() if is_gone(entry)]:
                self._drop(key)

    def _shrink(self, max_bytes: int) -> None:
        while len(self._entries) > self._max_entries or (
            self._num_bytes > max_bytes and len(self._entries) > self._min_entries
        ):
            self._drop(next(iter(self._entries)))
