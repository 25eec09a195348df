"""A Redis server that is shared with others, and the two threads that speak to it, so that nobody else ever waits for a
network longer than it wants to.

    asks   looks and reads of rows that wait: one step of each after the other, on a connection of their own
    puts   what is sent, forgotten and heard; probes a server that was gone

A failure ends what was asked, and opens the breaker: until a probe succeeds nothing more is asked. Both threads begin
with `start`.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from kvserve.remote.rates import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, MIN_MEASURED_BYTES, Breaker, Rates
from kvserve.remote.redis_link import Command, Link, LinkFailed, LinkRefusal

PROBE_SECONDS = 5.0
PROBE_TTL_SECONDS = 10
MEASURE_SECONDS = 30.0
PROBE_BYTES = MIN_MEASURED_BYTES
ASK_SECONDS, PUT_SECONDS = 1.0, 5.0
"""So long a server may be silent: to those for whom rows wait, and to those for whom nobody does."""

HEAR_SECONDS = 2.0
"""So often what others have forgotten is asked for."""

IDLE_SECONDS = 0.5
BUSY_SECONDS = 0.05
SLOW_PART_BYTES = 3 * 2**20
"""A step reads a part of 1 MiB at least: where that takes long, three times as long is no silence."""

HUNG_SHARE = 0.9
"""A row begins to wait a moment before its step begins."""

GONE_SECONDS = 2.0
"""So long somebody waits for a server that did not answer last."""

FULL_SECONDS = 30.0
"""A server without room is left alone for so long; what it has is read."""

MAX_ALTERED = 4096
"""So many names of blobs with another checksum are remembered."""

type Steps = Iterator[float]
"""Work in steps; each gives the seconds until the next one may come. Others go between two steps."""

SharedFault = Literal[
    "unreachable", "refused", "full", "timed_out", "strange", "damaged", "missing", "not_forgotten", "crashed"
]
SharedState = Literal["connecting", "up", "full", "lying", "down", "forgetting"]
"""`forgetting`: what is to be gone is not gone there yet, and nothing else is asked."""

_WHAT: Mapping[SharedFault, str] = {
    "unreachable": "The shared cache cannot be reached; prompts are computed here",
    "refused": "The shared cache refuses us; prompts are computed here",
    "full": "The shared cache has no room; nothing is sent until it has",
    "timed_out": "The shared cache did not answer in time; prompts are computed here",
    "strange": "The shared cache gave an answer that is not understood",
    "damaged": "KV from the shared cache was damaged and is computed here",
    "missing": "KV went from the shared cache while it was read and is computed here",
    "not_forgotten": "Whom another server was told to forget may still be in files here",
    "crashed": "Work on the shared cache failed",
}


@dataclass(eq=False, slots=True)
class Task:
    """Steps and what is told at their end, however that comes. `ready_at`: when the next step may come. `is_urgent`:
    that goes before the steps of others."""

    steps: Steps
    end: Callable[[], None] = lambda: None
    ready_at: float = 0.0
    is_urgent: bool = False


class SharedServer:
    """`place` is what may be shown of the address. `make_link` makes a connection that may be silent for so many
    seconds; each thread has one. Any thread may call any method."""

    def __init__(self, place: str, make_link: Callable[[float], Link], report: Callable[[str], None]) -> None:
        self.place = place
        self.rates = Rates()
        self.breaker = Breaker()
        self.asks_link, self.puts_link = make_link(ASK_SECONDS), make_link(PUT_SECONDS)
        self.hear: Callable[[], None] = lambda: None
        self._report = report
        self._faults: Counter[SharedFault] = Counter()
        self._told: set[SharedFault] = set()
        self._wake = threading.Condition()
        self._asks: deque[Task] = deque()
        self._urgent: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._urgent_at, self._urgent_pause_seconds = 0.0, FIRST_PAUSE_SECONDS
        self._is_urgent_failing = False
        self._altered: set[str] = set()
        self._put: Callable[[], Task | None] = lambda: None
        self._putting: Task | None = None
        self._num_pauses = 0
        self._is_putting_void = self._is_measure_wanted = False
        self._hear_at = self._measure_at = self._full_until = 0.0
        self._is_closing = self._has_probed = False
        self._step_began_at: float | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"kvserve-remote-{name}", daemon=True)
            for name, step in (("asks", self._ask_step), ("puts", self._put_step))
        ]

    def start(self, next_put: Callable[[], Task | None]) -> None:
        """Begin; `next_put` gives what is to be sent next, if anything."""
        self._put = next_put
        for thread in self._threads:
            thread.start()

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether anything may be asked of the server now: not before what is to be gone is gone there."""
        return self.breaker.is_closed and not (self._num_pauses or self._urgent or self._is_closing)

    @property
    def state(self) -> SharedState:
        if self.breaker.is_lying:
            return "lying"
        if not self.breaker.is_closed:
            return "down" if self._has_probed else "connecting"
        if self._urgent:
            return "forgetting"
        return "full" if self.is_full else "up"

    @property
    def is_full(self) -> bool:
        """Whether nothing is sent for a while."""
        return time.monotonic() < self._full_until

    def ask(self, task: Task) -> None:
        """Have the asks thread do this, in turn with others."""
        with self._wake:
            self._asks.appendleft(task)  # a look goes between two steps of what is read
            self._wake.notify_all()

    def first(self, work: Callable[[], None], seconds: float) -> bool:
        """Have the puts thread do this before all else, as soon as the server is there, and again where that fails;
        whether it is done after so long."""
        is_done = threading.Event()
        seconds = seconds if self.breaker.is_closed else min(seconds, GONE_SECONDS)
        with self._wake:
            self._urgent.append((work, is_done))
            self._urgent_at = 0.0
            self._wake.notify_all()
        return is_done.wait(seconds)

    def measure(self) -> None:
        """What was measured speaks against it: have it measured again, not too often."""
        self._is_measure_wanted = True

    def hear_soon(self) -> None:
        """Have what others forgot asked for before anything else is sent. On the puts thread."""
        self._hear_at = 0.0

    def nudge(self) -> None:
        """Have the puts thread look for work."""
        with self._wake:
            self._wake.notify_all()

    def hang_up(self, silent_seconds: float) -> None:
        """Where the asks thread has waited for an answer for so long: end that, and ask nothing more for a while."""
        now, began_at = time.monotonic(), self._step_began_at
        part_seconds = SLOW_PART_BYTES / rate if (rate := self.rates.read_bytes_per_second) else 0.0
        if began_at is not None and now - began_at >= max(HUNG_SHARE * silent_seconds, part_seconds):
            self.breaker.failed(now)
            self.note("timed_out", f"no answer for {silent_seconds:g} s")
            self.asks_link.hang_up()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is looked for, read or sent within the block, but what is `first`."""
        with self._wake:
            self._num_pauses += 1
            self._is_putting_void = True
        try:
            yield
        finally:
            with self._wake:
                self._num_pauses -= 1
                self._wake.notify_all()

    def note(self, fault: SharedFault, reason: object) -> None:
        """Count a fault; report the first of its kind."""
        with self._wake:
            self._faults[fault] += 1
            is_first = fault not in self._told
            self._told.add(fault)
        if is_first:
            self._report(f"{_WHAT[fault]} ({self.place}: {reason}). Counted in GET /v1/cache; not told again.")

    def survived[T](self, work: Callable[[], T], otherwise: T) -> T:
        """What this gives; where it fails by itself that is counted. Raises LinkFailed."""
        try:
            return work()
        except LinkFailed:
            raise
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever a server says
            self.note("crashed", f"{type(error).__name__}: {error}")
            return otherwise

    def lied(self, reason: object) -> None:
        """Note a blob that is not what its name says."""
        self.note("damaged", reason)
        self.breaker.lied(time.monotonic())

    def is_altered(self, name: str, reason: object) -> None:
        """Note a blob with another checksum. Two servers that send one at the same time can leave parts of both; where
        it was removed and comes again that is a lie."""
        with self._wake:
            is_lie = name in self._altered
            if len(self._altered) >= MAX_ALTERED:
                self._altered.clear()
            self._altered.add(name)
        if is_lie:
            self.lied(reason)
        else:
            self.note("damaged", reason)

    def is_refused(self, refusal: LinkRefusal) -> None:
        """Note that the server refused a command; a full one is left alone for a while."""
        if refusal.kind == "full":
            self.fill(refusal)
        else:
            self.note(refusal.kind, refusal)

    def fill(self, reason: object) -> None:
        """Note that there is no room: nothing is sent for a while."""
        self.note("full", reason)
        self._full_until = time.monotonic() + FULL_SECONDS

    def faults(self) -> dict[str, int]:
        with self._wake:
            return {str(fault): count for fault, count in self._faults.items()}

    @property
    def is_putting(self) -> bool:
        """Whether something is being sent, or forgotten."""
        return self._putting is not None or bool(self._urgent)

    def close(self) -> None:
        """End both threads; what is asked or sent at the moment is broken off."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        for link in (self.asks_link, self.puts_link):
            link.hang_up()
        for thread in self._threads:
            if thread.ident is not None:  # a start that failed did not come so far
                thread.join(1.0)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _run(self, step: Callable[[], float]) -> None:
        while not self._is_closing:
            try:
                seconds = self.survived(step, IDLE_SECONDS)
            except LinkFailed as error:
                self._has_failed(error)
                seconds = 0.0
            if seconds > 0:
                with self._wake:
                    if not self._is_closing and not self._has_work(step):
                        self._wake.wait(seconds)

    def _has_work(self, step: Callable[[], float]) -> bool:
        """Whether something came between the step and the wait."""
        now = time.monotonic()
        return any(task.ready_at <= now for task in self._asks) if step == self._ask_step else False

    def _has_failed(self, error: LinkFailed) -> None:
        self.breaker.failed(time.monotonic())
        self._has_probed = True
        self.note(error.kind, error)

    def _ask_step(self) -> float:
        """One step of one task. Gives the seconds until there may be another."""
        now = time.monotonic()
        with self._wake:
            ready = [task for task in self._asks if task.ready_at <= now or not self.is_open]
            if not ready:
                return min((task.ready_at - now for task in self._asks), default=IDLE_SECONDS)
            task = ready[0]
            self._asks.remove(task)
        if not self.is_open:
            task.end()
            return 0.0
        self._step_began_at = now
        try:
            self._advance(task, self._asks.appendleft if task.is_urgent else self._asks.append)
        finally:
            self._step_began_at = None
        return 0.0

    def _put_step(self) -> float:
        now = time.monotonic()
        if not self.breaker.is_closed:
            if not self.breaker.is_due(now):
                return min(IDLE_SECONDS, self.breaker.seconds_to_probe(now))
            self._probe()
        if self._urgent:
            return self._do_urgent(now)
        if self._num_pauses:
            return BUSY_SECONDS
        if self._is_measure_wanted and now >= self._measure_at:
            self._measure()
        elif now >= self._hear_at:
            self._hear_at = now + HEAR_SECONDS
            self.hear()
        else:
            return self._put_next()
        return 0.0

    def _do_urgent(self, now: float) -> float:
        """What fails stays the first, and nothing is sent before it; it has pauses of its own, as a server that refuses
        it may answer all else."""
        if now < self._urgent_at:
            return min(IDLE_SECONDS, self._urgent_at - now)
        work, is_done = self._urgent[0]
        self._is_urgent_failing = True
        self._urgent_at = now + self._urgent_pause_seconds  # whoever asks for more meanwhile has it tried at once
        self._urgent_pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._urgent_pause_seconds)
        work()
        self._is_urgent_failing = False
        self._urgent_at, self._urgent_pause_seconds = 0.0, FIRST_PAUSE_SECONDS
        self._urgent.popleft()
        is_done.set()
        self._comes_back()
        return 0.0

    def _put_next(self) -> float:
        if self._is_putting_void or self.is_full:  # it may be of somebody who was forgotten meanwhile
            self._putting, self._is_putting_void = None, False
        task = None if self.is_full else self._putting or self._put()
        self._putting = None
        if task is None:
            return BUSY_SECONDS
        self._advance(task, self._keep_putting)
        if self._putting is None:
            self.hear_soon()  # what others forgot while it was sent is looked at again
        return 0.0

    def _keep_putting(self, task: Task) -> None:
        self._putting = task

    def _advance(self, task: Task, again: Callable[[Task], None]) -> None:
        seconds = None
        try:
            seconds = next(task.steps, None)
        finally:
            if seconds is None:
                task.end()
        if seconds is not None:
            task.ready_at = time.monotonic() + seconds
            with self._wake:
                again(task)

    def _probe(self) -> None:
        """Speak to a server that was gone, or never there, and measure it. Raises LinkFailed."""
        self.puts_link.run([("PING",)], time.monotonic() + PROBE_SECONDS)
        self._measure()
        self.hear_soon()  # others may have heard long ago what was told while we were away
        self.breaker.succeeded()
        self._has_probed = True
        self._comes_back()

    def _measure(self) -> None:
        """Measure anew: the way there may be another one by now. Raises LinkFailed."""
        self._measure_at, self._is_measure_wanted = time.monotonic() + MEASURE_SECONDS, False
        key, found = f"kvs1:probe:{id(self)}", Rates()
        found.exchanged(self._timed(("PING",)))
        found.was_written(PROBE_BYTES, self._timed(("SET", key, bytes(PROBE_BYTES), "EX", PROBE_TTL_SECONDS)))
        found.was_read(PROBE_BYTES, self._timed(("GET", key)))
        self._timed(("UNLINK", key))
        self.rates.take(found)

    def _timed(self, command: Command) -> float:
        started = time.perf_counter()
        self.puts_link.run([command], time.monotonic() + PROBE_SECONDS)
        return time.perf_counter() - started

    def _comes_back(self) -> None:
        """Say that it answers again, but not while it fails at what is to be gone: that would be said at each try."""
        if self._is_urgent_failing:
            return
        with self._wake:
            was_told = not self._told.isdisjoint(("unreachable", "timed_out", "refused"))
            self._told -= {"unreachable", "timed_out", "refused"}
        if was_told:
            self._report(f"The shared cache at {self.place} answers again.")
