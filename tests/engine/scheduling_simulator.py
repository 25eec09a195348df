"""A machine without a model: it computes what a policy says, at the speed of a trace, and notes which laws are broken.

What the policy is measured by is computed here once more, naively: a machine that divides the time for prompts equally
among all of them, each of which computes everything itself.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from kvserve.engine.policy import (
    CHUNK_SECONDS_ALONE,
    CHUNK_SECONDS_BESIDE_STREAMS,
    MAX_OVERTAKEN,
    NUM_CANDIDATES,
    DecodeStep,
    Pause,
    PrefillChunk,
)
from tests.engine.scheduling_traces import Job, Trace

SHARE = 0.5
MIN_GAIN_TOKENS = 64
ANSWER_ALLOWANCE_TOKENS = 2048


@dataclass(slots=True, eq=False)
class SimRow:
    """A job on its way. `awaits`: a row that computes, and how many tokens of it this one begins with."""

    number: int
    job: Job
    num_known: int = 0
    num_done: int = 0
    has_begun: bool = False
    awaits: "tuple[SimRow, int] | None" = None
    num_generated: int = 0
    num_overtaken: int = 0
    work: float = 0.0
    num_computed: int = 0
    admitted_at: float = 0.0
    seconds_stood_still: float = 0.0
    seconds_beside: float = 0.0
    seconds_stepped: float = 0.0
    last_token_at: float | None = None

    @property
    def num_left(self) -> int:
        return self.job.num_tokens - 1 - self.num_done

    @property
    def room(self) -> int:
        return self.job.num_tokens + min(self.job.num_answer_tokens, ANSWER_ALLOWANCE_TOKENS)


class Policy(Protocol):
    """What decides. It is told of each thing that was done."""

    def admitted(self, machine: "Simulator") -> SimRow | None: ...
    def work(self, machine: "Simulator") -> PrefillChunk[SimRow] | DecodeStep | Pause: ...
    def entered(self, row: SimRow) -> None: ...
    def left(self, row: SimRow, *, is_cancelled: bool) -> None: ...
    def prefilled(self, num_tokens: int, seconds: float, *, is_beside_streams: bool) -> None: ...
    def stepped(self, num_rows: int, seconds: float, *, is_beside_prompts: bool) -> None: ...


@dataclass(slots=True)
class EqualShares:
    """The naive machine: seconds of work that each prompt has left there, when it was through, and how much of all
    work that took: its own and its fair share of the rest."""

    left: dict[SimRow, float] = field(default_factory=dict)
    ended_at: dict[SimRow, float] = field(default_factory=dict)
    seconds: float = 0.0
    began_at: dict[SimRow, float] = field(default_factory=dict)
    took: dict[SimRow, float] = field(default_factory=dict)

    def enter(self, row: SimRow) -> None:
        self.left[row], self.began_at[row] = row.work, self.seconds

    def advance(self, now: float, seconds: float) -> None:
        """Prompts are computed for `seconds` from `now` on."""
        while seconds > 1e-12 and self.left:
            part = min(seconds / len(self.left), *self.left.values())
            spent = part * len(self.left)
            now, seconds, self.seconds = now + spent, seconds - spent, self.seconds + spent
            for row in [*self.left]:
                self.left[row] -= part
                if self.left[row] <= 1e-9:
                    del self.left[row]
                    self.ended_at[row], self.took[row] = now, self.seconds - self.began_at[row]

    def leave(self, row: SimRow, seconds_computed: float) -> None:
        """A client left: no more was to be done for it than was done."""
        if row in self.left:
            self.left[row] = min(self.left[row], max(0.0, seconds_computed - (row.work - self.left[row])))
            if not self.left[row]:
                del self.left[row]

    def rank(self, row: SimRow) -> tuple[float, float]:
        """Rows in the order in which they are through."""
        return self.left.get(row, 0.0), self.ended_at.get(row, 0.0)


class Simulator:
    """Runs one trace with one policy. `broken` counts the laws that did not hold."""

    def __init__(self, trace: Trace, policy: Policy) -> None:
        self.trace = trace
        self.now = 0.0
        self.waiting: list[SimRow] = []
        self.prompts: list[SimRow] = []
        self.streams: list[SimRow] = []
        self.broken: Counter[str] = Counter()
        self.num_first_tokens = 0
        self._policy = policy
        self._coming = [SimRow(number, job) for number, job in enumerate(trace.jobs)]
        self._known: dict[tuple[str, ...], int] = {}
        self._equal = EqualShares()
        self._has_changed = False
        self._pending_seconds = self._prompt_seconds = 0.0

    def run(self) -> Counter[str]:
        """Play the whole trace; the laws that were broken, and how often."""
        while self._coming or self.waiting or self.prompts or self.streams:
            self._arrive()
            self._leave()
            self._admit()
            self._look_whom_they_await()
            self._do(self._policy.work(self))
            if not self.prompts and not self.waiting:
                self._stream_on()
        return self.broken

    def fits(self, row: SimRow) -> bool:
        """Whether there is room for a row that waits."""
        inside = [*self.prompts, *self.streams]
        has_place = len(inside) < self.trace.max_rows
        return has_place and (not inside or sum(each.room for each in (*inside, row)) <= self.trace.max_tokens)

    def num_known(self, row: SimRow) -> int:
        """How many tokens of a row's prompt somebody has computed."""
        found, path = 0, list[str]()
        for name, length in row.job.prompt:
            path.append(name)
            known = self._known.get(tuple(path), 0)
            found += known
            if known < length:
                break
        return min(found, row.job.num_tokens - 1)

    # --- who is there ---------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if not (self.waiting or self.prompts or self.streams) and self._coming:
            self._pass(max(0.0, self._coming[0].job.at - self.now))
        while self._coming and self._coming[0].job.at <= self.now:
            self.waiting.append(self._coming.pop(0))
            self._has_changed = True

    def _leave(self) -> None:
        for rows in (self.waiting, self.prompts, self.streams):
            for row in [row for row in rows if row.job.leaves_at is not None and row.job.leaves_at <= self.now]:
                rows.remove(row)
                self._has_changed = True
                if rows is not self.waiting:
                    self._policy.left(row, is_cancelled=rows is self.prompts)
                    self._equal.leave(row, row.num_computed / self.trace.tokens_per_second)

    def _admit(self) -> None:
        if not self._has_changed:
            return
        self._has_changed = False
        while (row := self._policy.admitted(self)) is not None:
            self.waiting.remove(row)
            for other in self.waiting:
                if other.job.at < row.job.at:
                    other.num_overtaken += 1
                    self._expect("overtaken", other.num_overtaken <= MAX_OVERTAKEN)
            row.num_known = row.num_done = self.num_known(row)
            row.admitted_at = self.now
            row.work = row.num_left / self.trace.tokens_per_second
            self._equal.enter(row)
            self.prompts.append(row)
            self._policy.entered(row)
        is_closed = any(row.num_overtaken >= MAX_OVERTAKEN for row in self.waiting)
        is_closed |= len(self.waiting) > NUM_CANDIDATES
        self._expect("room", is_closed or not any(map(self.fits, self.waiting)))

    def _look_whom_they_await(self) -> None:
        for row in self.prompts:
            if row.has_begun or self._goes_on_waiting(row):
                continue
            known = self.num_known(row)
            waits = [(other, num_common(row.job, other.job)) for other in self.prompts if other.has_begun]
            waits = [(other, num) for other, num in waits if num > other.num_done and num - known >= MIN_GAIN_TOKENS]
            row.awaits = max(waits, key=lambda wait: wait[1], default=None)
            row.num_done = known
            row.has_begun = row.awaits is None

    def _goes_on_waiting(self, row: SimRow) -> bool:
        return row.awaits is not None and row.awaits[0] in self.prompts and row.awaits[0].num_done < row.awaits[1]

    # --- what is computed -----------------------------------------------------------------------------------------

    def _do(self, work: PrefillChunk[SimRow] | DecodeStep | Pause) -> None:
        if isinstance(work, PrefillChunk):
            self._prefill(work.row, work.seconds)
        elif isinstance(work, DecodeStep):
            self._step()
        else:
            assert not self.prompts and not self.streams, "a policy that pauses beside rows that could compute"

    def _prefill(self, row: SimRow, seconds: float) -> None:
        stops = [num for other in self.prompts if other.awaits and other.awaits[0] is row for num in [other.awaits[1]]]
        most = max(16, int(seconds * self.trace.tokens_per_second))
        num_tokens = min(most, row.num_left, *(stop - row.num_done for stop in stops if stop > row.num_done))
        took = num_tokens / self.trace.tokens_per_second
        self._look_who_stands_still(row, took)
        is_beside_streams = any(each.num_generated for each in self.streams)
        row.num_done += num_tokens
        row.num_computed += num_tokens
        self._know(row)
        self._equal.advance(self.now, took)
        self._prompt_seconds += took
        self._pass(took)
        self._policy.prefilled(num_tokens, took, is_beside_streams=is_beside_streams)
        if not row.num_left:
            self.prompts.remove(row)
            self.streams.append(row)

    def _step(self) -> None:
        took = self._step_seconds()
        for row in self.streams:
            row.seconds_stepped += took
        self._pass(took)
        self._policy.stepped(len(self.streams), took, is_beside_prompts=bool(self.prompts))
        for row in [*self.streams]:
            self._token(row, took)
        if not self.prompts:
            for row in self.streams:
                row.seconds_beside = row.seconds_stepped = 0.0

    def _stream_on(self) -> None:
        """The same many times over, up to the next thing that happens: nobody has anything to decide."""
        took = self._step_seconds()
        leaving = [row.job.leaves_at for row in self.streams if row.job.leaves_at is not None]
        until = min([*(job.job.at for job in self._coming[:1]), *leaving], default=float("inf"))
        num_steps = min((row.job.num_answer_tokens - row.num_generated for row in self.streams), default=0) - 1
        num_steps = min(num_steps, int((until - self.now) / took) if until < float("inf") else num_steps)
        if num_steps > 0 and all(row.num_generated for row in self.streams):
            self.now += num_steps * took
            for row in self.streams:
                row.num_generated += num_steps
                row.last_token_at = self.now

    def _token(self, row: SimRow, took: float) -> None:
        if not row.num_generated:
            self.num_first_tokens += 1
            slack = CHUNK_SECONDS_ALONE + CHUNK_SECONDS_BESIDE_STREAMS + 3 * took
            self._expect("first token", self.now <= self._equal.ended_at.get(row, self.now) + slack)
            took_there = self._equal.took.get(row, self._equal.seconds - self._equal.began_at[row])
            self._expect("first token", self.now - row.admitted_at <= 2 * took_there + slack)
            row.seconds_beside = row.seconds_stepped = 0.0
        if row.last_token_at is not None:
            gap = self.now - row.last_token_at
            self._expect("pace", gap <= CHUNK_SECONDS_BESIDE_STREAMS + 3 * took)
        row.last_token_at = self.now
        row.num_generated += 1
        if row.num_generated >= row.job.num_answer_tokens:
            self.streams.remove(row)
            self._has_changed = True
            self._policy.left(row, is_cancelled=False)

    def _pass(self, seconds: float) -> None:
        """Time goes by: streams and prompts that are there together share it."""
        self.now += seconds
        slack = CHUNK_SECONDS_BESIDE_STREAMS + 2 * self._step_seconds()
        for row in self.streams:
            if row.num_generated:
                row.seconds_beside += seconds
                self._expect("pace", SHARE * row.seconds_beside - row.seconds_stepped <= slack)
        if self.prompts:
            self._pending_seconds += seconds
            self._expect("prompts", (1 - SHARE) * self._pending_seconds - self._prompt_seconds <= slack)
        else:
            self._pending_seconds = self._prompt_seconds = 0.0
            self._equal.left.clear()

    def _step_seconds(self) -> float:
        return self.trace.step_seconds + self.trace.row_seconds * len(self.streams)

    def _look_who_stands_still(self, row: SimRow, seconds: float) -> None:
        """Rows that wait for another one than that which computes, though this one is less urgent than they."""
        served = [row, *(each for each in self.prompts if each.awaits and each.awaits[0] is row)]
        urgency = min(map(self._equal.rank, served))
        for other in self.prompts:
            if other.awaits is not None and other.awaits[0] is not row and self._equal.rank(other) < urgency:
                other.seconds_stood_still += seconds
                is_short = other.seconds_stood_still <= CHUNK_SECONDS_ALONE + CHUNK_SECONDS_BESIDE_STREAMS
                self._expect("waits for what stands still", is_short)

    def _know(self, row: SimRow) -> None:
        left, path = row.num_done, list[str]()
        for name, length in row.job.prompt:
            path.append(name)
            known = min(left, length)
            self._known[tuple(path)] = max(self._known.get(tuple(path), 0), known)
            left -= known

    def _expect(self, law: str, holds: bool) -> None:
        if not holds:
            self.broken[law] += 1


def num_common(one: Job, other: Job) -> int:
    """How many tokens two prompts begin with; neither computes its last one."""
    found = 0
    for (name, length), (its_name, _) in zip(one.prompt, other.prompt, strict=False):
        if name != its_name:
            break
        found += length
    return min(found, one.num_tokens - 1, other.num_tokens - 1)
