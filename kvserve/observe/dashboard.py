"""What the dashboard shows of a server: what runs now, what ended before, one look at the rest. It joins rooms and
decides nothing.

Bounded: requests that run and the first-token times of the last requests. No prompt's text passes through here: of a
difference only its place is told, unless the operator allows the text; of a session's id only what a file name may
show.
"""

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import islice
from statistics import median, quantiles

from kvserve.core import JsonObject, RequestId
from kvserve.explain.causes import NO_MISS
from kvserve.explain.explanation import Explanation
from kvserve.observe.ended_requests import EndedRequest
from kvserve.observe.overview import conversations, last_requests, losses
from kvserve.observe.reports import explanation_body
from kvserve.observe.request_history import RANGES, MinuteSums, RequestHistory
from kvserve.observe.trace import session_label
from kvserve.requests.request_facts import RequestFacts, RunningFacts
from kvserve.requests.turn_facts import WatchedTurn
from kvserve.sessions.lineage import Branch, BranchId, SessionView

NUM_TIMES = 256
MAX_RUNNING = 1_024
SPEED_SECONDS = 5.0
"""Of so long ago are the tokens that the speed of now is reckoned from."""


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds to the first token of the last requests: the newest, the median, the 95th percentile."""

    num_requests: int
    newest: float
    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of all requests together, just now: computed of prompts, and written."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """What was done until a moment: tokens computed of prompts, and written."""

    at: float
    num_computed_tokens: int
    num_generated_tokens: int


class Activity:
    """Requests that run and how fast they go. Safe for several threads; nothing here is called per token.

    `ticks` gives seconds that never go back.
    """

    def __init__(self, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._lock = threading.Lock()
        self._running: OrderedDict[RequestId, WatchedTurn] = OrderedDict()
        self._first_tokens: deque[float] = deque(maxlen=NUM_TIMES)
        self._num_computed_tokens = 0
        self._num_generated_tokens = 0
        self._work: deque[_Work] = deque()

    def begin(self, request: WatchedTurn) -> None:
        """A request was submitted; `end` takes it away."""
        with self._lock:
            self._running[request.request_id] = request
            while len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)

    def end(self, facts: RequestFacts) -> None:
        """A request is over."""
        with self._lock:
            self._running.pop(facts.request_id, None)
            self._num_computed_tokens += facts.num_prefilled_tokens
            self._num_generated_tokens += facts.num_completion_tokens
            if facts.ttft_seconds is not None:
                self._first_tokens.append(facts.ttft_seconds)

    def running(self) -> list[RunningFacts]:
        """What runs, the oldest first."""
        with self._lock:
            requests = list(self._running.values())
        return [request.progress for request in requests]

    def speed(self) -> Speed:
        """How fast it goes, since somebody asked last within the time that counts; nothing for whoever asks first."""
        now = self._ticks()
        with self._lock:  # both at one moment: what ends meanwhile is either running or in the totals
            requests = list(self._running.values())
            computed, generated = self._num_computed_tokens, self._num_generated_tokens
        running = [request.progress for request in requests]
        computed += sum(each.num_done_tokens - each.num_cached_tokens for each in running)
        generated += sum(each.num_generated_tokens for each in running)
        with self._lock:
            self._work.append(_Work(now, computed, generated))
            while self._work[0].at < now - SPEED_SECONDS:
                self._work.popleft()
            first = self._work[0]
        seconds = now - first.at
        if seconds <= 0:
            return Speed()
        # a request that ends between two looks may count a little less than it did while it ran
        prefill = max(0, computed - first.num_computed_tokens) / seconds
        return Speed(round(prefill, 1), round(max(0, generated - first.num_generated_tokens) / seconds, 1))

    def first_token_times(self) -> FirstTokenTimes | None:
        """None before the first token of the first request."""
        with self._lock:
            times = list(self._first_tokens)
        return FirstTokenTimes(len(times), times[-1], median(times), _p95(times)) if times else None


def _p95(times: Sequence[float]) -> float:
    return quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]


MAX_SESSIONS = 40
MAX_BRANCHES = 200
MAX_MISSES = 20


@dataclass(frozen=True, slots=True)
class Look:
    """A server at one moment, in seconds since the epoch: the bodies of `/health` and `/v1/cache` (None while no model
    answers), its sessions, and the requests that wait for another model."""

    health: JsonObject
    cache: JsonObject | None
    sessions: Sequence[SessionView]
    seen_at: float
    waiting: Sequence[RunningFacts] = ()


@dataclass(frozen=True, slots=True)
class Past:
    """The requests that ended, the newest first, and sums for each of `RANGES`."""

    ended: Sequence[EndedRequest] = ()
    sums: Mapping[str, Sequence[MinuteSums]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: RequestHistory) -> "Past":
        """What is kept."""
        return cls(history.newest(), {name: history.sums(name) for name in RANGES})


def dashboard_body(
    look: Look,
    *,
    now: float,
    activity: Activity,
    explanations: Sequence[Explanation],
    last_of_branch: Mapping[BranchId, Explanation],
    shows_text: bool,
    past: Past | None = None,
) -> JsonObject:
    """One event of `/dashboard/events`. `explanations` come newest first; `now` in seconds since the epoch."""
    past = past if past is not None else Past()
    times = activity.first_token_times()
    running = activity.running()
    begun = {facts.request_id for facts in running}  # the look came first: what waited then may run by now
    waiting = [facts for facts in look.waiting if facts.request_id not in begun]
    misses = islice((each for each in explanations if each.cause not in NO_MISS), MAX_MISSES)
    return {
        "time": round(now, 3),
        "health": look.health,
        "cache": look.cache,
        "first_token_seconds": asdict(times) if times is not None else None,
        "running": [_running(facts) for facts in (*running, *waiting)],
        "sessions": _sessions(look, last_of_branch),
        "misses": [_miss(each, shows_text) for each in misses],
        "causes": Counter(explanation.cause for explanation in explanations),
        "shows_text": shows_text,
        "speed": asdict(activity.speed()),
        "activity": {name: [astuple(each) for each in sums] for name, sums in past.sums.items()},
        "conversations": conversations(past.ended, now),
        "last": last_requests(past.ended),
        "losses": losses(past.ended),
        "kept": {"num_requests": len(past.ended), "since": past.ended[-1].ended_at if past.ended else None},
        "machine_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _running(facts: RunningFacts) -> JsonObject:
    session = session_label(facts.session) if facts.session is not None else None
    return {**asdict(facts), "session": session, "seconds": round(facts.seconds, 2)}


def _miss(explanation: Explanation, shows_text: bool) -> JsonObject:
    body = dict(explanation_body(explanation))
    place = body["first_difference"]
    if isinstance(place, dict) and not shows_text:
        body["first_difference"] = {name: value for name, value in place.items() if name not in ("before", "after")}
    return body


def _sessions(look: Look, last_of_branch: Mapping[BranchId, Explanation]) -> list[JsonObject]:
    """The sessions that were used last, newest first, each with its branches in the order in which they began."""
    shown: list[JsonObject] = []
    num_branches = 0
    for view in reversed(look.sessions):
        if len(shown) >= MAX_SESSIONS or num_branches >= MAX_BRANCHES:
            break
        num_branches += len(view.branches)
        branches = sorted(view.branches, key=lambda branch: branch.branch_id)
        shown.append(
            {
                "name": _session_name(view),
                "idle_seconds": round(look.seen_at - view.last_used, 1),
                "branches": [
                    _branch(branch, look.seen_at, last_of_branch.get(branch.branch_id)) for branch in branches
                ],
            }
        )
    return shown


def _session_name(view: SessionView) -> str:
    kind, _, name = view.key.partition(":")
    return session_label(name.partition("/")[2] or name) if kind == "id" else f"unnamed {name}"  # less its principal


def _branch(branch: Branch, seen_at: float, last: Explanation | None) -> JsonObject:
    return {
        "id": branch.branch_id,
        "parent": branch.parent_id,
        "fork_message": branch.fork_message_index,
        "fork_token": branch.fork_token_offset,
        "num_turns": branch.num_turns,
        "num_messages": branch.num_messages,
        "num_tokens": branch.num_tokens,
        "idle_seconds": round(seen_at - branch.last_used, 1),
        "last": None
        if last is None
        else {
            "request_id": last.request_id,
            "cause": last.cause,
            "tier": last.reuse.tier,
            "source": last.source,
            "num_prompt_tokens": last.num_prompt_tokens,
            "num_cached_tokens": last.num_cached_tokens,
        },
    }
