"""Quantised KV in the engine: warm rows write what cold ones write, memory is really saved, and what cannot be served
is said at the start.

The matrix has 7 families x 8 and 4 bits x start at 0 and in the middle of the prompt x 11 ways to come back, and
TurboQuant's four columns. Every run takes the hardest ways for one hybrid with 4 bits from the middle on, and one way
each of some other columns; `make full` takes all 308 cells, and all of TurboQuant's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvserve.core import GenerationRequest, TokenDelta
from kvserve.demo.build import TINY, ModelScale
from kvserve.engine import engine_start
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import DecodeResult
from kvserve.engine.kv_support import try_quantising
from kvserve.engine.model import CacheSupport, LoadedModel, load
from kvserve.engine.quantised import KvSettings, Quantiser
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.snapshot import CacheLayout
from kvserve.engine.worker import Engine
from kvserve.errors import ModelLoadError
from tests.engine import engines
from tests.engine.engines import (
    CACHE,
    CUTTABLE,
    NUM_ANSWER_TOKENS,
    assert_exact,
    cached,
    collect,
    do_all_idle_work,
    engine_settings,
    generate,
    generate_with_logits,
    prompt_of,
    request,
    without_idle_work,
)
from tests.engine.moving_rows import put_back_after, put_backs_counted, with_row_beside
from tests.integrity import check_integrity
from tests.laws import IS_FULL, sampled
from tests.models import TWO_LAYERS, tiny_model
from tests.starts import remembered_starts

MIDDLE = 150
BASE = prompt_of(288)
ABLE = ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma3", "gemma4", "llama")
NUM_TOKENS = NUM_ANSWER_TOKENS if IS_FULL else 24
WIDE = replace(TWO_LAYERS, head_dim=32)
"""The smallest group of MLX's quantisation is 32 wide."""


def turn(tokens: Sequence[int], max_tokens: int = NUM_TOKENS) -> GenerationRequest:
    """As everywhere, with the answers of these tests."""
    return engines.turn(tokens, max_tokens)


def cold(engine: Engine, tokens: Sequence[int], max_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """As everywhere, with the answers of these tests."""
    return engines.cold(engine, tokens, max_tokens)


@dataclass(frozen=True, slots=True)
class Case:
    """A column of the matrix."""

    family: str
    kv: KvSettings

    def __str__(self) -> str:
        return f"{self.family}-{self.kv.scheme}-{self.kv.bits}-from-{self.kv.start}"


def uniform(bits: Any, start: int) -> KvSettings:
    return KvSettings(bits=bits, scheme="uniform", group_size=32, start=start)


def turbo(bits: Any, start: int) -> KvSettings:
    return KvSettings(bits=bits, scheme="turboquant", start=start)


UNIFORM = [Case(family, uniform(bits, start)) for family in ABLE for bits in (8, 4) for start in (0, MIDDLE)]
THOROUGH = Case("qwen3_5", uniform(4, MIDDLE))
TURBO = [
    Case("qwen3_5", turbo(4, MIDDLE)),
    Case("gpt_oss", turbo(4, MIDDLE)),
    Case("glm4_moe_lite", turbo(4, 0)),
    Case("llama", turbo(8, MIDDLE)),
]
SLOW = TURBO[2:]
"""Unpacked for every step these take seconds for a way; a short one of the first is in every run."""


@contextmanager
def engine_of(case: Case, *, scale: ModelScale = WIDE, **settings: Any) -> Iterator[Engine]:
    """An engine on the family's tiny model, with heads wide enough to be quantised."""
    folder = tiny_model(case.family, scale=scale)
    engine = Engine(
        folder, engine_settings(kv=case.kv, **settings), grammar_tokenizer=lambda _: None, report=_fail_on_report
    )
    try:
        with remembered_starts():
            engine.start()
            engine.wait_until_ready(60)
        yield engine
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
        assert engine.cache_report().stats.num_leases == 0
    finally:
        engine.stop(60)


def _fail_on_report(line: str) -> None:
    """Whatever the engine reports here, a row that was computed again or KV that could not be kept, is a defect."""
    reports.append(line)


reports: list[str] = []


@pytest.fixture(autouse=True)
def nothing_to_report() -> Iterator[None]:
    """The engine has nothing to say of itself in these tests."""
    reports.clear()
    yield
    assert reports == []


# --- the ways to come back --------------------------------------------------------------------------------------------


def next_turn(engine: Engine, case: Case) -> None:
    [first] = generate(engine, turn(BASE))
    longer = [*BASE, *first.tokens, *prompt_of(60, 1)]
    [warm] = generate(engine, turn(longer))
    assert cached(warm) == len(BASE) + NUM_TOKENS
    assert_exact(warm, cold(engine, longer))


def branch(engine: Engine, case: Case) -> None:
    generate(engine, turn([*BASE, *prompt_of(50, 1)], 4))
    other = [*BASE, *prompt_of(50, 2)]
    [warm] = generate(engine, turn(other))
    assert cached(warm) == len(BASE)
    assert_exact(warm, cold(engine, other))


def rewind(engine: Engine, case: Case) -> None:
    """To a message behind the start, then to one before it."""
    rewound = {depth: [*BASE[:depth], *prompt_of(120, 3)] for depth in (192, 96)}
    expected = {depth: cold(engine, prompt) for depth, prompt in rewound.items()}
    generate(engine, turn([*BASE, *prompt_of(96, 1)], 4))
    for depth, prompt in rewound.items():
        [warm] = generate(engine, turn(prompt))
        assert cached(warm) == depth
        assert_exact(warm, expected[depth])


def divergence(engine: Engine, case: Case) -> None:
    """In the middle of a message, behind the start and before it."""
    edited = {place: [*BASE[:place], *prompt_of(110, 4)] for place in (215, 100)}
    expected = {place: cold(engine, prompt) for place, prompt in edited.items()}
    generate(engine, turn(BASE, 4))
    for place, prompt in edited.items():
        [warm] = generate(engine, turn(prompt))
        # Where a state is needed, it is that of the last message's end, or the one where the KV was converted.
        states = [*range(48, place + 1, 48), *([case.kv.start] if 0 < case.kv.start <= place else [])]
        assert cached(warm) == (place if case.family in CUTTABLE else max(states))
        assert_exact(warm, expected[place])


def repeated(engine: Engine, case: Case) -> None:
    num_tokens = 6 if case.kv.scheme == "turboquant" and not IS_FULL else NUM_TOKENS
    [first], [again] = generate(engine, turn(BASE, num_tokens)), generate(engine, turn(BASE, num_tokens))
    assert cached(again) == (len(BASE) - 1 if case.family in CUTTABLE else len(BASE) - 4)
    assert_exact(again, first.tokens)


def evicted_parent(engine: Engine, case: Case) -> None:
    longer = [*BASE, *prompt_of(20, 1)]
    expected = cold(engine, longer)
    sizes = engine.wait_until_ready().sizes
    max_bytes = int(sizes.peak(460) + sizes.kept(0, 800))
    with engine_of(case, cache=replace(CACHE, max_bytes=max_bytes)) as small:
        generate(small, turn(BASE, 4))
        for seed in range(10, 14):
            generate(small, turn(prompt_of(400, seed), 4))
        [warm] = generate(small, turn(longer))
        stats = small.cache_report().stats
        known = len(BASE) if case.family in CUTTABLE else len(BASE) - 4
        assert cached(warm) < known and stats.num_evicted_tokens > 0
        assert stats.ram_bytes <= max_bytes
        assert_exact(warm, expected)


def warm_rows_join_cold_ones(engine: Engine, case: Case) -> None:
    """Two warm rows from different depths beside two cold ones, of which one is too short to be quantised at first."""
    prompts = [[*BASE, *prompt_of(50, 1)], [*BASE[:96], *prompt_of(90, 2)], prompt_of(200, 7), prompt_of(33, 8)]
    alone = [cold(engine, prompt) for prompt in prompts]
    generate(engine, turn(BASE, 4))
    together = generate(engine, *(turn(prompt) for prompt in prompts))
    assert [cached(result) > 0 for result in together] == [True, True, False, False]
    assert [result.tokens for result in together] == alone


def late_join_and_leave(engine: Engine, case: Case) -> None:
    stays, joins = prompt_of(100, 5), [*BASE, *prompt_of(20, 6)]
    alone = [cold(engine, stays, 80), cold(engine, joins)]
    generate(engine, turn(BASE, 4))
    running, leaver = engine.submit(turn(stays, 80)), engine.submit(turn(prompt_of(164, 9), 10_000))
    for batch in leaver.batches(30):
        if any(isinstance(event, TokenDelta) for event in batch):
            break
    joined = engine.submit(turn(joins))
    leaver.cancel()
    assert [collect(each).tokens for each in (running, joined)] == alone


def shared_in_flight(engine: Engine, case: Case) -> None:
    common = prompt_of(400)
    prompts = [[*common, *prompt_of(40, seed)] for seed in range(1, 4)]
    alone = [cold(engine, prompt) for prompt in prompts]
    together = generate(engine, *(turn(prompt) for prompt in prompts))
    assert [result.tokens for result in together] == alone
    assert sorted(cached(result) for result in together) == [0, 400, 400]


def answer_that_crosses_the_start(engine: Engine, case: Case) -> None:
    """A prompt of which nothing is quantised, and an answer that comes past the start: the next turn starts there."""
    prompt = prompt_of(max(case.kv.start - 8, 1), 3)
    expected = cold(engine, prompt)
    [first], [again] = generate(engine, turn(prompt)), generate(engine, turn(prompt))
    assert first.tokens == again.tokens == expected
    longer = [*prompt, *first.tokens, *prompt_of(60, 1)]
    [warm] = generate(engine, turn(longer))
    assert cached(warm) == len(prompt) + NUM_TOKENS
    assert_exact(warm, cold(engine, longer))


def cancelled_where_the_start_is(engine: Engine, case: Case) -> None:
    """What a row that was cancelled around the start has computed is kept, and serves its next turn."""
    prompt = prompt_of(max(case.kv.start - 5, 1), 6)
    for num_tokens in (4, 5, 12):
        running = engine.submit(turn(prompt, 10_000))
        tokens: list[int] = []
        for batch in running.batches(30):
            tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
            if len(tokens) >= num_tokens:
                running.cancel()
        longer = [*prompt, *tokens, *prompt_of(60, num_tokens)]
        [warm] = generate(engine, turn(longer))
        assert cached(warm) >= len(prompt) + len(tokens) - 1
        assert_exact(warm, cold(engine, longer))


WAYS: tuple[Callable[[Engine, Case], None], ...] = (
    next_turn,
    branch,
    rewind,
    divergence,
    repeated,
    evicted_parent,
    warm_rows_join_cold_ones,
    late_join_and_leave,
    shared_in_flight,
    answer_that_crosses_the_start,
    cancelled_where_the_start_is,
)


IN_EVERY_RUN = {
    THOROUGH: (warm_rows_join_cold_ones, answer_that_crosses_the_start),
    Case("gemma3", uniform(4, 0)): (branch,),
    Case("llama", uniform(8, MIDDLE)): (rewind,),
    TURBO[1]: (repeated,),
}
"""Which cells every run takes: each way that quantised KV makes hard, and the others where they cost least."""


def cells() -> list[Any]:
    """Some cells of some columns; in `make full` all cells of all columns."""
    return [
        pytest.param(case, way, id=f"{case}-{way.__name__}", marks=() if is_in_every_run else pytest.mark.long)
        for case in (*UNIFORM, *TURBO)
        for way in WAYS
        if (is_in_every_run := way in IN_EVERY_RUN.get(case, ())) or IS_FULL
    ]


@pytest.fixture(scope="module")
def matrix_engine(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Engine]]:
    with engine_of(request.param) as engine:
        yield request.param, engine


@pytest.mark.parametrize(("matrix_engine", "way"), cells(), indirect=["matrix_engine"])
def test_a_warm_row_writes_what_a_cold_one_writes(
    matrix_engine: tuple[Case, Engine], way: Callable[[Engine, Case], None]
) -> None:
    """Each way to come back, under each setting: greedy tokens equal those of a cold server with the same settings."""
    case, engine = matrix_engine
    engine.clear_cache()
    way(engine, case)
    engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))


@pytest.mark.long
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_a_short_answer_is_repeated(case: Case) -> None:
    """The slow ones in short: latent attention packed from the first token on, and in make full 8 bits."""
    with engine_of(case) as engine:
        prompt, other = prompt_of(case.kv.start + 30), prompt_of(20, 1)
        [first], [again] = generate(engine, turn(prompt, 4)), generate(engine, turn(prompt, 4))
        assert (cached(first), cached(again)) == (0, len(prompt) - 1)
        assert_exact(again, first.tokens)
        [branch] = generate(engine, turn([*prompt, *other], 4))
        assert cached(branch) >= len(prompt)
        assert_exact(branch, cold(engine, [*prompt, *other], 4))


# --- what the setting does --------------------------------------------------------------------------------------------

QWEN3 = Case("qwen3", uniform(4, MIDDLE))


@pytest.fixture(scope="module")
def qwen3() -> Iterator[Engine]:
    with engine_of(QWEN3) as engine:
        yield engine


def test_nothing_is_quantised_before_the_start_and_all_of_it_behind(qwen3: Engine) -> None:
    """Logits before the start are those of full precision, bit for bit; behind it they are others, and near."""
    prompt = prompt_of(MIDDLE - 10, 2)
    with engine_of(replace(QWEN3, kv=KvSettings())) as plain:
        (_, ours), (_, theirs) = (generate_with_logits(each, turn(prompt, 10)) for each in (qwen3, plain))
        assert np.array_equal(ours, theirs)
        (_, ours), (_, theirs) = (generate_with_logits(each, turn(BASE, 1)) for each in (qwen3, plain))
    assert 1e-3 < np.abs(ours - theirs).mean() < theirs.std()


@pytest.mark.parametrize("length", sampled(range(MIDDLE - 2, MIDDLE + 3), (MIDDLE - 1, MIDDLE)))
def test_a_tokens_place_alone_decides_how_it_is_computed(qwen3: Engine, length: int) -> None:
    """Prompts that end around the start: each answer is that of plain steps with the caches converted at the start."""
    model = load(tiny_model("qwen3", scale=WIDE), 131072, QWEN3.kv)
    caches, tokens, answer = model.new_caches(), prompt_of(length, 5), []
    begun = MIDDLE - 20
    model.module(mx.array([tokens[:begun]]), cache=caches)
    for place in range(begun, length + 11):
        caches = model.quantiser.convert(caches) if place == MIDDLE else caches
        logits = model.module(mx.array([tokens[place : place + 1]]), cache=caches)[0, -1]
        if place >= length - 1:
            tokens.append(int(mx.argmax(logits).item()))
            answer.append(tokens[-1])
    qwen3.clear_cache()
    for _ in ("cold", "warm"):
        [result] = generate(qwen3, turn(prompt_of(length, 5), 12))
        assert_exact(result, answer)


def test_what_is_kept_and_what_runs_is_really_smaller(qwen3: Engine) -> None:
    """Bytes of the arrays themselves: the first tokens of what is kept in full precision, all else packed."""
    qwen3.clear_cache()
    sizes = qwen3.wait_until_ready().sizes
    full = load(tiny_model("qwen3", scale=WIDE), 131072).sizes
    assert sizes.per_token == full.per_token == 2 * 2 * 2 * 32 * 4, "layers, keys and values, heads, width, float32"
    assert sizes.per_packed_token == 2 * 2 * 2 * (32 // 2 + 2 * 4), "half a byte each, a scale and a bias per group"
    running = qwen3.submit(turn(BASE, 2000))
    for batch in running.batches(30):
        if any(isinstance(event, TokenDelta) for event in batch):
            break
    num_bytes, said = qwen3._ask(_live)
    running.cancel()
    collect(running)
    num_slots = len(turn(BASE, 2000).prompt) + 2000
    assert num_bytes <= sizes.live(num_slots + 256), "buffers have room for the answer"
    assert num_bytes < full.live(num_slots) / 2
    assert said == pytest.approx(sizes.live(num_slots), rel=0.02)
    stats = qwen3.cache_report().stats
    assert stats.ram_bytes == sizes.kept(0, stats.num_stored_tokens) < full.kept(0, stats.num_stored_tokens) * 0.7


def _live(scheduler: Scheduler) -> tuple[int, float]:
    """Bytes of the arrays of the one row that decodes, and what the budget counts."""
    [group] = [group for group in scheduler._pool._groups if group.rows]
    return (
        sum(cache.nbytes for cache in group.generator._generation_batch.prompt_cache),
        (scheduler._live_bytes()),
    )


def test_rows_in_full_precision_and_quantised_ones_have_their_own_batches(
    qwen3: Engine, even_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short row does not join a batch of quantised rows, and moves over when its answer comes to the start."""
    qwen3.clear_cache()
    seen: set[tuple[tuple[bool, int], ...]] = set()
    step = DecodePool.step

    def watched(pool: DecodePool) -> DecodeResult:
        seen.add(tuple(sorted((group.is_packed, len(group.rows)) for group in pool._groups if group.rows)))
        return step(pool)

    monkeypatch.setattr(DecodePool, "step", watched)
    generate(qwen3, turn(prompt_of(MIDDLE - 20, 4), 40), turn(BASE, 40))
    assert ((False, 1), (True, 1)) in seen, "side by side at first"
    assert ((True, 2),) in seen, "together in the end"


def test_the_length_of_prefill_chunks_changes_nothing() -> None:
    """Chunks end at the start, wherever the others end: the same logits within rounding."""
    found = []
    for step_size in (2048, 32):
        with engine_of(QWEN3, prefill_step_size=step_size) as engine:
            found.append(generate_with_logits(engine, turn(BASE, 8))[1])
    assert np.abs(found[0] - found[1]).max() < 1e-2


def test_small_segments_on_both_sides_of_the_start_are_joined(qwen3: Engine) -> None:
    """A conversation of many small pieces is one of few after idle work, with the same text."""
    qwen3.clear_cache()
    tokens = list(prompt_of(100))
    with without_idle_work(qwen3):
        for seed in range(14 if IS_FULL else 9):
            [answer] = generate(qwen3, turn(tokens, 4))
            tokens = [*tokens, *answer.tokens, *prompt_of(8, seed)]
        before = qwen3.cache_report().stats
    do_all_idle_work(qwen3)
    after = qwen3.cache_report().stats
    assert (after.num_segments, after.ram_bytes) < (before.num_segments / 2, before.ram_bytes + 1)
    [warm] = generate(qwen3, turn(tokens))
    assert cached(warm) >= len(tokens) - 12
    [edited] = generate(qwen3, turn([*tokens[:130], *prompt_of(60, 5)]))
    assert cached(edited) == 130
    assert_exact(warm, cold(qwen3, tokens))
    assert_exact(edited, cold(qwen3, [*tokens[:130], *prompt_of(60, 5)]))


def test_a_seeded_row_that_crosses_the_start_draws_on(qwen3: Engine) -> None:
    """Where a row is converted its draws go on, they do not begin again; warm and cold draw the same."""
    qwen3.clear_cache()
    wanted = request(prompt_of(MIDDLE - 10, 3), 24, temperature=1.0, seed=7)
    first, again, other = (
        generate(qwen3, wanted),
        generate(qwen3, wanted),
        generate(qwen3, request(prompt_of(MIDDLE - 10, 3), 24, temperature=1.0, seed=8)),
    )
    assert first[0].tokens == again[0].tokens != other[0].tokens
    assert len(set(first[0].tokens)) > 12


def test_a_seeded_row_that_is_put_back_behind_the_start_draws_on(
    qwen3: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it changed its batch it left no random key out, and took none twice."""
    prompt = prompt_of(MIDDLE - 4, 3)
    wanted = request(prompt, 16, temperature=1.0, seed=7)
    qwen3.clear_cache()
    alone = with_row_beside(qwen3, wanted)
    put_back_after(9, prompt, monkeypatch)
    with put_backs_counted() as rows:
        again = with_row_beside(qwen3, wanted)
    assert len(rows) == 1
    assert_exact(again, alone.tokens)


def test_a_model_that_cannot_batch_crosses_the_start_alone(monkeypatch: pytest.MonkeyPatch, qwen3: Engine) -> None:
    """Rows that each have a generator of their own are converted just so, and write the same."""
    prompts = [prompt_of(MIDDLE - 8, 3), BASE]
    expected = [cold(qwen3, prompt) for prompt in prompts]
    monkeypatch.setattr(engine_start, "check_caches", lambda _: CacheSupport(can_batch=False))
    with engine_of(QWEN3) as engine:
        assert [result.tokens for result in generate(engine, *map(turn, prompts))] == expected
        longer = [*prompts[0], *expected[0], *prompt_of(30, 1)]
        [warm] = generate(engine, turn(longer))
        assert cached(warm) == len(prompts[0]) + NUM_TOKENS
    assert_exact(warm, cold(qwen3, longer))


# --- negative controls: each must make the exactness above fail -------------------------------------------------------


def _first_part_not_quantised_again(layout: CacheLayout, pieces: Any, state: Any, num_next: int) -> list[Any]:
    """Rows as they are kept, in plain caches: the first part in full precision, the rest unpacked."""
    caches = [KVCache() for _ in pieces[0][0].leaves]
    for kv, start, end in pieces:
        for cache, arrays in zip(caches, kv.leaves, strict=True):
            rows = [array[..., start:end, :] for array in arrays]
            if kv.is_packed:
                rows = [mx.dequantize(*half, group_size=32, bits=4) for half in (rows[:3], rows[3:])]
            cache.update_and_fetch(*rows)
    return caches


def _quantised_with_wrong_scales(layout: CacheLayout, pieces: Any, state: Any, num_next: int) -> list[Any]:
    """The first part packed, its scales those of the neighbouring token."""
    caches = RESTORE(layout, pieces, state, num_next)
    for cache in caches:
        rows = list(cache.rows)
        rows[1] = mx.concatenate([rows[1][..., 1:MIDDLE, :], rows[1][..., :1, :], rows[1][..., MIDDLE:, :]], axis=-2)
        cache.rows = tuple(rows)
    return caches


RESTORE = CacheLayout.restore


@pytest.mark.parametrize("fault", [_first_part_not_quantised_again, _quantised_with_wrong_scales])
def test_a_planted_fault_changes_the_text(qwen3: Engine, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that does not quantise the first part again, or not in the same way, writes something else."""
    longer = [*BASE, *prompt_of(60, 1)]
    expected = cold(qwen3, longer)
    generate(qwen3, turn(BASE))
    monkeypatch.setattr(CacheLayout, "restore", fault)
    if fault is _first_part_not_quantised_again:
        monkeypatch.setattr(Quantiser, "ready", lambda self, caches, num_tokens: caches)
    [warm] = generate(qwen3, turn(longer))
    assert cached(warm) == len(BASE)
    assert warm.tokens != expected
    reports.clear()  # what such a row holds is refused where it would be kept


def test_an_answer_that_is_not_converted_at_the_start_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the conversion in the middle of an answer its text is another one; what it computed is refused."""
    prompt = prompt_of(MIDDLE - 20, 3)
    with engine_of(QWEN3) as engine:
        expected = cold(engine, prompt, 40)
        monkeypatch.setattr(DecodePool, "at_quantise_start", lambda _: [])
        [wrong] = generate(engine, turn(prompt, 40))
        assert wrong.tokens != expected
        assert engine.cache_report().stats.num_stored_tokens == len(prompt) - 1
    assert [line for line in reports if "not kept as they are" in line] == reports != []
    reports.clear()


# --- what cannot be served --------------------------------------------------------------------------------------------


def load_error(family: str, kv: KvSettings, **scale: int) -> str:
    with pytest.raises(ModelLoadError) as raised:
        load(tiny_model(family, scale=replace(TINY, **scale)), 1000, kv)
    return str(raised.value)


def test_attention_that_cannot_read_quantised_kv_is_an_error_of_the_start() -> None:
    """Sinks and latent attention: the setting, the reason and what to set instead."""
    for family, width in (("gpt_oss", 32), ("glm4_moe_lite", 64)):
        said = load_error(family, uniform(8, 0), head_dim=width)
        assert "KV_BITS=8 with KV_QUANT_SCHEME=uniform cannot be used with this model" in said
        assert "attention cannot read quantised KV" in said
        assert said.endswith("Set KV_QUANT_SCHEME=turboquant or KV_BITS=OFF.")


def test_the_start_error_reaches_whoever_waits_for_the_model() -> None:
    """It is the load error of the engine, word for word."""
    settings = engine_settings(kv=uniform(4, 0))
    engine = Engine(tiny_model("gpt_oss", scale=WIDE), settings, grammar_tokenizer=lambda _: None, report=print)
    engine.start()
    with pytest.raises(ModelLoadError, match=r"^KV_BITS=4 .*attention sinks"):
        engine.wait_until_ready(60)
    engine.stop(60)


def test_a_group_that_does_not_divide_the_width_is_an_error_of_the_start() -> None:
    """The widths are named, and the largest group that fits, if one does."""
    said = load_error("qwen3", KvSettings(8, "uniform", 128), head_dim=64)
    assert said.startswith("KV_GROUP_SIZE=128 cannot be used with this model: its keys and values are 64 wide")
    assert said.endswith("Set KV_GROUP_SIZE=64.")
    assert load_error("llama", uniform(8, 0)).endswith("Set KV_QUANT_SCHEME=turboquant or KV_BITS=OFF.")


def test_a_model_without_a_layer_to_quantise_is_an_error_of_the_start() -> None:
    """Windows and recurrent states alone leave the setting nothing to do."""
    plain = [RotatingKVCache(8), ArraysCache(2)]
    with pytest.raises(ModelLoadError, match="no layer of it keeps keys and values of every token"):
        try_quantising(lambda *_, **__: None, lambda: plain, plain, uniform(8, 0))


def test_logits_that_are_no_numbers_are_an_error_of_the_start() -> None:
    """A model that overflows on quantised KV is found out by the trial."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 4, 32)), mx.ones((1, 1, 4, 32)))
    with pytest.raises(ModelLoadError, match="not numbers"):
        try_quantising(lambda ids, cache: mx.full((*ids.shape, 4), mx.nan), lambda: [KVCache()], [cache], uniform(8, 0))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma3", "KV_BITS=8 quantises 2 of 4 layers. In full precision stay the layers 0, 2 (sliding windows)."),
        (
            "qwen3_5",
            "KV_BITS=8 quantises 1 of 4 layers. In full precision stay the layers 0-2 (recurrent or unknown states).",
        ),
        ("llama", None),
    ],
)
def test_layers_that_stay_in_full_precision_are_named(family: str, said: str | None) -> None:
    """One line at the start, where some layers of a model cannot be quantised."""
    scale, expected = replace(TINY, head_dim=32), (said,) if said else ()
    assert load(tiny_model(family, scale=scale), 131072, uniform(8, 0)).kv_notes == expected
    if family == "gemma3" or IS_FULL:
        with engine_of(Case(family, uniform(8, 0)), scale=scale) as engine:
            support = engine.status.cache_support
        assert support is not None
        assert support.notes == expected


def test_a_start_that_no_row_reaches_is_named() -> None:
    """A setting that will do nothing is not ignored in silence."""
    model = load(tiny_model("qwen3", scale=WIDE), 1000, uniform(8, 1000))
    [said] = model.kv_notes
    assert said == "KV_BITS=8 does nothing: QUANTIZED_KV_START=1000 is beyond the context limit of 1000 tokens."
    assert load(tiny_model("qwen3", scale=WIDE), 1000, uniform(8, 999)).kv_notes == ()


def test_without_the_setting_a_model_has_no_quantiser() -> None:
    """OFF costs nothing and says nothing."""
    model: LoadedModel = load(tiny_model("gpt_oss"), 1000)
    assert (model.quantiser, model.kv_notes, model.sizes.packed_from) == (None, (), None)
