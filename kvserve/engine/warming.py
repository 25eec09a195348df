"""What an idle engine is asked to do: compute the KV of a prefix before a request needs it. Nouns, the account of the
time that may go into it, and the handle through which other threads follow a job; `warmer.py` computes it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvserve.cache.warmed import WarmedTotals
from kvserve.core import GenerationRequest, ImageInput, MessageStart, RequestId, SamplingParams, TokenSequence

type WarmKind = Literal["prewarm", "learned", "next_turn"]
"""Who wants it: a client, right now; the server, which has learned that this beginning is used often; the server, which
expects a session to go on with it."""

type WarmState = Literal["done", "dropped", "failed"]

WINDOW_SECONDS = 600.0
"""What was not spent is saved up for so long: an engine that was idle all night does not compute all morning."""

ANY_TOKEN = 0
"""Stands behind a prefix in place of what will come: the last token of a prompt is never prefilled."""


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """What the operator decides: the most tokens that one job computes, and the share of the time that may go into what
    no client asked for (0: none of it).

    An engine is idle for `grace_seconds` before it begins: a client that continues at once meets no chunk of ours. A
    chunk takes about `chunk_seconds`: so long may a request have to wait for it.
    """

    max_tokens: int = 32_768
    time_share: float = 0.5
    grace_seconds: float = 0.15
    chunk_seconds: float = 0.2


class TimeShare:
    """Seconds for work that no client asked for: they come in at a rate and are spent. The account begins full, as
    there is most to do at the start, and may be overdrawn by one piece of work."""

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
        """Take so many seconds from the account."""
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


@dataclass(frozen=True, slots=True)
class WarmJob:
    """A prefix whose KV is wanted, all of it: what the prompt of a later request begins with.

    `message_starts` (before its end) are where its messages begin, for the states of layers that cannot be cut; its end
    has one in any case. `ends_before_user`: a user's own words come next. A later job with the same `key` takes the
    place of an earlier one. `max_tokens` are computed at most; None leaves it to the settings, which do not bind what a
    client asked for. `images` has every image that the tokens name. Requests of another `partition` find nothing of it.
    `owner` is whose request it is for; "" where that is not known.
    """

    tokens: TokenSequence
    kind: WarmKind
    message_starts: tuple[MessageStart, ...] = ()
    key: str | None = None
    max_tokens: int | None = None
    images: tuple[ImageInput, ...] = ()
    ends_before_user: bool = False
    partition: str = ""
    owner: str = ""

    def as_request(self) -> GenerationRequest:
        """The prompt that is prefilled up to its last token, which is none of the prefix."""
        num_tokens = len(self.tokens)
        starts = tuple(start for start in self.message_starts if start.offset < num_tokens)
        starts = starts or (MessageStart(0, is_user=False),)
        return GenerationRequest(
            request_id=RequestId(f"warming-{self.kind}"),
            prompt=TokenSequence((*self.tokens.ids, ANY_TOKEN), self.tokens.images),
            max_tokens=1,
            sampling=SamplingParams(),
            stop_tokens=frozenset(),
            message_starts=(*starts, MessageStart(num_tokens, is_user=self.ends_before_user)),
            images=self.images,
            partition=self.partition,
            owner=self.owner,
        )


@dataclass(frozen=True, slots=True)
class WarmResult:
    """How a job ended. Of `num_tokens`, `num_cached_tokens` were there (in RAM or on disk) and `num_computed_tokens`
    were computed in `seconds`. `reason` says why a job was dropped, or how it failed."""

    state: WarmState
    num_tokens: int
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    seconds: float = 0.0
    reason: str = ""


class Warming:
    """The handle of a job, for any thread: it waits until the engine has nothing else to do."""

    def __init__(self, job: WarmJob) -> None:
        self.job = job
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._result: WarmResult | None = None

    @property
    def result(self) -> WarmResult | None:
        """None while it waits or is computed."""
        return self._result

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def wait(self, timeout_seconds: float | None = None) -> WarmResult | None:
        """The result; None if the time was over before."""
        self._ended.wait(timeout_seconds)
        return self._result

    def cancel(self) -> None:
        """End the job before its next chunk; what was computed stays. Idempotent."""
        self._cancelled.set()

    def end(self, result: WarmResult) -> None:
        """Called once, by the engine thread or where the job is refused. What was needed of images is let go of:
        the handle may be kept for long."""
        self.job = replace(self.job, images=())
        self._result = result
        self._ended.set()

    def drop(self, reason: str) -> None:
        """End a job that has not begun."""
        self.end(WarmResult("dropped", len(self.job.tokens), reason=reason))


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What became of jobs and of the tokens that they computed; `num_waiting` counts the one that is computed too."""

    tokens: WarmedTotals
    num_waiting: int
    num_done: int
    num_dropped: int
    num_failed: int
    seconds: float
