"""Bounded maps from digests to a value. They hold digests only, so they keep no message alive."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence


class _Digests[Value]:
    """At most `max_entries` digests, the one that was set or used longest ago is dropped first. Thread-safe."""

    def __init__(self, max_entries: int = 4_096) -> None:
        self._max_entries = max_entries
        self._lock = threading.RLock()
        self._entries: OrderedDict[bytes, Value] = OrderedDict()

    def clear(self) -> None:
        """Drop all digests."""
        with self._lock:
            self._entries.clear()

    def _set(self, digest: bytes, value: Value) -> None:
        with self._lock:
            self._entries[digest] = value
            self._entries.move_to_end(digest)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)


class DigestLru[Value](_Digests[Value]):
    """A new value replaces the old one."""

    def put(self, digests: Sequence[bytes], value: Value) -> None:
        """Set the same value for several digests."""
        with self._lock:
            for digest in digests:
                self._set(digest, value)

    def find(self, digests: Sequence[bytes]) -> Value | None:
        """The value of the last of these digests that has one."""
        with self._lock:
            found = (self._entries.get(digest) for digest in reversed(digests))
            return next((value for value in found if value is not None), None)

    def forget(self, is_gone: Callable[[Value], bool]) -> None:
        """Drop the digests whose value is one of these."""
        with self._lock:
            for digest in [digest for digest, value in self._entries.items() if is_gone(value)]:
                del self._entries[digest]


class UnambiguousLru[Value](_Digests[Value | None]):
    """A digest that gets two different values is ambiguous until it is dropped: which of them is meant is unknown."""

    def put(self, digest: bytes, value: Value) -> None:
        """Note a value; another one than before makes the digest ambiguous."""
        with self._lock:
            self._set(digest, value if self._entries.get(digest, value) == value else None)

    def find(self, digests: Sequence[bytes]) -> Value | None:
        """The value of the last of these digests that is known; None where that one is ambiguous, since a digest before
        it would only hide that."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._entries:
                    self._entries.move_to_end(digest)
                    return self._entries[digest]
        return None

    def is_other(self, digest: bytes, value: Value) -> bool:
        """Whether the digest has another value than this one, or several. Does not count as a use."""
        with self._lock:
            return self._entries.get(digest, value) != value
