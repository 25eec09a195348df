"""The prefix cache on every family: what is reused, and that a warm row writes exactly what a cold one writes.

In every run mixed batches of warm and cold rows and repeated prompts are compared for one family of each kind of
caches, logits and where a conversation may be gone back to for three kinds; the rest runs with qwen3_5 only, or with
qwen3 too where it matters that its layers can be cut. `make full` has all for all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from kvserve.app.blas import active_blas
from kvserve.cache.store import RamTier
from kvserve.core import GenerationDone, TokenDelta
from kvserve.engine.prefill import Prefill
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CACHE,
    CUTTABLE,
    FAMILIES,
    NUM_ANSWER_TOKENS,
    TAIL_TOKENS,
    assert_close,
    assert_exact,
    cached,
    cold,
    cold_with_logits,
    collect,
    do_all_idle_work,
    generate,
    generate_each_with_logits,
    generate_with_logits,
    held,
    live_extra_bytes,
    of_each_kind,
    prompt_of,
    request,
    running_engine,
    turn,
    without_idle_work,
)
from tests.integrity import check_integrity
from tests.laws import IS_FULL, THREE_KINDS, TWO_KINDS, sampled, sampled_cells
from tests.models import DEEP_ONES

ALL = (*FAMILIES, "qwen3_5_vl")
of_three_kinds = pytest.mark.parametrize("family", sampled(ALL, THREE_KINDS), indirect=True)
of_two_kinds = pytest.mark.parametrize("family", sampled(ALL, TWO_KINDS), indirect=True)
of_one_kind = pytest.mark.parametrize("family", sampled(ALL, ("qwen3_5",)), indirect=True)


@pytest.fixture(scope="module", params=of_each_kind(ALL))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared_engine(family: str) -> Iterator[Engine]:
    with running_engine(family) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine that has forgotten everything; its tree is whole afterwards."""
    shared_engine.clear_cache()
    yield shared_engine
    shared_engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    assert shared_engine.cache_report().stats.num_leases == 0


BASE = prompt_of(288)
NUM_LOGITS = NUM_ANSWER_TOKENS if IS_FULL else 6
"""Logits show at once what a text shows after up to 46 tokens."""

NUM_FIRST = NUM_ANSWER_TOKENS if IS_FULL else 18
"""An answer that is gone on from: more than a message's last block of tokens."""


def known_of_base(family: str) -> int:
    """How much of BASE another prompt can start from: all of it or, with states, up to its generation tail."""
    return len(BASE) if family in CUTTABLE else len(BASE) - TAIL_TOKENS


@pytest.mark.long
@of_one_kind
def test_the_next_turn_reuses_prompt_and_answer(engine: Engine) -> None:
    """A prompt that goes on where the answer ended reuses all of both and is answered as by a cold server."""
    [first] = generate(engine, turn(BASE))
    longer = [*BASE, *first.tokens, *prompt_of(60, 1)]
    [warm] = generate(engine, turn(longer))
    assert cached(warm) == len(BASE) + NUM_ANSWER_TOKENS
    assert_exact(warm, cold(engine, longer))


@of_two_kinds
def test_a_repeated_prompt_computes_its_tail_only(engine: Engine, family: str) -> None:
    """The same prompt again: all but the last token where layers can be cut, else its generation tail."""
    first, cold_logits = generate_with_logits(engine, turn(BASE, NUM_LOGITS))
    again, logits = generate_with_logits(engine, turn(BASE, NUM_LOGITS))
    assert_exact(again, first.tokens)
    assert_close(logits, cold_logits)
    assert cached(again) == min(len(BASE) - 1, known_of_base(family))


@of_one_kind
def test_a_repeated_raw_prompt_computes_its_last_token_only(engine: Engine) -> None:
    """Nobody said where its messages end, and it may have none: sent again, or with more behind it, all is reused."""
    first, cold_logits = generate_with_logits(engine, request(BASE, NUM_LOGITS))
    again, logits = generate_with_logits(engine, request(BASE, NUM_LOGITS))
    assert_exact(again, first.tokens)
    assert_close(logits, cold_logits)
    longer = [*BASE[:-1], *prompt_of(40, 9)]
    warm, logits = generate_with_logits(engine, request(longer, NUM_LOGITS))
    assert (cached(again), cached(warm)) == (len(BASE) - 1, len(BASE) - 1)
    engine.clear_cache()
    expected, cold_logits = generate_with_logits(engine, request(longer, NUM_LOGITS))
    assert_exact(warm, expected.tokens)
    assert_close(logits, cold_logits)


@pytest.mark.long
@of_one_kind
def test_a_branch_reuses_up_to_where_it_leaves(engine: Engine) -> None:
    """Two conversations that part at a message's end share everything before it."""
    generate(engine, turn([*BASE, *prompt_of(50, 1)], 1))
    other = [*BASE, *prompt_of(50, 2)]
    [warm] = generate(engine, turn(other))
    assert cached(warm) == len(BASE), "a message ends there in the first prompt"
    assert_exact(warm, cold(engine, other))


@pytest.mark.long
@of_one_kind
def test_a_rewind_goes_back_to_an_earlier_message(engine: Engine) -> None:
    """After a longer conversation an earlier message is answered anew, from its own checkpoint."""
    [first] = generate(engine, turn(BASE))
    longer = [*BASE, *first.tokens, *prompt_of(96, 1)]
    generate(engine, turn(longer, 1))
    rewound = [*BASE[:192], *prompt_of(70, 3)]
    [warm] = generate(engine, turn(rewound))
    assert cached(warm) == 192
    assert_exact(warm, cold(engine, rewound))


@of_one_kind
def test_a_divergence_in_the_middle_of_a_message_is_exact(engine: Engine, family: str) -> None:
    """A prompt that leaves the known one inside a message reuses up to there, or from the last checkpoint before."""
    generate(engine, turn(BASE, 1))
    edited = [*BASE[:215], *prompt_of(80, 4)]
    warm, logits = generate_with_logits(engine, turn(edited, NUM_LOGITS))
    assert cached(warm) == (215 if family in CUTTABLE else 192)
    expected, cold_logits = cold_with_logits(engine, edited, NUM_LOGITS)
    assert_exact(warm, expected.tokens)
    assert_close(logits, cold_logits)


@pytest.mark.long
@of_one_kind
def test_a_divergence_once_found_is_reused_the_next_time(engine: Engine) -> None:
    """The prefill that discovers where two prompts part leaves a checkpoint right there for the third."""
    generate(engine, turn(BASE, 1))
    generate(engine, turn([*BASE[:215], *prompt_of(80, 4)], 1))
    third = [*BASE[:215], *prompt_of(80, 5)]
    [warm] = generate(engine, turn(third))
    assert cached(warm) == 215
    assert_exact(warm, cold(engine, third))


@of_three_kinds
def test_a_retreat_behind_the_last_checkpoint_is_counted(engine: Engine, family: str) -> None:
    """A prompt that matches further than any state serves it counts, in the totals and on its row, where states are
    needed at all; one that finds its state does not."""
    before = engine.cache_report().num_hybrid_trim_misses
    generate(engine, request(BASE, 1))  # nobody said where its messages end
    [missed] = generate(engine, turn([*BASE[:215], *prompt_of(80, 4)], 1))
    is_miss = family not in CUTTABLE
    assert (cached(missed), missed.progress[-1].reuse.num_matched_tokens) == (0 if is_miss else 215, 215)
    assert missed.progress[-1].reuse.is_trim_miss == is_miss
    generate(engine, turn([*BASE[:215], *prompt_of(80, 5)], 1))
    assert engine.cache_report().num_hybrid_trim_misses == before + is_miss


@of_three_kinds
def test_logits_are_those_of_a_cold_row(engine: Engine, family: str) -> None:
    """Next turn, branch, rewind, divergence in a message: at each step the logits of a cold server, too.

    Bit for bit where both prefills computed the same chunks: from the message end that the cold one stops at as well;
    with a fast BLAS, whose last bits are not always the same, within the tolerance.
    """
    [first] = generate(engine, turn(BASE, NUM_FIRST))
    shapes = {
        "next turn": [*BASE, *first.tokens, *prompt_of(60, 1)],
        "branch": [*BASE, *prompt_of(50, 2)],
        "rewind": [*BASE[:192], *prompt_of(70, 3)],
        "divergence": [*BASE[:215], *prompt_of(80, 4)],
    }
    num_known = {
        "next turn": len(BASE) + NUM_FIRST,
        "branch": known_of_base(family),
        "rewind": 192,
        "divergence": 215 if family in CUTTABLE else 192,
    }
    cold_rows = {shape: cold_with_logits(engine, tokens, NUM_LOGITS) for shape, tokens in shapes.items()}
    generate(engine, turn(BASE, NUM_FIRST))
    for shape, tokens in shapes.items():
        expected, cold_logits = cold_rows[shape]
        warm, warm_logits = generate_with_logits(engine, turn(tokens, NUM_LOGITS))
        assert cached(warm) == num_known[shape]
        assert_exact(warm, expected.tokens)
        same_chunks = active_blas() is None and family not in CUTTABLE and shape in ("rewind", "divergence")
        assert_close(warm_logits, cold_logits, **({"tolerance": 0} if same_chunks else {}))


@pytest.mark.long
@of_one_kind
def test_with_equal_chunks_the_logits_are_the_same_to_the_bit(family: str) -> None:
    """Where all chunks of both prefills end at the same tokens a warm row computes the very numbers of a cold one."""
    shapes = {"branch": (288, [*BASE, *prompt_of(50, 2)]), "rewind": (192, [*BASE[:192], *prompt_of(70, 3)])}
    with running_engine(family, prefill_step_size=16) as engine:
        for num_known, tokens in shapes.values():
            expected, cold_logits = generate_with_logits(engine, turn(tokens, NUM_LOGITS))
            engine.clear_cache()
            generate(engine, turn([*BASE, *prompt_of(50, 1)], 1))
            warm, warm_logits = generate_with_logits(engine, turn(tokens, NUM_LOGITS))
            assert (cached(expected), cached(warm)) == (0, num_known)
            assert_exact(warm, expected.tokens)
            assert_close(warm_logits, cold_logits, tolerance=0)
            engine.clear_cache()


@pytest.mark.parametrize("family", [*of_each_kind(ALL), *sampled(DEEP_ONES, ())], indirect=True)
def test_warm_and_cold_rows_share_a_batch(engine: Engine, family: str) -> None:
    """Two warm rows, from different depths, beside two cold ones: each has the text and logits it has alone."""
    prompts = [[*BASE, *prompt_of(50, 1)], [*BASE[:96], *prompt_of(30, 2)], prompt_of(200, 7), prompt_of(33, 8)]
    alone = [cold_with_logits(engine, prompt, NUM_LOGITS) for prompt in prompts]
    generate(engine, turn(BASE, 1))
    together = generate_each_with_logits(engine, *(turn(prompt, NUM_LOGITS) for prompt in prompts))
    assert [cached(result) for result, _ in together] == [known_of_base(family), 96, 0, 0]
    for (warm, warm_logits), (expected, cold_logits) in zip(together, alone, strict=True):
        assert_exact(warm, expected.tokens)
        assert_close(warm_logits, cold_logits)


@of_one_kind
def test_joining_late_and_leaving_early_disturbs_nobody(engine: Engine, family: str) -> None:
    """A warm row that joins a running batch and one that leaves it: the rows that stay write what they write alone."""
    stays, joins = prompt_of(60, 5), [*BASE, *prompt_of(20, 6)]
    alone = [cold(engine, stays), cold(engine, joins)]
    generate(engine, turn(BASE, 1))
    running = engine.submit(turn(stays))
    leaver = engine.submit(turn(prompt_of(64, 9), 10_000))
    for batch in leaver.batches(30):
        if sum(isinstance(event, TokenDelta) for event in batch):
            break
    joined = engine.submit(turn(joins))
    leaver.cancel()
    assert_exact(collect(running), alone[0])
    result = collect(joined)
    assert_exact(result, alone[1])
    assert cached(result) == known_of_base(family)


@of_one_kind
def test_what_a_cancelled_row_computed_is_kept(engine: Engine) -> None:
    """A client that leaves after some tokens finds prompt and answer up to there when it comes back."""
    running = engine.submit(turn(BASE, 10_000))
    tokens: list[int] = []
    for batch in running.batches(30):
        tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
        if len(tokens) >= 10:
            running.cancel()
    longer = [*BASE, *tokens, *prompt_of(20, 1)]
    warm, logits = generate_with_logits(engine, turn(longer, NUM_LOGITS))
    assert cached(warm) == len(BASE) + len(tokens)
    expected, cold_logits = cold_with_logits(engine, longer, NUM_LOGITS)
    assert_exact(warm, expected.tokens)
    assert_close(logits, cold_logits)


@of_one_kind
def test_rows_that_share_a_prefix_in_flight_compute_it_once(engine: Engine) -> None:
    """Agents that start together prefill their common prompt once and answer as alone."""
    common = prompt_of(300)
    prompts = [[*common, *prompt_of(40, seed)] for seed in range(1, 4 if IS_FULL else 3)]
    alone = [cold_with_logits(engine, prompt, NUM_LOGITS) for prompt in prompts]
    together = generate_each_with_logits(engine, *(turn(prompt, NUM_LOGITS) for prompt in prompts))
    for (warm, logits), (expected, cold_logits) in zip(together, alone, strict=True):
        assert_exact(warm, expected.tokens)
        assert_close(logits, cold_logits)
    assert sorted(cached(result) for result, _ in together) == [0, *[300] * (len(prompts) - 1)]


@of_one_kind
def test_prompts_that_part_where_the_other_row_just_is_share_all_before(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row comes when the one in flight has computed just what both begin with: its state is there now, or never."""
    common, rows = prompt_of(192), []
    step = Prefill.step

    def joined(prefill: Prefill, *arguments: Any) -> int:
        num_tokens = step(prefill, *arguments)
        if len(rows) == 1 and prefill.num_done == len(common):
            rows.append(engine.submit(request([*common, *prompt_of(100, 2)], 8)))
        return num_tokens

    with running_engine(family, prefill_step_size=64) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Prefill, "step", joined)
            with held(engine):
                rows.append(engine.submit(request([*common, *prompt_of(400, 1)], 8)))
            collect(rows[0])
        joiner = collect(rows[1])
        assert cached(joiner) == len(common)
        assert_exact(joiner, cold(engine, [*common, *prompt_of(100, 2)], 8))


@pytest.mark.long
@of_one_kind
def test_a_parent_that_was_evicted_is_computed_again(engine: Engine, family: str) -> None:
    """Under a small budget old branches leave; a prompt that finds less than before is answered as exactly."""
    longer = [*BASE, *prompt_of(20, 1)]
    expected = cold(engine, longer)
    sizes = engine.wait_until_ready().sizes
    max_bytes = int(sizes.peak(460) + sizes.kept(0, 800))
    with running_engine(family, cache=replace(CACHE, max_bytes=max_bytes)) as small:
        generate(small, turn(BASE, 4))
        for seed in range(10, 14):
            generate(small, turn(prompt_of(400, seed), 4))
        [warm] = generate(small, turn(longer))
        assert cached(warm) < known_of_base(family), "some of it has left"
        assert small.cache_report().stats.ram_bytes <= max_bytes
        assert_exact(warm, expected)
        small._ask(lambda scheduler: check_integrity(scheduler.cache._tree))


@of_one_kind
def test_the_watchdog_leaves_no_answer_but_whole_prompt_segments(engine: Engine) -> None:
    """A row that was ended keeps nothing of its answer; a retry of its prompt starts from what was complete."""
    running, tokens, end = engine.submit(turn(BASE, 100_000)), [], None
    try:
        for batch in running.batches(60):
            tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
            end = next((event for event in batch if isinstance(event, GenerationDone)), end)
            if len(tokens) >= 40:  # from here on its time is over
                engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 1e-6))
    finally:
        engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 0))
    assert end is not None and end.reason == "watchdog"
    [retry] = generate(engine, turn([*BASE, *tokens[:40], *prompt_of(20, 1)], 4))
    assert 240 <= cached(retry) <= len(BASE)


@of_one_kind
def test_coalescing_changes_nothing(engine: Engine) -> None:
    """A conversation of many small segments is one of few after idle work, with the same text."""
    tokens = list(prompt_of(60))
    with without_idle_work(engine):
        for seed in range(12 if IS_FULL else 6):
            [answer] = generate(engine, turn(tokens, 4))
            tokens = [*tokens, *answer.tokens, *prompt_of(10, seed)]
        before = engine.cache_report().stats.num_segments
    do_all_idle_work(engine)
    assert engine.cache_report().stats.num_segments < before / 2
    warm, logits = generate_with_logits(engine, turn(tokens, NUM_LOGITS))
    assert cached(warm) >= len(tokens) - 16
    expected, cold_logits = cold_with_logits(engine, tokens, NUM_LOGITS)
    assert_exact(warm, expected.tokens)
    assert_close(logits, cold_logits)


@of_one_kind
def test_a_budget_of_little_more_than_one_conversation_still_reuses_it(engine: Engine, family: str) -> None:
    """Room for a row is not made by evicting what that very row starts from."""
    row_bytes = engine.wait_until_ready().sizes.held(500)
    max_bytes = int(row_bytes * 1.6) + live_extra_bytes(engine, 502)
    with running_engine(family, cache=replace(CACHE, max_bytes=max_bytes)) as small:
        [first] = generate(small, turn(prompt_of(500), 2))
        [again] = generate(small, turn(prompt_of(500), 2))
        assert cached(again) >= 490
        assert_exact(again, first.tokens)


@pytest.mark.parametrize("share", [0.3, 1.1])
@of_two_kinds
@sampled_cells(lambda family, share: (family == "qwen3") == (share < 1))
def test_the_tier_is_never_above_its_budget(
    engine: Engine, family: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment, though live rows stand on more than fits: the rest is not kept, and no token changes."""
    num_tokens = 400 if IS_FULL else 244  # windows take a large share of less
    prompts = [prompt_of(num_tokens, seed) for seed in range(3)]
    alone = [cold(engine, prompt, 6) for prompt in prompts]
    max_bytes, peak = int(share * engine.wait_until_ready().sizes.held(num_tokens)), 0
    put = RamTier.put

    def watched(tier: RamTier, *arguments: Any) -> None:
        nonlocal peak
        put(tier, *arguments)
        peak = max(peak, tier.num_bytes)

    with running_engine(family, cache=replace(CACHE, max_bytes=max_bytes)) as small:
        monkeypatch.setattr(RamTier, "put", watched)
        for _ in range(2):
            for result, expected in zip(generate(small, *(turn(each, 6) for each in prompts)), alone, strict=True):
                assert_exact(result, expected)
        assert 0 < peak <= max_bytes
        small._ask(lambda scheduler: check_integrity(scheduler.cache._tree))


@of_one_kind
def test_a_row_does_not_wait_for_one_that_stores_nothing(engine: Engine) -> None:
    """After a clear, rows in flight keep nothing; another with the same prompt starts at once and is exact."""
    prompt = prompt_of(400)
    first = engine.submit(turn(prompt, 4))
    for batch in first.batches(60):
        if batch:
            break
    engine.clear_cache()
    [second] = generate(engine, turn(prompt, 4))
    assert_exact(second, collect(first).tokens)


@of_one_kind
def test_memory_of_a_cleared_cache_is_given_back(engine: Engine) -> None:
    """DELETE means that the arrays are gone."""
    generate(engine, turn(prompt_of(300), 2))
    num_bytes = engine.cache_report().stats.ram_bytes
    before = engine._ask(lambda _: mx.get_active_memory())
    engine.clear_cache()
    assert engine.cache_report().stats.ram_bytes == 0
    assert engine._ask(lambda _: mx.get_active_memory()) <= before - num_bytes // 2
