"""The telemetry that came first, by what is left of it without its values: clients write it at the front of their
prompts, and the same one in all of them lets them share what follows. It knows texts, no rules; none of them is
anybody's words.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from kvserve.sessions.journal import UNWRITTEN, Journal, Rows
from kvserve.sessions.message_rows import dump, number, parse, seconds, text_of

MAX_VALUES = 64
MAX_CHARACTERS = 512
"""A longer one is no telemetry: it is said as it was sent."""

ROW_LIFE_SECONDS = 3_600.0
"""A value in use is written down again when its row would go so much earlier than it should, not at every request."""


@dataclass(slots=True)
class _First:
    """`until` is when its row may go, in seconds since the epoch, None while it has none."""

    text: str
    until: float | None = None


class TelemetryValues:
    """At most so many, the least recently used goes first. Safe for several threads."""

    def __init__(self, max_values: int = MAX_VALUES, journal: Journal = UNWRITTEN) -> None:
        self._max_values = max_values
        self._journal = journal
        self._lock = threading.Lock()
        self._first: OrderedDict[str, _First] = OrderedDict()
        self._num_written = 0

    def first(self, key: str, text: str, until: float | None = None) -> str:
        """The text that came first under this key: this one, where it is the first. `until`: its row is kept so long at
        least; None: it is not written down."""
        if len(key) + len(text) > MAX_CHARACTERS:
            return text
        with self._lock:
            first = self._first.setdefault(key, _First(text))
            self._first.move_to_end(key)
            if until is not None and (first.until is None or until - first.until > ROW_LIFE_SECONDS):
                first.until = until
                self._put(key, first)
            while len(self._first) > self._max_values:
                self._forget(next(iter(self._first)))
            return first.text

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            for key in list(self._first):
                self._forget(key)

    def expire(self, now: float) -> None:
        """Forget the values whose rows nobody needs any more."""
        with self._lock:
            for key, first in list(self._first.items()):
                if first.until is not None and first.until < now:
                    self._forget(key)

    def put_all(self) -> None:
        """Tell the journal everything that is to last."""
        with self._lock:
            for key, first in self._first.items():
                if first.until is not None:
                    self._put(key, first)

    def load(self, rows: Rows) -> None:
        """Take in what was written down. Raises ValueError for rows of another form."""
        found = [(key.decode("utf-8", "surrogatepass"), parse(body)) for key, body in rows.get("telemetry", ())]
        with self._lock:
            for key, row in sorted(found, key=lambda pair: number(pair[1].get("serial"))):
                self._first[key] = _First(text_of(row.get("text")), seconds(row.get("until")))
                self._num_written = number(row.get("serial")) + 1

    def _forget(self, key: str) -> None:
        if self._first.pop(key).until is not None:
            self._journal.drop("telemetry", _row_key(key))

    def _put(self, key: str, first: _First) -> None:
        self._journal.put("telemetry", _row_key(key), partial(_body, first.text, first.until, self._num_written))
        self._num_written += 1


def _row_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _body(text: str, until: float | None, serial: int) -> bytes:
    return dump({"text": text, "until": until, "serial": serial})
