"""Whatever comes to rank 0, a follower computes the same passes, though it keeps other things, forgets at other times
and knows no clock of rank 0."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.core import GenerationFailed, MessageStart
from kvserve.engine.ranks.decisions import CHUNK, PLACE, TURN, Decision
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.scheduler import Scheduler
from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import QUANTISED, Pair, answer, pair
from tests.laws import THREE_KINDS, TWO_KINDS, num_examples, sampled

pytestmark = pytest.mark.timeout(600)

PROMPTS = tuple(
    (*prompt_of(shared), *prompt_of(own, seed))
    for seed, (shared, own) in enumerate([(70, 8), (70, 30), (40, 5), (0, 12), (70, 4), (20, 90)])
)
"""Some go on from others, at several depths."""


def outgrown_once(both: Pair) -> None:
    """Rows hold more than they may when rank 0 looks next."""
    admission: Any = both.leader.scheduler._admission
    real = admission.is_outgrown

    def once() -> bool:
        admission.is_outgrown = real
        return True

    admission.is_outgrown = once


def fails(both: Pair) -> None:
    """What a row draws with has failed on rank 0, where alone it is."""
    for row in both.leader.scheduler._pool.rows()[:1]:
        row.failure = ValueError("its grammar broke")


def breaks(both: Pair) -> None:
    """The next pass raises on both."""
    number = len(both.leader.passes.seen) + 1
    for rank in (both.leader, both.follower):
        rank.passes.planted[number] = RuntimeError("a kernel broke")


def add(both: Pair, place: int, num_tokens: int) -> None:
    starts = (MessageStart(0, is_user=True), MessageStart(len(PROMPTS[place]) - 3, is_user=False))
    both.add(list(PROMPTS[place]), num_tokens, message_starts=starts)


def cancel(both: Pair, place: int) -> None:
    if place < len(both.rows):
        both.rows[place].handle.cancel()


def differs(scheduler: Scheduler) -> None:
    """Whatever a follower would find by itself is another thing than rank 0 finds."""
    parts: Any = scheduler
    parts._admission.padding_left = lambda _: 0.0
    parts._waiting_for_prefix.make_way = lambda *_, **__: False
    for group in parts._pool._groups:
        group.used_seconds = 1e6 - group.used_seconds
    for _ in range(3):
        parts._chunk_length.measured(64, 60.0)


EVENTS: dict[str, Callable[..., None]] = {
    "add": add,
    "tick": Pair.tick,
    "cancel": cancel,
    "outgrown": outgrown_once,
    "fails": fails,
    "breaks": breaks,
    "the follower forgets": lambda both: both.chores.append(lambda scheduler: scheduler.cache.clear()),
    "the follower catches up": Pair.catch_up,
    "the follower differs": lambda both: both.chores.append(differs),
    "the leader forgets": lambda both: both.leader.scheduler.cache.clear(),
}
NAMES = st.sampled_from(sorted(EVENTS.keys() - {"add", "tick", "cancel"}))
SCHEDULES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 8)),
        st.tuples(st.just("tick"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(NAMES),
    ),
    min_size=3,
    max_size=16,
)

COMPANY = [("add", 0, 8), ("tick", 3), ("add", 1, 8), ("add", 2, 6), ("tick", 4)]
"""Three rows, of which two go on from what the first has."""


GROUPS = [("add", 0, 8), ("add", 4, 8), ("add", 2, 8), ("tick", 3), ("add", 5, 4)]
"""Rows of two lengths, two of which decode together."""

SHORT = [("add", 0, 2), ("add", 1, 2), ("add", 3, 2)]
"""Of which so little is to be computed that they share a pass."""

DIFFERS = [("the follower differs",), ("the follower catches up",)]


def assert_law(family: str, schedule: list[tuple[Any, ...]]) -> None:
    with pair(family) as both:
        for name, *arguments in schedule:
            EVENTS[name](both, *arguments)
        both.run()
    assert both.ended == [None]
    both.assert_alike()
    for row in both.rows:
        expected = answer(family, row.request.prompt.ids, row.request.max_tokens)
        last = [event for batch in row.handle.batches(0) for event in batch][-1]
        is_cut = row.handle.is_cancelled or isinstance(last, GenerationFailed)
        assert tuple(row.generated) == (expected[: len(row.generated)] if is_cut else expected)


@pytest.mark.parametrize("family", sampled((*THREE_KINDS, "gpt_oss"), TWO_KINDS))
@settings(max_examples=num_examples(4), deadline=None)
@given(schedule=SCHEDULES)
@example(schedule=[*COMPANY, ("outgrown",), ("tick", 2), ("fails",), ("tick", 2), ("add", 4, 3)])
@example(schedule=[*COMPANY, ("the follower forgets",), ("add", 0, 4), ("the leader forgets",), ("add", 1, 4)])
@example(schedule=[*COMPANY, ("breaks",), ("tick", 3), ("cancel", 0), *DIFFERS, *SHORT, ("add", 5, 4)])
@example(schedule=[*DIFFERS, *GROUPS, *DIFFERS, ("add", 3, 8), ("tick", 3), *DIFFERS])
def test_a_follower_computes_what_rank_0_computes(family: str, schedule: list[tuple[Any, ...]]) -> None:
    """And what rank 0 writes is what one rank writes."""
    assert_law(family, schedule)


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ()))
def test_rows_are_quantised_in_the_same_passes(family: str) -> None:
    """Where that begins a row leaves its batch, hands out what is drawn, and enters another one."""
    assert_law(QUANTISED + family, [*COMPANY, ("outgrown",), ("tick", 2), *DIFFERS, *SHORT, *GROUPS])


PERVERSE: list[tuple[Decision[Any], Any]] = [(CHUNK, 16), (PLACE, None), (TURN, 0)]


@pytest.mark.parametrize(("decision", "own"), PERVERSE, ids=lambda each: getattr(each, "name", ""))
def test_a_decision_of_its_own_is_seen(decision: Decision[Any], own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the law: a follower that decides one thing by itself computes other passes, or is stopped."""
    real = FollowingRanks.decided

    def decided(self: FollowingRanks, what: Decision[Any], find: Callable[[], Any]) -> Any:
        found = real(self, what, find)
        return own if what is decision else found

    monkeypatch.setattr(FollowingRanks, "decided", decided)
    with pytest.raises((AssertionError, RanksLost)):
        assert_law("qwen3", GROUPS)
