"""Faults of the disk: counted by kind, reported once. A fault of the disk never costs more than a miss."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

FaultKind = Literal[
    "damaged", "missing", "unreadable", "unwritable", "full", "behind", "index", "unsupported", "unlocked"
]

_CONSEQUENCE: Mapping[FaultKind, str] = {
    "damaged": "KV on disk was damaged and is computed again",
    "missing": "KV on disk is gone and is computed again",
    "unreadable": "KV on disk could not be read and is computed again",
    "unwritable": "KV could not be written to disk and stays in RAM only",
    "full": "The disk has no room for more KV; nothing is written until there is",
    "behind": "KV was evicted from RAM before it could be written to disk and is computed again",
    "index": "The index of the KV on disk could not be used; it is made again from the files",
    "unlocked": "This volume has no file locks: two servers on one folder may delete what the other has just written",
    "unsupported": "A state of this model cannot be written to disk and stays in RAM only",
}


class Faults:
    """Counts per kind since the start. May be used from any thread."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._counts: Counter[FaultKind] = Counter()
        self._told: set[FaultKind] = set()

    def add(self, kind: FaultKind, reason: object) -> None:
        """Count a fault; report the first of its kind with its reason."""
        with self._lock:
            self._counts[kind] += 1
            is_first = kind not in self._told
            self._told.add(kind)
        if is_first:
            self._report(f"{_CONSEQUENCE[kind]} ({reason}). Counted in GET /v1/cache; not told again.")

    def is_over(self, kind: FaultKind, line: str) -> None:
        """Report that a condition has ended, and report the next fault of this kind again."""
        with self._lock:
            was_told = kind in self._told
            self._told.discard(kind)
        if was_told:
            self._report(line)

    def counts(self) -> dict[str, int]:
        """Faults per kind; kinds that never occurred are not in it."""
        with self._lock:
            return {str(kind): count for kind, count in self._counts.items()}
