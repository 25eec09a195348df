"""The kept order of what may leave is the one that a look at all nodes would give, whatever happened to the tree."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction_scores import SCORES
from kvserve.cache import eviction_order, eviction_rank
from kvserve.cache.branches import LastUsers
from kvserve.cache.eviction_order import EvictionOrder, EvictionQueue
from kvserve.cache.kept_path import EvictedNodes
from kvserve.cache.node import Changes, Lease, Node
from kvserve.cache.records import BoundaryKind, Limits
from kvserve.cache.tree import PrefixTree
from kvserve.cache.trie import Trie
from kvserve.core import TokenSequence
from tests.cache.payloads import Clock, WholeState, joined, keys_of, make_tree, rows_of
from tests.integrity import check_integrity
from tests.laws import num_examples

BRIEF_TOKENS = 6
"""So few tokens make a request brief here that prompts of some ten tokens are either."""


@dataclass(frozen=True)
class Row:
    """A row behind the first part of an earlier prompt, with these tokens more, and where it stops, why, and whether
    with a state. It lives on while no more than `num_live` do, is a guess, or has an entry."""

    base: int
    kept: float
    more: tuple[int, ...]
    stops: tuple[tuple[float, BoundaryKind, bool], ...] = ()
    owner: str | None = None
    ttl_seconds: float | None = None
    user: str = ""
    num_live: int = 0
    is_guess: bool = False
    has_end: bool = True


@dataclass(frozen=True)
class Stop:
    """The oldest live row stops again, without a state or with one."""

    kind: BoundaryKind
    has_state: bool


@dataclass(frozen=True)
class Evict:
    """Room for so many bytes more than there are, if any."""

    num_bytes: int | None


@dataclass(frozen=True)
class Other:
    """What else is asked of a tree."""

    what: str


type Step = Row | Stop | Evict | Other | float

kinds: st.SearchStrategy[BoundaryKind] = st.sampled_from(["user", "message", "message", "system", "answer"])
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
stops = st.lists(
    st.tuples(st.sampled_from([0.25, 0.5, 0.75, 1.0]), kinds, st.sampled_from([True, True, False])), max_size=4
).map(tuple)
rows = st.builds(
    Row,
    base=st.integers(0, 30),
    kept=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0, 1.0]),
    more=tokens,
    stops=stops,
    owner=st.sampled_from([None, "a", "b"]),
    ttl_seconds=st.sampled_from([None, None, 20.0, 300.0]),
    user=st.sampled_from(["c", "d"]),
    num_live=st.sampled_from([0, 0, 1, 2]),
    is_guess=st.sampled_from([False, False, True]),
    has_end=st.booleans(),
)
evictions = st.builds(Evict, st.sampled_from([None, 1, 60, 200]))
others = st.builds(Other, st.sampled_from(["coalesce", "forget", "discard", "retract", "clear", "check", "check"]))
seconds = st.sampled_from([1.0, 10.0, 100.0, 1000.0])
steps = st.one_of(rows, rows, rows, rows, st.builds(Stop, kinds, st.booleans()), evictions, evictions, seconds, others)
traffic = st.lists(steps, min_size=3, max_size=30)
limits = st.builds(
    Limits,
    max_bytes=st.sampled_from([200, 500, 10**6]),
    max_checkpoint_bytes=st.sampled_from([130, 300, 10**6]),
    max_entries=st.sampled_from([2, 4, 100]),
    max_entries_per_owner=st.sampled_from([1, 2, 100]),
    ttl_seconds=st.sampled_from([0.0, 500.0]),
    keep_alive_seconds=st.sampled_from([0.0, 200.0]),
)


class OrderAnew(EvictionOrder):
    """It remembers nothing: before each that leaves all nodes are ranked."""

    def update(self, _max_nodes: float = math.inf) -> int:
        self._trie.changes.clear()
        self.forget_gone()
        self._last_users.__init__(self._trie.is_held)  # type: ignore[misc]
        for queue in (self._all, self._states):
            for node in list(queue._ranks):
                queue.discard(node)
        for node in self._trie.nodes():
            self._rank(node)
        return 0


class World:
    """One tree, the rows that live in it and what left it so far, in order. It lets leave so many pieces at a time."""

    def __init__(
        self,
        limits: Limits,
        score: str,
        *,
        needs_checkpoints: bool,
        is_anew: bool = False,
        max_pieces: float = math.inf,
    ) -> None:
        self.clock, self.limits, self._max_pieces = Clock(), limits, max_pieces
        self.tree = make_tree(limits, needs_checkpoints=needs_checkpoints, clock=self.clock, score=SCORES[score])
        if is_anew:
            self.tree._sweep._order.__class__ = OrderAnew
        self.tree.before_eviction(self._hear)
        self.left: list[tuple[tuple[Any, ...], bool]] = []
        self.prompts: list[TokenSequence] = [TokenSequence((0,))]
        self.live: list[tuple[Row, TokenSequence, Lease]] = []

    def _hear(self, leaving: EvictedNodes) -> None:
        path = leaving.nodes[0].path()
        keys = tuple(node.tokens.key_at(place) for node in path for place in range(node.start, node.end))
        self.left.append((keys, leaving.is_state_only))

    def play(self, steps: Sequence[Step]) -> "World":
        for step in steps:
            self._step(step)
        self.clock.now += 1
        self._evict(10**9)
        check_integrity(self.tree)
        self._evict(0)
        assert all(map(self.tree._trie.is_held, remembered(self.tree)))
        return self

    def _step(self, step: Step) -> None:
        match step:
            case Row():
                self._row(step)
            case Stop() if self.live:
                row, prompt, lease = self.live[0]
                longer = TokenSequence((*prompt.ids[: lease.num_tokens], *prompt.ids[lease.num_tokens :], 2, 3))
                self.live[0] = row, longer, lease
                self._extend(lease, longer, len(longer), step.kind, has_state=step.has_state)
            case Evict():
                over = self.limits.max_bytes - self.tree.num_ram_bytes
                self._evict(0 if step.num_bytes is None else max(0, over + step.num_bytes))
            case float():
                self.clock.now += step
            case Other():
                self._other(step.what)

    def _evict(self, num_bytes: int) -> None:
        while not self.tree.evict(num_bytes, self._max_pieces).is_over:
            check_integrity(self.tree)

    def _row(self, row: Row) -> None:
        base = self.prompts[row.base % len(self.prompts)]
        prompt = TokenSequence((*base.ids[: max(1, int(row.kept * len(base)))], *row.more))
        self.prompts.append(prompt)
        match = self.tree.lookup(prompt)
        lease = self.tree.acquire(
            match, owner=row.owner, ttl_seconds=row.ttl_seconds, user=row.user, is_guess=row.is_guess
        )
        for part, kind, has_state in sorted(row.stops, key=lambda stop: stop[0]):
            self._extend(lease, prompt, int(part * len(prompt)), kind, has_state=has_state)
        self._extend(lease, prompt, len(prompt), "answer", has_state=False)
        self.live.append((row, prompt, lease))
        while len(self.live) > row.num_live:
            self._end(*self.live.pop(0))

    def _extend(self, lease: Lease, prompt: TokenSequence, end: int, kind: BoundaryKind, *, has_state: bool) -> None:
        if end < lease.num_tokens:
            return
        keys = keys_of(prompt)[:end]
        self.tree.extend(lease, prompt, end, rows_of(prompt), (lambda: WholeState(keys)) if has_state else None, kind)

    def _end(self, row: Row, _prompt: TokenSequence, lease: Lease) -> None:
        if row.has_end and not row.is_guess:
            self.tree.mark_end(lease)
        self.tree.release(lease)

    def _other(self, what: str) -> None:
        tree = self.tree
        match what:
            case "coalesce":
                while (run := tree.plan_coalesce(max_tokens=16)) is not None:
                    tree.replace(run, joined(run.pieces))
            case "forget":
                tree.forget(lambda user: user == "c")
            case "discard":
                tree.discard(self.prompts[-1], lambda owner: owner == "a")
            case "retract" if self.live:
                _row, prompt, lease = self.live.pop()
                tree.retract(lease, len(prompt) // 2)
            case "clear" if len(self.prompts) % 4 == 0:
                tree.clear()
            case "check":
                check_order(tree)


def remembered(tree: PrefixTree) -> set[Node]:
    """The nodes that are kept in memory to rank them."""
    order, changes = tree._sweep._order, tree._trie.changes
    last = order._last_users
    noted = (changes.nodes, changes.states, changes.parted, changes.anchors, changes.gone, order._again)
    return {*order._all._ranks, *order._states._ranks, *last._end_of, *last._states_of}.union(*noted)


def check_order(tree: PrefixTree) -> None:
    """Nothing that may leave is missing, or in a place from which it would leave later than it should, now or ever."""
    kept = tree._sweep._order
    kept.ranks.now = tree._clock()
    kept.update()
    anew = OrderAnew(tree._trie, kept.ranks._score, needs_checkpoints=tree._needs_checkpoints)
    anew.ranks.now, anew.over_number = kept.ranks.now, kept.over_number
    anew.update()
    for node in tree._trie.nodes():
        for one, other in ((kept._all, anew._all), (kept._states, anew._states)):
            was, now = one.rank(node), other.rank(node)
            if now is None:
                continue
            assert was is not None and was.level <= now.level, (node.start, node.end, was, now)
            is_before = was.ageing.slope >= now.ageing.slope and was.ageing.since <= now.ageing.since
            assert was.level < now.level or is_before, (node.start, node.end, was, now)


def differ(steps: Sequence[Step], limits: Limits, score: str, *, needs_checkpoints: bool) -> bool:
    """Whether the kept order is not that of a look at all nodes."""
    with patch.object(eviction_rank, "BRIEF_TOKENS", BRIEF_TOKENS):
        try:
            kept, anew = (
                World(limits, score, needs_checkpoints=needs_checkpoints, is_anew=is_anew).play(steps).left
                for is_anew in (False, True)
            )
        except AssertionError:
            return True
    return kept != anew


@pytest.mark.parametrize("needs_checkpoints", [False, True])
@given(steps=traffic, limits=limits, score=st.sampled_from(["value", "value", "age_length_frequency", "lru"]))
@settings(max_examples=num_examples(75), deadline=None)
def test_what_leaves_is_what_a_look_at_all_nodes_would_choose(
    needs_checkpoints: bool, steps: list[Step], limits: Limits, score: str
) -> None:
    """Any traffic with guesses, pins, live rows, branches, states in the middle of a path, evictions, joined records,
    forgetting and time that passes: leaf by leaf and state by state, to the last of them."""
    with patch.object(eviction_rank, "BRIEF_TOKENS", BRIEF_TOKENS):
        kept, anew = (
            World(limits, score, needs_checkpoints=needs_checkpoints, is_anew=is_anew).play(steps)
            for is_anew in (False, True)
        )
    assert kept.left == anew.left
    assert kept.tree.stats() == anew.tree.stats()


@pytest.mark.parametrize("needs_checkpoints", [False, True])
@given(steps=traffic, limits=limits, max_pieces=st.sampled_from([0.125, 1, 3]))
@settings(max_examples=num_examples(50), deadline=None)
def test_in_pieces_the_same_leaves_in_the_same_order(
    needs_checkpoints: bool, steps: list[Step], limits: Limits, max_pieces: float
) -> None:
    """However little a run does, with the next ones it lets leave what one would, and the tree is whole in between."""
    with patch.object(eviction_rank, "BRIEF_TOKENS", BRIEF_TOKENS):
        whole, pieces = (
            World(limits, "value", needs_checkpoints=needs_checkpoints, max_pieces=each).play(steps)
            for each in (math.inf, max_pieces)
        )
    assert pieces.left == whole.left
    assert pieces.tree.stats() == whole.tree.stats()


def itself(node: Node) -> Iterator[Node]:
    yield node


def above_alone(node: Node) -> Iterator[Node]:
    if node.checkpoint is not None:
        yield from eviction_rank._newest_above(node, of_user=node.checkpoint.kind == "user")


def used(_trie: Trie, lease: Lease, now: float, num_uses: int = 1) -> None:
    lease.touch(now, num_uses)


CHECK, ROOM = Other("check"), Limits(10**6, 10**6, max_entries=100, max_entries_per_owner=100)
TWO = ((0.5, "message", True), (1.0, "message", True))
UNTOLD: dict[str, tuple[list[Step], tuple[Any, str, Any]]] = {
    "a new leaf": (
        [CHECK, Row(0, 0, (1,)), CHECK],
        (Changes, "note", lambda *_: None),
    ),
    "a node that was cut": (
        [Row(0, 0, (1, 1)), CHECK, Row(0, 0, (2,)), CHECK],
        (Changes, "note_cut", lambda *_: None),
    ),
    "those above a new state": (
        [Row(0, 0, (1, 1, 1), TWO), CHECK, Row(1, 1, (1, 1, 1, 1), TWO), CHECK],
        (eviction_order, "fallen_by_state", itself),
    ),
    "those below a new state": (
        [Row(0, 0, (1, 1)), Row(1, 1, (1, 1), TWO[1:]), CHECK, Row(1, 1, (2,), ((0.75, "message", True),)), CHECK],
        (eviction_order, "fallen_by_state", above_alone),
    ),
    "a branch that left": (
        [
            Row(0, 0, (0, 0, 0), ((0.25, "user", True),)),
            Row(0, 0, (0, 0, 0, 0, 0, 0, 0), ((0.25, "user", True), (0.5, "user", True))),
        ],
        (eviction_order, "fallen_by_parting", itself),
    ),
    "a branch that had no other user message": (
        [
            Row(0, 0, (1,) * 19, ((0.25, "user", True), (0.8, "message", True), (1.0, "message", True)), user="d"),
            Row(1, 1, (1, 1), ((1.0, "user", True),), user="d"),
            Row(1, 1, (2,), user="c"),
            CHECK,
            Other("forget"),
            CHECK,
        ],
        (LastUsers, "known_by", lambda *_: []),
    ),
    "a guess that is used": (
        [
            Row(0, 0, (1, 1), TWO[1:]),
            Row(1, 1, (1, 1, 1), ((0.75, "message", True), (1.0, "message", True)), is_guess=True),
            CHECK,
            Row(2, 1, (2,)),
            CHECK,
        ],
        (Trie, "use", used),
    ),
    "a place where system and tools end": (
        [
            Row(0, 0, (1, 1, 1, 1, 1), ((0.25, "message", False),)),
            CHECK,
            Row(0, 0, (2,), ((0.5, "system", False),)),
            CHECK,
        ],
        (Changes, "note_anchor", lambda *_: None),
    ),
    "a pin that ran out": (
        [Row(0, 0, (1,), ttl_seconds=20.0), CHECK, 100.0, CHECK],
        (EvictionQueue, "lapsed", lambda *_: []),
    ),
}


@pytest.mark.parametrize("what", UNTOLD)
def test_an_order_that_is_not_told_of_a_change_is_another_one(what: str) -> None:
    """Negative control: the law notices if the order does not hear of one kind of change, and each has to be told."""
    steps, (owner, name, replacement) = UNTOLD[what]
    assert not any(differ(steps, ROOM, "value", needs_checkpoints=each) for each in (False, True))
    with patch.object(owner, name, replacement):
        assert any(differ(steps, ROOM, "value", needs_checkpoints=each) for each in (False, True))
