"""Which request was given which answers: whoever sends them back made that request. It knows digests only."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ENTRIES = 4_096


@dataclass(frozen=True, slots=True)
class _Given:
    """The conversation that the last of these answers ended, and a digest of the whole prompt before it."""

    leaf: bytes
    prompt: bytes


class GivenAnswers:
    """At most `max_entries`, the longest unused goes first. Safe for several threads.

    A digest stands for a conversation up to its last answer, or for its answers alone. Where two requests that differ
    were given the same, nobody knows which of them is meant, and neither is found.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._given: OrderedDict[bytes, _Given | None] = OrderedDict()

    def put(self, answers: bytes, leaf: bytes, prompt: bytes) -> None:
        """A request with this prompt was given these answers; `leaf` names its conversation."""
        given = _Given(leaf, prompt)
        with self._lock:
            if self._given.setdefault(answers, given) != given:
                self._given[answers] = None
            self._given.move_to_end(answers)
            while len(self._given) > self._max_entries:
                self._given.popitem(last=False)

    def find(self, answers: Sequence[bytes]) -> bytes | None:
        """The conversation that the last known of these stands for; None where that could be one of several, which a
        shallower one could only hide."""
        with self._lock:
            for each in reversed(answers):
                if each in self._given:
                    self._given.move_to_end(each)
                    given = self._given[each]
                    return given.leaf if given is not None else None
        return None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._given.clear()
