"""Which model has read which conversation, and where a conversation goes on although its system prompt is another one.

It knows digests only, so that nothing is kept alive by it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence


class Places[Place]:
    """Digests and what is known of them, at most `max_entries`, the oldest goes first. Safe for several threads."""

    def __init__(self, max_entries: int = 4_096) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Place] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def put(self, digests: Sequence[bytes], place: Place) -> None:
        """Note the same of several digests; what was known of them is replaced."""
        with self._lock:
            for digest in digests:
                self._entries[digest] = place
                self._entries.move_to_end(digest)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def find(self, digests: Sequence[bytes]) -> Place | None:
        """What is known of the last of these digests of which anything is known."""
        with self._lock:
            found = (self._entries.get(digest) for digest in reversed(digests))
            return next((place for place in found if place is not None), None)

    def forget(self, is_gone: Callable[[Place], bool]) -> None:
        """Forget the digests of which this is known."""
        with self._lock:
            for digest in [digest for digest, place in self._entries.items() if is_gone(place)]:
                del self._entries[digest]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
