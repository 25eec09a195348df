"""How much was written to disk of late: disks wear with every byte. Figures only; they begin with the process."""

from collections import deque

from kvserve.cache.disk_age import seconds_since_boot

DAY_SECONDS = 86400.0
NUM_PARTS = 96
"""A day is counted in quarters of an hour."""


class Wear:
    """Bytes written, in all and in the last day. One thread adds; the figures may be read from any."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: deque[tuple[int, int]] = deque(maxlen=NUM_PARTS + 1)

    def add(self, num_bytes: int) -> None:
        """So many were written now."""
        self.num_bytes += num_bytes
        part = _part_now()
        before = self._parts.pop()[1] if self._parts and self._parts[-1][0] == part else 0
        self._parts.append((part, before + num_bytes))

    def last_day_bytes(self) -> int:
        """Those of the last 24 hours, to a quarter of an hour."""
        first = _part_now() - NUM_PARTS
        return sum(num_bytes for part, num_bytes in tuple(self._parts) if part > first)


def _part_now() -> int:
    return int(seconds_since_boot() / DAY_SECONDS * NUM_PARTS)
