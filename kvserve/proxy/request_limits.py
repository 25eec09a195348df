"""How much each holder of a key may ask: requests in a minute, and requests that run or wait at the same time. It knows
names and a clock, no request."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvserve.errors import LimitReached
from kvserve.proxy.keys_file import KeyHolder

WINDOW_SECONDS = 60.0
ROW_RETRY_SECONDS = 5
"""When to come back where all rows are taken: nobody knows when one of them ends."""


@dataclass(slots=True)
class _Use:
    begun_at: deque[float] = field(default_factory=deque)
    num_open: int = 0


class RequestLimits:
    """What the holders of one process use; one thread counts. A request that is refused is not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, _Use] = {}

    @contextmanager
    def admit(self, holder: KeyHolder | None) -> Iterator[None]:
        """Counts one request as long as the block runs, however it ends; None has no limits. Raises LimitReached."""
        if holder is None or (holder.requests_per_minute is None and holder.rows_at_once is None):
            yield
            return
        used = self._used.setdefault(holder.name, _Use())
        self._check(holder, used)
        if holder.requests_per_minute is not None:
            used.begun_at.append(self._clock())
        used.num_open += 1
        try:
            yield
        finally:
            used.num_open -= 1

    def _check(self, holder: KeyHolder, used: _Use) -> None:
        rows, per_minute, now = holder.rows_at_once, holder.requests_per_minute, self._clock()
        while used.begun_at and used.begun_at[0] <= now - WINDOW_SECONDS:
            used.begun_at.popleft()
        if rows is not None and used.num_open >= rows:
            raise LimitReached(
                f"{holder.name} may have {rows} requests at the same time: wait until one has ended.",
                retry_after_seconds=ROW_RETRY_SECONDS,
            )
        if per_minute is not None and len(used.begun_at) >= per_minute:
            free_at = used.begun_at[-per_minute] + WINDOW_SECONDS
            raise LimitReached(
                f"{holder.name} may begin {per_minute} requests in a minute.",
                retry_after_seconds=max(1, math.ceil(free_at - now)),
            )
