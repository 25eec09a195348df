"""What was computed once, kept within a number of bytes and forgotten least recently used first; knows no text."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class _MemoEntry[V]:
    value: V
    num_bytes: int


class Memo[V]:
    """A bounded memo. Every method may be called from several threads at once; values must be immutable."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Hashable, _MemoEntry[V]] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """What is kept now, as its givers counted it."""
        return self._num_bytes

    def get(self, key: Hashable) -> V | None:
        """The value, which thereby becomes the most recently used one; None where it is not known."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: Hashable, value: V, num_bytes: int) -> None:
        """Keep `value`, which takes `num_bytes`; what is larger than the whole memo is not kept."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._max_bytes:
                return
            while self._num_bytes + num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[key] = _MemoEntry(value, num_bytes)
            self._num_bytes += num_bytes

    def take(self, key: Hashable) -> V | None:
        """The value, which is forgotten; None where it is not known."""
        with self._lock:
            entry = self._entries.get(key)
            self._drop(key)
        return entry.value if entry is not None else None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        self._num_bytes -= entry.num_bytes if entry is not None else 0
