"""Who goes, enters and computes next: the rules one by one, and the laws over seeded traces of what agents send."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvserve.engine import policy
from kvserve.engine.policy import (
    CHUNK_SECONDS_ALONE,
    CHUNK_SECONDS_BESIDE_STREAMS,
    MAX_OVERTAKEN,
    PREFILL_SLICE_SECONDS,
    DecodeStep,
    Ending,
    Facts,
    Life,
    Machine,
    Pause,
    PrefillChunk,
    PromptFacts,
    Stream,
    WaitingPrompt,
    candidates,
    first_token_seconds,
    plan,
)
from tests.engine import scheduling_policies
from tests.engine.scheduling_policies import Fair, FirstComeOldestShortest
from tests.engine.scheduling_simulator import Policy, Simulator
from tests.engine.scheduling_traces import trace_of
from tests.laws import IS_FULL

NUM_TRACES = 10_000 if IS_FULL else 19
NUM_IN_A_TEST = 250 if IS_FULL else 19

READER = Stream("reader", 0.0, has_begun=True)
FRESH = Stream("fresh", 100.0, has_begun=False)


def broken_in(seed: int, decider: Policy) -> Counter[str]:
    return Simulator(trace_of(seed), decider).run()


# --- the laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, NUM_TRACES, NUM_IN_A_TEST))
def test_in_no_trace_a_law_is_broken(first: int) -> None:
    """First tokens within twice one's own work and fair share of the rest, nobody waits for what stands still, streams
    and prompts have their share, nobody is passed for ever or kept from room that there is."""
    broken = {seed: found for seed in range(first, first + NUM_IN_A_TEST) if (found := broken_in(seed, Fair()))}
    assert not broken


@pytest.mark.parametrize("seed", [983, 2704])
def test_whose_prompt_is_known_whole_waits_for_no_more_than_one_chunk(seed: int) -> None:
    """Many prompts are under way, so that equal shares pass slowly, and each ends soon: its first token waited for two
    seconds of them."""
    assert not broken_in(seed, Fair())


def test_the_policy_of_before_breaks_laws_in_most_traces() -> None:
    """Control: what the engine did before. Every law but the bound on overtaking is broken somewhere."""
    found = [broken_in(seed, FirstComeOldestShortest()) for seed in range(18)]
    assert sum(map(bool, found)) >= 12
    assert {"first token", "waits for what stands still", "pace", "room"} <= set().union(*found)


@pytest.mark.parametrize(
    ("where", "name", "value", "law"),
    [
        (policy, "MAX_OVERTAKEN", 10**9, "overtaken"),
        (scheduling_policies, "SHARE", 0.95, "prompts"),
        (scheduling_policies, "SHARE", 0.2, "pace"),
        (policy, "urgency", lambda prompts: {each.row: each.finish for each in prompts}, "waits for what stands still"),
        (policy, "urgency", lambda prompts: {each.row: -each.num_left_tokens for each in prompts}, "first token"),
    ],
    ids=["overtaken", "prompts", "pace", "inherited", "longest first"],
)
def test_the_laws_see_a_policy_that_is_wrong(
    where: object, name: str, value: object, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the laws, each by a fault in the policy. One of them shows in the twelfth trace first."""
    monkeypatch.setattr(where, name, value)
    assert any(law in broken_in(seed, Fair()) for seed in (12, *range(120)))


# --- who goes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "reason"),
    [
        (Life("a"), None),
        (Life("a", is_cancelled=True, decoding_seconds=11), "cancelled"),
        (Life("a", decoding_seconds=10), None),
        (Life("a", decoding_seconds=11), "watchdog"),
        (Life("a", idle_seconds=10), None),
        (Life("a", idle_seconds=11), "stuck"),
        (Life("a", idle_seconds=11, is_passed=True), None),
    ],
)
def test_who_goes(life: Life[str], reason: str | None) -> None:
    """Whose client left, who decodes too long, who gets nothing computed; not who only waits for its turn."""
    ended = plan(Facts(lives=(life,), watchdog_seconds=10)).ended
    assert ended == (() if reason is None else (Ending("a", reason),))  # type: ignore[arg-type]


def test_without_a_limit_only_clients_end_rows() -> None:
    lives = (Life("a", decoding_seconds=1e9), Life("b", idle_seconds=1e9), Life("c", is_cancelled=True))
    assert [ending.row for ending in plan(Facts(lives=lives)).ended] == ["c"]


# --- who enters -------------------------------------------------------------------------------------------------------


def admitted(*waiting_prompts: WaitingPrompt[str]) -> str | None:
    return plan(Facts(waiting_prompts=waiting_prompts)).admitted


def test_a_row_without_room_keeps_nobody_from_it() -> None:
    large = WaitingPrompt("large", 9.0, 50_000, fits=False)
    small = WaitingPrompt("small", 0.01, 20, fits=True)
    assert admitted(replace(large, fits=True), small) == "large"
    assert admitted(large, small) == "small"


def test_nobody_passes_one_that_was_passed_often_enough() -> None:
    """It has the next room that is enough, so that a large row does not starve."""
    large = WaitingPrompt("large", 9.0, 50_000, fits=False, num_overtaken=MAX_OVERTAKEN)
    small = WaitingPrompt("small", 0.01, 20, fits=True)
    assert admitted(large, small) is None
    assert admitted(replace(large, num_overtaken=MAX_OVERTAKEN - 1), small) == "small"
    assert admitted(replace(large, fits=True), small) == "large"


def test_nobody_passes_one_that_had_a_place_already() -> None:
    back = WaitingPrompt("back", 0.1, 50_000, fits=False, is_back=True)
    assert admitted(WaitingPrompt("small", 5.0, 20, fits=True), back) is None
    passed = WaitingPrompt("passed", 9.0, 50_000, fits=True, num_overtaken=MAX_OVERTAKEN)
    assert admitted(passed, back) is None
    assert admitted(replace(passed, fits=False), replace(back, fits=True)) == "back"


def test_most_of_whose_prompt_is_known_enters_first_until_another_is_older() -> None:
    """Of sub-agents that come together the one whose trunk is there; age counts against what is left."""
    ready = WaitingPrompt("ready", 1.0, 500, fits=True)
    other = WaitingPrompt("other", 1.0, 20_000, fits=True)
    assert admitted(other, ready) == "ready"
    assert admitted(replace(other, waited_seconds=40.0), ready) == "other"


def test_only_a_few_are_asked_about() -> None:
    """Whether there is room costs a look at the cache: the best are looked at."""
    many = [WaitingPrompt(f"{number}", float(number), 100, fits=False) for number in range(40)]
    assert [each.row for each in candidates(many)] == [f"{number}" for number in range(39, 31, -1)]


# --- what is computed -------------------------------------------------------------------------------------------------


def work(*prompts: PromptFacts[str], streams: tuple[Stream[str], ...] = (), **machine: float | None) -> object:
    now = Machine(**{"tokens_per_second": 1000.0, **machine})
    return plan(Facts(prompts=prompts, streams=streams, machine=now)).work


def test_a_prompt_is_as_urgent_as_the_most_urgent_that_waits_for_it() -> None:
    """E5: the oldest, the shortest and the one in the middle, for whose tokens a short row waits."""
    rows = [
        PromptFacts("oldest", 900.0, 800),
        PromptFacts("awaited", 9_000.0, 8_000),
        PromptFacts("shortest", 500.0, 50),
    ]
    waiting = PromptFacts("waiting", 400.0, 40, awaits="awaited", num_awaited_tokens=400)
    assert work(*rows) == PrefillChunk("shortest", CHUNK_SECONDS_ALONE)
    assert work(*rows, waiting) == PrefillChunk("awaited", CHUNK_SECONDS_ALONE)


def test_what_cannot_compute_is_nobodys_turn() -> None:
    """A row that the disk is reading for, and one that waits for a row: others go on, or everybody pauses."""
    held = PromptFacts("held", 1.0, 10, is_held=True)
    assert work(held) == Pause()
    assert work(held, PromptFacts("other", 5.0, 10)) == PrefillChunk("other", CHUNK_SECONDS_ALONE)
    assert work(held, streams=(READER,)) == DecodeStep(is_for_all=False)


def test_streams_get_what_they_are_owed_before_a_prompt_goes_on() -> None:
    """The first step behind a chunk is for all of them, whoever's turn it is."""
    long = PromptFacts("long", 1e6, 100_000)
    chunk = PrefillChunk("long", CHUNK_SECONDS_BESIDE_STREAMS)
    assert work(long, streams=(READER,)) == chunk
    rest = PrefillChunk("long", CHUNK_SECONDS_BESIDE_STREAMS - 0.1)
    assert work(long, streams=(READER,), owed_seconds=-0.1, slice_seconds=0.1) == rest
    assert work(long, streams=(READER,), owed_seconds=-0.9, slice_seconds=0.25) == PrefillChunk("long", 0.9)
    assert work(long, streams=(READER,), owed_seconds=0.25, slice_seconds=0.25) == DecodeStep(is_for_all=True)
    assert work(long, streams=(READER,), owed_seconds=0.2) == DecodeStep(is_for_all=False)


def test_streams_have_the_share_of_a_long_prompts_last_chunk_before_it() -> None:
    """Behind it they are alone. A short prompt, or one whose end is not near, goes as soon as they had what they were
    owed."""
    last = PromptFacts("long", 1e6, 200, num_computed_tokens=4_000)
    chunk = PrefillChunk("long", CHUNK_SECONDS_BESIDE_STREAMS)
    share: dict[str, Any] = {"streams": (READER,), "stream_share": 0.5}
    assert work(last, **share) == DecodeStep(is_for_all=False)
    assert work(last, owed_seconds=-0.19, **share) == DecodeStep(is_for_all=False)
    assert work(last, owed_seconds=-0.2, **share) == chunk
    assert work(last, owed_seconds=0.1, slice_seconds=0.01, **share) == DecodeStep(is_for_all=True)
    assert work(replace(last, num_computed_tokens=999), **share) == chunk
    assert work(replace(last, num_left_tokens=251), **share) == chunk
    assert work(last, tokens_per_second=None, **share) == chunk


def test_short_prompts_that_come_together_enter_together() -> None:
    """What is left of a chunk's time beside streams; and before anybody reads, for a while."""
    short = PromptFacts("short", 90.0, 100)
    beside = work(short, streams=(READER, FRESH), owed_seconds=0.1, slice_seconds=0.1)
    assert beside == PrefillChunk("short", CHUNK_SECONDS_BESIDE_STREAMS - 0.1)
    assert work(short, streams=(READER,), owed_seconds=0.2, slice_seconds=0.2) == DecodeStep(is_for_all=True)
    assert work(short, streams=(FRESH,), slice_seconds=0.5) == PrefillChunk("short", PREFILL_SLICE_SECONDS - 0.5)
    assert work(short, streams=(FRESH,), slice_seconds=1.2) == DecodeStep(is_for_all=True)


def test_nobody_is_kept_from_a_first_token_that_equal_shares_would_have_given() -> None:
    """A title request beside longer ones: they end within the slice, but it has waited long enough."""
    short = PromptFacts("short", 900.0, 500)
    assert isinstance(work(short, streams=(FRESH,), fair_now=163.0, slice_seconds=0.1), PrefillChunk)
    assert work(short, streams=(FRESH,), fair_now=164.0, slice_seconds=0.1) == DecodeStep(is_for_all=True)


def test_a_long_prompt_keeps_nobody_from_a_first_token() -> None:
    assert work(PromptFacts("long", 1e6, 50_000), streams=(FRESH,)) == DecodeStep(is_for_all=True)


def test_what_is_told_of_first_tokens() -> None:
    """Each behind those that are more urgent; what one computes for another counts there, and once."""
    prompts = (
        PromptFacts("long", 9_000.0, 8_000),
        PromptFacts("waiting", 500.0, 100, awaits="long", num_awaited_tokens=400),
        PromptFacts("short", 50.0, 50),
    )
    facts = Facts(prompts=prompts, machine=Machine(tokens_per_second=1000.0, stream_share=0.5))
    assert first_token_seconds(facts) == pytest.approx({"short": 0.05, "waiting": 0.55, "long": 8.15})
    beside = first_token_seconds(replace(facts, streams=(READER,)))
    assert beside == pytest.approx({"short": 0.1, "waiting": 1.1, "long": 16.3})
    assert first_token_seconds(replace(facts, machine=Machine())) == {}
