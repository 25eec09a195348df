"""Computes the KV of prefixes while no request runs or waits, one short chunk at a time.

    waiting -> restored from RAM and disk -> prefilled -> kept in the tree        only its handle hears of it
        ^-------- a request came: what was computed is kept, the rest is computed later

Everything here belongs to the engine thread.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from kvserve.cache.checkpoints import Stop, last_cut
from kvserve.cache.token_run import image_around, pack
from kvserve.engine.admission import Budget
from kvserve.engine.borders import described
from kvserve.engine.cache_records import LONG_ROW_TOKENS, CacheLease
from kvserve.engine.model import LoadedModel
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.prefill import ChunkLength, Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.token_dispatcher import Delivery
from kvserve.engine.warming import (
    TimeShare,
    Warming,
    WarmKind,
    WarmReport,
    WarmResult,
    WarmSettings,
    WarmState,
)

MAX_JOBS = 64
NO_ROOM = "no room"
"""Why a guess was dropped: what was used before would have had to leave for it."""

RANKS: Mapping[WarmKind, int] = {"prewarm": 0, "next_turn": 1, "learned": 2}
"""Who comes first: a client waits for the first, a session's next request may come at any moment."""


@dataclass(slots=True, eq=False)
class _Task:
    """A job with what was done for it so far."""

    warming: Warming
    num_cached_tokens: int | None = None
    num_computed_tokens: int = 0
    seconds: float = 0.0
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class _ActiveTask:
    """A task that is worked on: until it is put down it holds KV as a row would. `[counted, num_done)` of its prefill
    was computed and not counted yet."""

    task: _Task
    row: Row
    pinned: PinnedPrefix
    prefill: Prefill | None = None
    end: int = 0
    counted: int = 0


class Warmer:
    """The jobs of one model, each worked on alone."""

    def __init__(
        self,
        model: LoadedModel,
        budget: Budget,
        cache: PrefixCache,
        chunk_length: ChunkLength,
        settings: WarmSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk_length` is the scheduler's: what one learns of the model's speed serves the other."""
        self._model = model
        self._budget = budget
        self._cache = cache
        self._chunk_length = chunk_length
        self._settings = settings
        self._clock = clock
        self._share = TimeShare(settings.time_share, clock)
        self._waiting: list[_Task] = []
        self._active: _ActiveTask | None = None
        self._quiet_until = 0.0
        self._ended: dict[WarmState, int] = {"done": 0, "dropped": 0, "failed": 0}
        self._seconds = 0.0

    # --- what the scheduler asks --------------------------------------------------------------------------------------

    def add(self, warming: Warming) -> None:
        """Take a job, or refuse it at once where it can never be computed."""
        task = _Task(warming)
        reason = self._refusal(warming)
        if reason is not None:
            self._end(task, "dropped", reason)
            return
        with self._job_fails_alone(task):
            self._replace(task)
        if task.has_failed:
            return
        self._waiting.append(task)
        if self._active is not None and RANKS[warming.job.kind] < RANKS[self._active.task.warming.job.kind]:
            self.pause()
        if len(self._waiting) > MAX_JOBS:
            oldest = max(self._waiting, key=lambda each: RANKS[each.warming.job.kind])  # of equals the first
            self._drop([oldest], "full")

    def note_busy(self) -> None:
        """Note that rows compute."""
        self._quiet_until = self._clock() + self._settings.grace_seconds

    def pause(self) -> None:
        """Keep what was computed so far and let go of everything: a row comes."""
        if (active := self._active) is None:
            return
        with self._job_fails_alone(active.task):
            self._put_down(active)
        if not active.task.has_failed:
            self._waiting.insert(0, active.task)

    def drop_all(self, reason: str) -> None:
        """End every job; what was computed and can be kept is kept."""
        self.pause()
        self._drop(list(self._waiting), reason)

    def forget(self, is_forgotten: Callable[[str], bool]) -> None:
        """End the jobs of these owners, and those without a known owner; what was computed for them is forgotten."""
        self.pause()
        owned = ((task, task.warming.job.owner) for task in self._waiting)
        self._drop([task for task, owner in owned if not owner or is_forgotten(owner)], "forgotten")

    def step(self) -> bool:
        """Do one short piece of work, where there is any to be done now. Whether there was."""
        if self._clock() < self._quiet_until:
            return False
        self._drop_cancelled()
        if self._active is None:
            self._begin_next()
        if (active := self._active) is None:
            return False
        started = self._clock()
        with self._job_fails_alone(active.task):
            is_over = self._advance(active)
            self._account(active.task, self._clock() - started)
            if is_over:
                self._finish(active)
        if active.task.has_failed:
            self._let_go(active)
        if self._active is active and not self._is_due(active.task):
            self.pause()
        return True

    def seconds_until_due(self) -> float | None:
        """How long an idle engine may sleep before it looks again; None: as long as it likes."""
        tasks = [self._active.task] if self._active is not None else self._waiting
        waits = [self._share.seconds_until_due() if _is_own_idea(task) else 0.0 for task in tasks]
        return max(min(waits), self._quiet_until - self._clock(), 0.0) if waits else None

    def live_bytes(self) -> float:
        """What the prefix that is computed now holds."""
        if self._active is None or self._active.prefill is None:
            return 0.0
        return self._model.sizes.peak(self._active.row.num_tokens)

    def report(self) -> WarmReport:
        """What became of the jobs. While no client waits for a token it is checked what was evicted meanwhile."""
        if self._clock() >= self._quiet_until:
            self._cache.warmed.look()
        num_waiting = len(self._waiting) + (self._active is not None)
        ended = self._ended
        return WarmReport(
            self._cache.warmed.totals(), num_waiting, ended["done"], ended["dropped"], ended["failed"], self._seconds
        )

    # --- which one ----------------------------------------------------------------------------------------------------

    def _refusal(self, warming: Warming) -> str | None:
        """Why a job can never be computed."""
        num_tokens = len(warming.job.tokens)
        if not self._model.cache_support.can_keep:
            return "no cache"
        if not num_tokens:
            return "empty"
        if num_tokens >= self._model.context_limit or not self._budget.can_ever_hold(num_tokens + 1):
            return "too long"
        return "budget" if not self._share.is_open and warming.job.kind != "prewarm" else None

    def _replace(self, task: _Task) -> None:
        """Let a job take the place of an earlier one for the same next request."""
        key = task.warming.job.key
        if key is None:
            return
        if self._active is not None and self._active.task.warming.job.key == key:
            self.pause()
        self._drop([old for old in self._waiting if old.warming.job.key == key], "replaced")
        run = pack(task.warming.job.tokens)
        chain = self._cache.hasher.start(task.warming.job.partition)
        self._cache.warmed.replace(key, run, chain.extended(run))

    def _drop_cancelled(self) -> None:
        if self._active is not None and self._active.task.warming.is_cancelled:
            self.pause()
        self._drop([task for task in self._waiting if task.warming.is_cancelled], "cancelled")

    def _drop(self, tasks: Sequence[_Task], reason: str) -> None:
        """End tasks that wait."""
        for task in tasks:
            self._waiting.remove(task)
            self._end(task, "dropped", reason)

    def _begin_next(self) -> None:
        """Work on the first of those that may be worked on; of sessions the one that was heard of last."""
        due = [task for task in self._waiting if self._is_due(task)]
        if not due:
            return
        rank = min(RANKS[task.warming.job.kind] for task in due)
        of_rank = [task for task in due if RANKS[task.warming.job.kind] == rank]
        task = of_rank[-1] if rank == RANKS["next_turn"] else of_rank[0]
        self._waiting.remove(task)
        row = Row(RequestHandle(task.warming.job.as_request(), _to_nobody), _nothing)
        room_bytes = self._room_bytes(row) if _is_own_idea(task) else math.inf
        if room_bytes <= 0:
            self._end(task, "dropped", NO_ROOM)
            return
        with self._job_fails_alone(task):
            self._active = _ActiveTask(task, row, self._cache.pin(row, room_bytes, is_guess=_is_own_idea(task)))

    def _room_bytes(self, row: Row) -> float:
        """How much the disk may bring back for a guess; 0 where KV that a request used would be evicted for it: its
        live row and all that RAM has not must fit beside what there is."""
        sizes, room = self._model.sizes, self._cache.kv_room.left()
        live_bytes = self._budget.peak_bytes(row.num_tokens)
        num_known = self._cache.kept_tokens(row.request.prompt, [row.request.partition])[0]
        num_bytes = live_bytes + sizes.kept(num_known, row.num_tokens)
        return room.num_bytes - live_bytes if room.fits(num_bytes, sizes.fixed) else 0.0

    def _is_due(self, task: _Task) -> bool:
        return not _is_own_idea(task) or self._share.seconds_until_due() <= 0

    # --- computing ----------------------------------------------------------------------------------------------------

    def _advance(self, active: _ActiveTask) -> bool:
        """Wait for the disk, enter, or compute a chunk. Whether all is there then."""
        if (prefill := active.prefill) is None:
            if self._cache.is_restoring(active.pinned):
                self._cache.await_disk()
                return False
            prefill = active.prefill = self._entered(active)
        elif prefill.num_done < active.end:
            num_tokens = prefill.step(self._model, self._chunk_length, self._settings.chunk_seconds)
            active.task.num_computed_tokens += num_tokens
            self._cache.measured_prefill(self._chunk_length.tokens_per_second)
            if prefill.cache_lease.may_evict or self._has_room_to_stop(active, prefill):
                self._cache.keep(prefill.cache_lease, prefill.caches, prefill.num_done)
        return prefill.num_done >= active.end

    def _has_room_to_stop(self, active: _ActiveTask, prefill: Prefill) -> bool:
        """Whether a guess that keeps its state here can keep its end too."""
        sizes = self._model.sizes
        num_bytes = sizes.kept(prefill.cache_lease.lease.num_tokens, active.end) + sizes.fixed
        return self._cache.kv_room.left().fits(num_bytes, 2 * sizes.fixed)

    def _entered(self, active: _ActiveTask) -> Prefill:
        images = self._model.images(active.row.request)
        may_evict = not _is_own_idea(active.task)
        if may_evict:
            self._cache.make_room(self._budget.peak_bytes(active.row.num_tokens))
        cache_lease, caches, num_done = self._cache.enter(active.row, is_ahead=True, is_guess=not may_evict)
        cache_lease.may_evict = may_evict
        self._cache.let_go(active.pinned)
        active.counted = num_done
        task = active.task
        if task.num_cached_tokens is None:
            task.num_cached_tokens = num_done
        most = self._most_tokens(task) - task.num_computed_tokens
        active.end = min(len(task.warming.job.tokens), num_done + max(0, most))
        if (image := image_around(task.warming.job.tokens.images, active.end)) is not None:
            active.end = image.end
        active.end = max(num_done, last_cut(active.end, self._cache.cut_tokens))
        if cache_lease.stop_at(active.end) is None:
            cache_lease.add_stop(Stop(active.end, "stride"))
        return Prefill(active.row, cache_lease, caches, num_done, images=images)

    def _most_tokens(self, task: _Task) -> int:
        job = task.warming.job
        if job.max_tokens is not None:
            return job.max_tokens
        return self._settings.max_tokens if _is_own_idea(task) else len(job.tokens)

    def _finish(self, active: _ActiveTask) -> None:
        self._put_down(active)
        if active.row.num_tokens >= LONG_ROW_TOKENS:
            mx.clear_cache()
        is_kept = active.prefill is None or active.prefill.cache_lease.lease.num_tokens >= active.end
        is_whole = active.end >= last_cut(len(active.task.warming.job.tokens), self._cache.cut_tokens)
        reason = ("" if is_whole else "budget") if is_kept else NO_ROOM
        self._end(active.task, "dropped" if reason else "done", reason)

    @contextmanager
    def _job_fails_alone(self, task: _Task) -> Iterator[None]:
        """Work for one job: where it raises, the job has failed and is not tried again."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the rows that compute, or come, have nothing to do with it
            task.has_failed = True
            self._end(task, "failed", described(error))

    def _let_go(self, active: _ActiveTask) -> None:
        """Of a job that has failed: leave what was kept before, and nothing else."""
        self._active = None
        self._cache.let_go(active.pinned)
        if active.prefill is not None:
            self._cache.leave(active.prefill.cache_lease)

    def _put_down(self, active: _ActiveTask) -> None:
        """Take in all that was computed and let everything go. Raises what keeping it raises."""
        self._active = None
        self._cache.let_go(active.pinned)
        if (prefill := active.prefill) is None:
            return
        try:
            if prefill.num_done > active.counted:
                self._cache.extend(prefill.cache_lease, prefill.caches, prefill.tokens[: prefill.num_done])
                self._count_warmed(active, prefill.cache_lease)
        finally:
            self._cache.leave(prefill.cache_lease)

    # --- accounts -----------------------------------------------------------------------------------------------------

    def _count_warmed(self, active: _ActiveTask, cache_lease: CacheLease) -> None:
        """What is kept now and was not there before."""
        prompt, job, lease = active.row.request.prompt, active.task.warming.job, cache_lease.lease
        end = lease.num_tokens
        self._cache.warmed.add(prompt, cache_lease.prompt, lease.chain, active.counted, end, job.key, job.owner)

    def _account(self, task: _Task, seconds: float) -> None:
        task.seconds += seconds
        self._seconds += seconds
        if _is_own_idea(task):
            self._share.spend(seconds)

    def _end(self, task: _Task, state: WarmState, reason: str) -> None:
        self._ended[state] += 1
        num_tokens, num_cached = len(task.warming.job.tokens), task.num_cached_tokens or 0
        task.warming.end(WarmResult(state, num_tokens, num_cached, task.num_computed_tokens, task.seconds, reason))


def _is_own_idea(task: _Task) -> bool:
    """Whether no client asked for it."""
    return task.warming.job.kind != "prewarm"


def _to_nobody(deliver: Delivery, *, may_wait: bool) -> None:
    """A row that no client asked for has no reader."""


def _nothing() -> None:
    """Rows that no client asked for are not counted."""
