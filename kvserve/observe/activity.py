"""What runs now, and what the last hour was like: numbers for a page that somebody watches. It knows no prompt's text.

Bounded: requests that run, buckets of time and the first-token times of the last requests.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Protocol

from kvserve.core import RequestId
from kvserve.requests.request_facts import RequestFacts, RunningFacts

BUCKET_SECONDS = 10
NUM_BUCKETS = 360
NUM_TIMES = 256
MAX_RUNNING = 1_024


class Watched(Protocol):
    """A request that runs."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def progress(self) -> RunningFacts: ...


@dataclass(slots=True)
class Bucket:
    """The requests that ended within `BUCKET_SECONDS` from `started_at`, seconds since the epoch."""

    started_at: int
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds to the first token of the last requests: the newest, the median, the 95th percentile."""

    num_requests: int
    newest: float
    median: float
    p95: float


class Activity:
    """Requests that run and totals of those that ended. Safe for several threads; nothing here is called per token.

    `clock` gives seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: OrderedDict[RequestId, Watched] = OrderedDict()
        self._buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self._first_tokens: deque[float] = deque(maxlen=NUM_TIMES)

    def begin(self, request: Watched) -> None:
        """A request was submitted; `end` takes it away."""
        with self._lock:
            self._running[request.request_id] = request
            while len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)

    def end(self, facts: RequestFacts) -> None:
        """A request is over."""
        with self._lock:
            self._running.pop(facts.request_id, None)
            bucket = self._bucket()
            bucket.num_requests += 1
            bucket.num_prompt_tokens += facts.num_prompt_tokens
            bucket.num_cached_tokens += facts.num_cached_tokens
            bucket.num_generated_tokens += facts.num_completion_tokens
            if facts.ttft_seconds is not None:
                self._first_tokens.append(facts.ttft_seconds)

    def running(self) -> list[RunningFacts]:
        """What runs, the oldest first."""
        with self._lock:
            requests = list(self._running.values())
        return [request.progress for request in requests]

    def history(self) -> list[Bucket]:
        """The last hour; times in which nothing ended have no bucket."""
        oldest = self._clock() - NUM_BUCKETS * BUCKET_SECONDS
        with self._lock:
            return [replace(bucket) for bucket in self._buckets if bucket.started_at >= oldest]

    def first_token_times(self) -> FirstTokenTimes | None:
        """None before the first token of the first request."""
        with self._lock:
            times = list(self._first_tokens)
        return FirstTokenTimes(len(times), times[-1], median(times), _p95(times)) if times else None

    def _bucket(self) -> Bucket:
        started_at = int(self._clock()) // BUCKET_SECONDS * BUCKET_SECONDS
        if not self._buckets or self._buckets[-1].started_at != started_at:
            self._buckets.append(Bucket(started_at))
        return self._buckets[-1]


def _p95(times: Sequence[float]) -> float:
    return quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
