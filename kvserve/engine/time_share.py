"""How much of the time may go into work that nobody asked for: seconds come in at a rate and are spent."""

import time
from collections.abc import Callable

WINDOW_SECONDS = 600.0
"""What was not spent is saved up for so long: an engine that was idle all night does not compute all morning."""


class TimeShare:
    """An account that begins full: at the start there is most to do. May be overdrawn by one piece of work."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` of each second comes in, between 0 and 1."""
        self._share = share
        self._clock = clock
        self._seconds = share * WINDOW_SECONDS
        self._filled_at = clock()

    @property
    def is_open(self) -> bool:
        """Whether anything can ever be spent."""
        return self._share > 0

    def spend(self, seconds: float) -> None:
        """So long was worked."""
        self._fill()
        self._seconds -= seconds

    def seconds_until_due(self) -> float:
        """How long to wait until there is something to spend; 0: there is."""
        self._fill()
        return 0.0 if self._seconds > 0 else -self._seconds / self._share if self._share else float("inf")

    def _fill(self) -> None:
        now = self._clock()
        self._seconds = min(self._seconds + (now - self._filled_at) * self._share, self._share * WINDOW_SECONDS)
        self._filled_at = now
