"""A leader and a follower in one process, each with the whole model: what rank 0 decides goes through a queue in place
of a socket, and the ids of a decode pass too, in place of a collective. They never compute at the same time: the
follower has its turn where the leader waits for it, so that a run can be repeated.

Every pass of both is noted: what went in, where the caches stood, and what came out.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from kvserve.core import GenerationRequest, SamplingParams, TokenSequence
from kvserve.core.generation import RequestId
from kvserve.core.rank_place import RankPlace
from kvserve.engine.follower import follow
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.memory import MemoryLedger
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.quantised import FULL_PRECISION, KvSettings
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.leading import LeadingRanks
from kvserve.engine.ranks.place import ALONE, Ranks, RanksLost
from kvserve.engine.ranks.rank_link import Frame, Progress, RankLink
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.self_check import check_caches
from kvserve.engine.warming import WarmSettings
from tests.engine.engines import engine_settings
from tests.models import tiny_model

SIZE = 2
PATIENCE_SECONDS = 60.0


QUANTISED = "quantised "
"""Before a family's name: its rows are quantised from a token on that their answers come to."""

QUANTISED_KV = KvSettings(bits=4, scheme="turboquant", start=80)


@cache
def loaded(family: str, *, has_states_elsewhere: bool = False) -> LoadedModel:
    """A tiny model with what its caches allow, beside those of another part."""
    kv = QUANTISED_KV if family.startswith(QUANTISED) else FULL_PRECISION
    model = load(tiny_model(family.removeprefix(QUANTISED)), 131072, kv)
    model = replace(model, has_states_elsewhere=has_states_elsewhere)
    few_bytes = int(20 * model.sizes.per_token)  # rows of unlike length decode in groups of their own
    return replace(model, cache_support=check_caches(model), active_weight_bytes=few_bytes)


@dataclass(slots=True, eq=False)
class Passes:
    """A module that notes its passes. `planted` raises in the pass of this number. A follower's logits are turned
    before it draws from them: what it draws must count for nothing."""

    module: Any
    is_turned: bool = False
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    planted: dict[int, Exception] = field(default_factory=dict)

    def __call__(self, ids: mx.array, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        """The pass, which is evaluated when it is asked for."""
        offsets = [str(getattr(leaf, "offset", "")) for leaf in flat_caches(cache)]
        self.seen.append((ids.shape, ids, offsets))
        if (error := self.planted.pop(len(self.seen), None)) is not None:
            raise error
        logits = self.module(ids, *args, cache=cache, **kwargs)
        self.logits.append(logits)
        return -logits if self.is_turned else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def arrays(self) -> list[mx.array]:
        """All that was noted, to be evaluated on the thread that computed it."""
        return [*self.logits, *(ids for _, ids, _ in self.seen)]

    def noted(self) -> list[tuple[Any, ...]]:
        """Shape, ids and offsets of each pass."""
        return [(shape, ids.tolist(), offsets) for shape, ids, offsets in self.seen]


class Turns:
    """Who may compute: one of two threads."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._whose = 0

    def give(self, to: int) -> None:
        """Let the other one compute, and wait for one's own turn."""
        with self._news:
            own, self._whose = self._whose, to
            self._news.notify_all()
            assert self._news.wait_for(lambda: self._whose == own, PATIENCE_SECONDS), "the other rank does not answer"

    def wait(self, own: int) -> None:
        """Wait for the first turn."""
        with self._news:
            assert self._news.wait_for(lambda: self._whose == own, PATIENCE_SECONDS)

    def leave(self, to: int) -> None:
        """The same without coming back."""
        with self._news:
            self._whose = to
            self._news.notify_all()


class PairLink(RankLink):
    """The link of one of both: it gives its turn away where nothing has come."""

    def __init__(self, own: int, inbox: deque[Frame], outbox: deque[Frame], turns: Turns) -> None:
        self.peer = 1 - own
        self._inbox, self._outbox, self._turns = inbox, outbox, turns
        self.is_lost = False
        self.sent: list[Frame] = []

    def send(self, name: str, value: Any = None) -> None:
        self.sent.append((name, value))
        self._outbox.append((name, value))

    def next(self, timeout_seconds: float | None = None) -> Frame | None:
        if not self._inbox:
            if timeout_seconds == 0.0:
                return None
            self._turns.give(self.peer)
        if not self._inbox and timeout_seconds is not None:
            return None
        if not self._inbox:
            raise RanksLost("the other rank has ended")
        return self._inbox.popleft()

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True, eq=False)
class OneRank:
    """A rank: its scheduler, its passes, and what it said."""

    ranks: Ranks
    passes: Passes
    scheduler: Scheduler
    said: list[str]


def one_rank(family: str, ranks: Ranks, *, has_states_elsewhere: bool = False) -> OneRank:
    """A rank of a tiny model with all of its weights."""
    model = loaded(family, has_states_elsewhere=has_states_elsewhere)
    passes, said = Passes(model.module, ranks.is_following), list[str]()
    model = replace(model, module=passes)
    settings = engine_settings(max_concurrent_requests=4)
    memory = MemoryLedger(settings.memory_plan(model), said.append)
    kept = PrefixCache(model, settings.cache, memory, "the same name", ranks)
    scheduler = Scheduler(
        model,
        settings.budget(model),
        kept,
        prefill_step_size=64,
        watchdog_seconds=0,
        stream_share=0.5,
        report=said.append,
        warming=WarmSettings(time_share=0),
        ranks=ranks,
    )
    return OneRank(ranks, passes, scheduler, said)


@dataclass(slots=True, eq=False)
class Pair:
    """Both ranks. What a test does to the leader happens on the thread of the test."""

    leader: OneRank
    follower: OneRank
    turns: Turns
    rows: list[Row] = field(default_factory=list)
    followed: dict[int, Row] = field(default_factory=dict)
    """The follower's rows, by serial number."""
    ended: list[BaseException | None] = field(default_factory=list)
    chores: deque[Callable[[Scheduler], None]] = field(default_factory=deque)
    """What the follower does by itself, between two of its ticks."""

    def do_chores(self, scheduler: Scheduler) -> None:
        while self.chores:
            self.chores.popleft()(scheduler)

    def add(self, prompt: list[int], num_tokens: int, **fields: Any) -> Row:
        """Ask the leader for a greedy answer."""
        request = GenerationRequest(
            RequestId(f"row {len(self.rows)}"),
            TokenSequence(tuple(prompt)),
            num_tokens,
            SamplingParams(),
            frozenset(fields.pop("stop", ())),
            **fields,
        )
        row = Row(RequestHandle(request), lambda: None)
        self.rows.append(row)
        self.leader.scheduler.add(row)
        return row

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.leader.scheduler.tick()

    def catch_up(self) -> None:
        """Let the follower do all that was begun, and what it does by itself."""
        self.turns.give(1)

    def run(self) -> None:
        """Until nothing is left to do."""
        while not self.leader.scheduler.is_idle:
            self.leader.scheduler.tick()

    def assert_alike(self) -> None:
        """The follower has put through its model what the leader has, at the same places, and it came to the same."""
        assert self.leader.passes.noted() == self.follower.passes.noted()
        assert [row.generated for row in self.rows] == [self.followed[row.serial].generated for row in self.rows]
        for own, other in zip(self.leader.passes.logits, self.follower.passes.logits, strict=True):
            assert mx.allclose(own, other, atol=1e-3, rtol=1e-3).item()


@contextmanager
def pair(
    family: str,
    *,
    follower: str | None = None,
    agree: Callable[[deque[Any]], Any] = deque.popleft,
    level: Callable[[], bool] = lambda: True,
) -> Iterator[Pair]:
    """A leader and its follower, which may be of another family: then each takes the other's caches for those of other
    layers. `level` is what both find behind a failure. At the end the follower has done all that the leader began."""
    turns, to_follower, to_leader, ids = Turns(), deque[Frame](), deque[Frame](), deque[Any]()

    def agreed(own: mx.array) -> mx.array:
        ids.append(own.tolist())
        return own

    to_rank_1 = PairLink(0, to_leader, to_follower, turns)
    leading = LeadingRanks(RankPlace(0, SIZE, ""), [to_rank_1], Progress(), agreed, level)
    link = PairLink(1, to_follower, to_leader, turns)
    following = FollowingRanks(
        RankPlace(1, SIZE, ""), link, Progress(), lambda _: mx.array(agree(ids), dtype=mx.uint32), level
    )
    is_unlike = follower is not None
    both = Pair(
        one_rank(family, leading, has_states_elsewhere=is_unlike),
        one_rank(follower or family, following, has_states_elsewhere=is_unlike),
        turns,
    )

    def add(row: Row) -> None:
        FollowingRanks.add(following, row)
        both.followed[row.serial] = row

    following.add = add  # type: ignore[method-assign]

    def run() -> None:
        turns.wait(1)
        error: BaseException | None = None
        try:
            with mx.stream(generation_stream):
                follow(both.follower.scheduler, following, "end", both.do_chores)
                mx.eval(both.follower.passes.arrays)
        except BaseException as raised:  # noqa: BLE001 - the test sees it
            error = raised
            traceback.print_exception(raised)
        both.ended.append(error)
        turns.leave(0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        with mx.stream(generation_stream):
            yield both
            mx.eval(both.leader.passes.arrays)
    finally:
        leading.tell("end")
        turns.leave(1)
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@cache
def answer(family: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What one rank writes that remembers nothing."""
    alone = one_rank(family, ALONE)
    request = GenerationRequest(RequestId("alone"), TokenSequence(prompt), num_tokens, SamplingParams(), frozenset())
    row = Row(RequestHandle(request), lambda: None)
    with mx.stream(generation_stream):
        alone.scheduler.add(row)
        while not alone.scheduler.is_idle:
            alone.scheduler.tick()
    return tuple(row.generated)
