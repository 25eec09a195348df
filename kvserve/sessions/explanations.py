"""The explanations of the last requests, for whoever asks later, and how often an identity promised too much."""

import threading
from collections import OrderedDict
from itertools import islice

from kvserve.core import RequestId
from kvserve.sessions.explanation import Explanation


class ExplanationBook:
    """At most `max_entries` explanations, the oldest goes first. Safe for several threads."""

    def __init__(self, max_entries: int = 1_000) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[RequestId, Explanation] = OrderedDict()
        self._num_rejections = 0

    @property
    def num_rejections(self) -> int:
        """Requests whose canonical key matched where the model's tokens did not, and no rule says why."""
        return self._num_rejections

    def put(self, explanation: Explanation) -> None:
        """A request is over."""
        with self._lock:
            self._entries[explanation.request_id] = explanation
            self._num_rejections += explanation.is_rejection
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def get(self, request_id: str) -> Explanation | None:
        """The explanation of a request, None where it is forgotten or never was."""
        with self._lock:
            return self._entries.get(RequestId(request_id))

    def newest(self, max_count: int) -> list[Explanation]:
        """The last explanations, the newest first."""
        with self._lock:
            return list(islice(reversed(self._entries.values()), max_count))

    def clear(self) -> None:
        """Forget everything but the count."""
        with self._lock:
            self._entries.clear()
