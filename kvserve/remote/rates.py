"""What a shared server was measured to give, and whether it is asked at all. Pure: the clock is handed in."""

from dataclasses import dataclass

RATE_WEIGHT = 0.3
MIN_MEASURED_BYTES = 256 * 1024
"""Fewer bytes than these tell of the latency, not of the bandwidth."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
LIES_SECONDS = 300.0
LIES_WINDOW_SECONDS = 60.0
MAX_LIES = 3
"""So many blobs within a minute that are not what they are said to be, and the server is left alone for a while."""


@dataclass(slots=True)
class Rates:
    """Seconds of a small exchange, and bytes per second both ways; None until measured. One thread each writes."""

    latency_seconds: float | None = None
    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None

    def take(self, found: "Rates") -> None:
        """Take what was measured just now for the truth."""
        self.latency_seconds = found.latency_seconds
        self.read_bytes_per_second = found.read_bytes_per_second
        self.write_bytes_per_second = found.write_bytes_per_second

    def exchanged(self, seconds: float) -> None:
        """Note a small exchange."""
        self.latency_seconds = _moved(self.latency_seconds, seconds)

    def was_read(self, num_bytes: int, seconds: float) -> None:
        """Note a read."""
        if num_bytes >= MIN_MEASURED_BYTES:
            self.read_bytes_per_second = _moved(self.read_bytes_per_second, num_bytes / max(seconds, 1e-6))

    def was_written(self, num_bytes: int, seconds: float) -> None:
        """Note a write."""
        if num_bytes >= MIN_MEASURED_BYTES:
            self.write_bytes_per_second = _moved(self.write_bytes_per_second, num_bytes / max(seconds, 1e-6))


def _moved(known: float | None, seen: float) -> float:
    return seen if known is None else known + RATE_WEIGHT * (seen - known)


class Breaker:
    """Whether the server is asked. It opens at the first failure, and closes at a probe that succeeds; probes come
    after 1, 2, 4 .. 30 s. It begins open: nothing waits for a first connection."""

    def __init__(self) -> None:
        self.is_closed = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._probe_at = 0.0
        self._lies: list[float] = []
        self.is_lying = False

    def failed(self, now: float) -> None:
        """Note a failure, of a probe or of anything else."""
        self.is_closed = False
        self._probe_at = max(self._probe_at, now + self._pause_seconds)  # lies keep their longer pause
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds)

    def lied(self, now: float) -> None:
        """Note a blob that does not verify."""
        self._lies = [moment for moment in self._lies if now - moment < LIES_WINDOW_SECONDS] + [now]
        if len(self._lies) >= MAX_LIES:
            self.is_closed, self.is_lying = False, True
            self._lies, self._probe_at = [], now + LIES_SECONDS

    def succeeded(self) -> None:
        """Note a probe that succeeded."""
        self.is_closed, self.is_lying = True, False
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether a probe may be tried now."""
        return not self.is_closed and now >= self._probe_at

    def seconds_to_probe(self, now: float) -> float:
        return max(0.0, self._probe_at - now)
