"""When rank 0 begins to use its disk: once every rank knows what it has loaded, and all have loaded the same. Before
that the others would find nothing of theirs. Any thread may tell it.
"""

import threading
from collections.abc import Callable


class AllNamed:
    """What each rank has loaded, by rank. `differ` is told what is wrong where two have loaded different weights."""

    def __init__(self, num_ranks: int, differ: Callable[[str], None]) -> None:
        self._num_ranks = num_ranks
        self._differ = differ
        self._lock = threading.Lock()
        self._fingerprints: dict[int, str] = {}
        self._act: Callable[[], None] | None = None

    def own(self, fingerprint: str, act: Callable[[], None]) -> None:
        """Rank 0 has loaded this; `act` is called once all have."""
        self._act = act
        self.note(0, fingerprint)

    def note(self, rank: int, fingerprint: str) -> None:
        """A rank has loaded this."""
        with self._lock:
            self._fingerprints[rank] = fingerprint
            others = [each for each, loaded in self._fingerprints.items() if loaded != fingerprint]
            act = self._act if len(self._fingerprints) == self._num_ranks and not others else None
            self._act = self._act if act is None else None
        if others:
            self._differ(f"rank {max(rank, *others)} has loaded other weights than rank 0")
        if act is not None:
            act()
