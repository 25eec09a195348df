"""The memory that grows with work: how it is shared out, and the one account of what each part holds and may hold.

    live              KV of running rows, with padding and the places that their caches hold ahead
    copies            what is there twice while rows enter, leave or grow: a layer at a time
    kept              KV in the prefix tree
    write_queue       what waits for the disk and is nowhere else any more
    read_ahead        what came from the disk and is not in the tree yet
    records, drafts, image_features, buffers

A share is one of what the weights leave, up to a cap; what an operator sets is taken as it is. The rest is headroom:
for what a chunk of prefill computes with, and for everybody else on the machine.

Admission, eviction, the queue of writes and reading ahead have their bounds from the plan here; `/health`, metrics and
`/v1/cache` tell what is here. The engine thread says the first two, the others are read where they are. Any thread may
ask. No arrays.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx

MIN_REST_BYTES = 2**29
"""So much is shared out where weights leave less, or nothing: a model that large has been asked for all the same."""

KV_SHARE = 5 / 8
"""KV of running rows, of rows that may come back, and copies on their way from one to the other. A row that takes half
of it can be kept beside itself."""

WRITE_QUEUE_SHARE, WRITE_QUEUE_CAP = 1 / 16, 2**30
READ_AHEAD_SHARE, READ_AHEAD_CAP = 1 / 32, 2**29
RECORDS_SHARE, RECORDS_CAP = 1 / 32, 2**29
DRAFTS_SHARE, DRAFTS_CAP = 1 / 64, 2**28
IMAGE_FEATURES_SHARE, IMAGE_FEATURES_CAP = 1 / 32, 2**29
BUFFERS_SHARE, BUFFERS_CAP = 1 / 16, 2**31
"""Freed buffers that MLX holds for the next step: a chunk of prefill needs the same sizes again."""


@dataclass(frozen=True, slots=True)
class WantedMemory:
    """What the operator decides; None leaves it to the machine. `has_drafts`: next tokens may be drafted."""

    kv_bytes: int | None = None
    batch_bytes: int | None = None
    records_bytes: int | None = None
    image_feature_bytes: int | None = None
    has_drafts: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that each account may hold. `kv_bytes` is for what is kept, running rows counted first; `batch_bytes` for
    the rows that run, at their peak. `draft` is what the draft model's KV may take besides, if there is one."""

    kv_bytes: int
    batch_bytes: int
    write_queue_bytes: int
    read_ahead_bytes: int
    records_bytes: int
    draft_bytes: int
    image_feature_bytes: int
    buffer_bytes: int
    draft: "MemoryPlan | None" = None

    @property
    def pool_bytes(self) -> int:
        """The most that all KV in memory takes: of running rows, kept, and on its way."""
        return max(self.kv_bytes, self.batch_bytes)

    @property
    def all_pool_bytes(self) -> int:
        """The same with the KV of the draft model."""
        return self.pool_bytes + (self.draft.pool_bytes if self.draft is not None else 0)

    @property
    def total_bytes(self) -> int:
        """All accounts together."""
        on_its_way = self.write_queue_bytes + self.read_ahead_bytes
        beside = on_its_way + self.records_bytes + self.draft_bytes + self.image_feature_bytes
        drafts = self.draft.total_bytes if self.draft is not None else 0
        return self.pool_bytes + beside + self.buffer_bytes + drafts

    def with_draft(self, share: float) -> "MemoryPlan":
        """The same memory, of whose KV a draft model has this share."""
        shared = (self.kv_bytes, self.batch_bytes, self.write_queue_bytes, self.read_ahead_bytes)
        kv_bytes, batch_bytes, queue_bytes, ahead_bytes = (int(share * num_bytes) for num_bytes in shared)
        return replace(
            self,
            kv_bytes=self.kv_bytes - kv_bytes,
            batch_bytes=self.batch_bytes - batch_bytes,
            write_queue_bytes=self.write_queue_bytes - queue_bytes,
            read_ahead_bytes=self.read_ahead_bytes - ahead_bytes,
            draft=MemoryPlan(kv_bytes, batch_bytes, queue_bytes, ahead_bytes, 0, 0, 0, 0),
        )


def plan_memory(memory_bytes: int, weight_bytes: int, wanted: WantedMemory = WantedMemory()) -> MemoryPlan:
    """The budgets of a model with so many bytes of weights where MLX may use `memory_bytes`."""
    rest = max(MIN_REST_BYTES, memory_bytes - weight_bytes)
    kv_bytes = int(rest * KV_SHARE)
    return MemoryPlan(
        kv_bytes=wanted.kv_bytes or kv_bytes,
        batch_bytes=wanted.batch_bytes or kv_bytes,
        write_queue_bytes=_share(rest, WRITE_QUEUE_SHARE, WRITE_QUEUE_CAP),
        read_ahead_bytes=_share(rest, READ_AHEAD_SHARE, READ_AHEAD_CAP),
        records_bytes=wanted.records_bytes or _share(rest, RECORDS_SHARE, RECORDS_CAP),
        draft_bytes=_share(rest, DRAFTS_SHARE, DRAFTS_CAP) if wanted.has_drafts else 0,
        image_feature_bytes=wanted.image_feature_bytes or _share(rest, IMAGE_FEATURES_SHARE, IMAGE_FEATURES_CAP),
        buffer_bytes=_share(rest, BUFFERS_SHARE, BUFFERS_CAP),
    )


def overdrawn(memory_bytes: int, weight_bytes: int, plan: MemoryPlan) -> tuple[str, ...]:
    """What a person should know where weights and budgets together are more than MLX may use."""
    needed = weight_bytes + plan.total_bytes
    if needed <= memory_bytes:
        return ()
    return (
        f"Weights ({weight_bytes / 2**30:.1f} GiB) and all budgets may take {needed / 2**30:.1f} GiB of "
        f"{memory_bytes / 2**30:.1f} GiB: lower PROMPT_CACHE_MAX_BYTES or MAX_BATCH_BYTES, or take a smaller model.",
    )


def _share(rest: int, share: float, cap: int) -> int:
    return min(cap, int(rest * share))


def memory_bytes() -> int:
    """Memory that MLX may use: the GPU's recommended working set or, on a CPU, the machine's memory."""
    working_set = mx.device_info().get("max_recommended_working_set_size")
    return int(working_set) if working_set else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


Account = Literal[
    "live",
    "copies",
    "kept",
    "write_queue",
    "read_ahead",
    "records",
    "drafts",
    "image_features",
    "buffers",
    "draft_kv",
]

KV_ACCOUNTS: tuple[Account, ...] = ("live", "copies", "kept", "write_queue", "read_ahead")

QUIET_SECONDS = 30.0
"""A bound that nothing met for so long is not pressed any more: rows come and go faster than a person reads."""

TIMES_SECONDS = 1.0
"""A row that waits meets its bound at every step: that is one time."""

type Bound = Literal["kv_pool", "running_rows", "write_queue", "disk"]
"""What can be at its end: memory for KV, that for running rows, the queue of writes, or the volume."""


@dataclass(frozen=True, slots=True)
class Held:
    """One account: bytes now, and the most that it may have; None where another account's bound counts."""

    num_bytes: int
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Pressure:
    """A bound that is met: what it costs now, for how long, and how often it was met since."""

    bound: Bound
    cost: str
    seconds: float
    num_times: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All accounts, their sum, what they may have together, and which bounds are met now."""

    accounts: Mapping[Account, Held]
    total_bytes: int
    budget_bytes: int
    pressures: tuple[Pressure, ...] = ()


@dataclass(slots=True)
class _Pressed:
    cost: str
    since: float
    last_at: float
    num_times: int = 1


class MemoryLedger:
    """The ledger of one loaded model. `tell` takes lines for a person."""

    def __init__(
        self,
        plan: MemoryPlan,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[Account, int] = {"live": 0, "copies": 0}
        self._read: dict[Account, Callable[[], int]] = {}
        self._pressed: dict[Bound, _Pressed] = {}
        self._watched: dict[Bound, Callable[[], str | None]] = {}

    # --- what is held -------------------------------------------------------------------------------------------------

    def open(self, account: Account, read: Callable[[], int]) -> None:
        """Have an account's bytes read where they are, from any thread."""
        self._read[account] = read

    def say(self, *, live_bytes: float, copy_bytes: float) -> None:
        """Note what running rows hold now, and what there is twice at the most."""
        self._said = {"live": int(live_bytes), "copies": int(copy_bytes)}

    def held(self, account: Account) -> int:
        """Bytes of an account now."""
        read = self._read.get(account)
        return read() if read is not None else self._said.get(account, 0)

    @property
    def reserved_bytes(self) -> int:
        """What of the memory for KV is not there for what is kept: running rows, copies, and what is on its
        way to the disk or from it beyond their own budgets."""
        plan = self.plan
        beyond = max(0, self.held("write_queue") - plan.write_queue_bytes)
        beyond += max(0, self.held("read_ahead") - plan.read_ahead_bytes)
        return self.held("live") + self.held("copies") + beyond

    def has_room_for_kv(self, num_bytes: float, kept_bytes: float | None = None) -> bool:
        """Whether so much more KV fits beside all that there is; `kept_bytes` in place of all that is kept."""
        kept = self.held("kept") if kept_bytes is None else kept_bytes
        return self.reserved_bytes + kept + num_bytes <= self.plan.pool_bytes

    @property
    def all_kv_bytes(self) -> int:
        """Bytes of all KV in memory, wherever it is on its way."""
        return sum(self.held(account) for account in KV_ACCOUNTS)

    def report(self) -> MemoryReport:
        """A look at all of it."""
        plan = self.plan
        bounds: Mapping[Account, int | None] = {
            "live": plan.batch_bytes,
            "copies": None,
            "kept": plan.kv_bytes,
            "write_queue": plan.write_queue_bytes,
            "read_ahead": plan.read_ahead_bytes,
            "records": plan.records_bytes,
            "drafts": plan.draft_bytes,
            "image_features": plan.image_feature_bytes,
            "buffers": plan.buffer_bytes,
        }
        if plan.draft is not None:
            bounds = {**bounds, "draft_kv": plan.draft.total_bytes}
        accounts = {account: Held(self.held(account), max_bytes) for account, max_bytes in bounds.items()}
        total = sum(each.num_bytes for each in accounts.values())
        return MemoryReport(accounts, total, plan.total_bytes, self.pressures())

    # --- what is at its bound -----------------------------------------------------------------------------------------

    def watch(self, bound: Bound, cost: Callable[[], str | None]) -> None:
        """Have a bound looked at with every report: what it costs that it is met, None while it is not. From any
        thread; its owner tells a person."""
        self._watched[bound] = cost

    def press(self, bound: Bound, cost: str) -> None:
        """A bound is met, which costs what `cost` says. The first of a time is told to a person."""
        now = self._clock()
        with self._lock:
            pressed = self._pressed.get(bound)
            if pressed is None:
                self._pressed[bound] = _Pressed(cost, now, now)
            else:
                pressed.num_times += now - pressed.last_at >= TIMES_SECONDS
                pressed.cost, pressed.last_at = cost, now
        if pressed is None:
            self._tell(f"{_BOUNDS[bound]}: {cost}")

    def look(self) -> None:
        """End what was not met for a while, and say so."""
        now = self._clock()
        with self._lock:
            quiet = (bound for bound, each in self._pressed.items() if now - each.last_at >= QUIET_SECONDS)
            over = [bound for bound in quiet if bound not in self._watched]
            gone = {bound: self._pressed.pop(bound) for bound in over}
        for bound, each in gone.items():
            seconds = each.last_at - each.since
            self._tell(f"{_BOUNDS[bound]}: over, after {seconds:.0f} s and {each.num_times} times.")

    def pressures(self) -> tuple[Pressure, ...]:
        """The bounds that are met now."""
        now = self._clock()
        costs = {bound: cost() for bound, cost in self._watched.items()}
        with self._lock:
            for watched, cost in costs.items():
                if cost is None:
                    self._pressed.pop(watched, None)
                else:
                    pressed = self._pressed.setdefault(watched, _Pressed(cost, now, now))
                    pressed.cost, pressed.last_at = cost, now
            return tuple(
                Pressure(bound, each.cost, round(now - each.since, 1), each.num_times)
                for bound, each in self._pressed.items()
                if now - each.last_at < QUIET_SECONDS
            )


_BOUNDS: Mapping[Bound, str] = {
    "kv_pool": "Memory for KV is full (PROMPT_CACHE_MAX_BYTES, MAX_BATCH_BYTES)",
    "running_rows": "Memory for running requests is full (MAX_BATCH_BYTES)",
    "write_queue": "KV comes faster than the disk takes it",
    "disk": "The disk has no room for KV",
}


def fixed_memory(kv_bytes: int) -> MemoryLedger:
    """A ledger that knows one number: so many bytes for KV, on any machine."""
    return MemoryLedger(plan_memory(0, 0, WantedMemory(kv_bytes=kv_bytes, batch_bytes=kv_bytes)))
