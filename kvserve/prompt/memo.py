"""A memo of computed values within a number of bytes, least recently used first out."""

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
        """The bytes kept now, as given to `put`."""
        return self._num_bytes

    def get(self, key: Hashable) -> V | None:
        """The value, which becomes the most recently used one; None if it is unknown."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: Hashable, value: V, num_bytes: int) -> None:
        """Keep `value`, which takes `num_bytes`, unless it is larger than the whole memo."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._max_bytes:
                return
            while self._num_bytes + num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[key] = _MemoEntry(value, num_bytes)
            self._num_bytes += num_bytes

    def take(self, key: Hashable) -> V | None:
        """Remove and return the value; None if it is unknown."""
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
