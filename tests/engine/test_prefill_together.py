"""Short prompts in one padded pass: each row gets what it gets alone, whatever its neighbours' lengths and depths."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache

from kvserve.engine import prefill_pool
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.prefill import NUM_NEWEST_CHUNKS, ChunkLength, Prefill
from kvserve.engine.prefill_pool import NUM_COPIES, SHALLOW_TOKENS, SHORT_TOKENS, companions, padded_pass
from kvserve.engine.self_check import check_caches
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CUTTABLE,
    LOGIT_TOLERANCE,
    MESSAGE_TOKENS,
    assert_exact,
    beside_stream,
    cached,
    cold,
    generate,
    prompt_of,
    request,
    running_engine,
    turn,
)
from tests.engine.odd_caches import DropsPadding
from tests.laws import IS_FULL, num_examples
from tests.models import tiny_model

NUM_ROWS = 8
NUM_TOKENS = 12 if IS_FULL else 8


@pytest.fixture(scope="module")
def qwen3() -> LoadedModel:
    return load(tiny_model("qwen3"), 131072)


def begun(model: LoadedModel, tokens: Sequence[int]) -> list[Any]:
    """Caches of a row that has these tokens behind it."""
    caches = model.new_caches()
    if tokens:
        model.module(mx.array([list(tokens)]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def next_logits(model: LoadedModel, caches: list[Any]) -> mx.array:
    logits: mx.array = model.module(mx.array([[77]]), cache=caches)[0, -1]
    return logits


def worst_difference(model: LoadedModel, rows: Sequence[tuple[int, int]]) -> float:
    """How far rows of (depth, chunk) tokens that shared a pass are from the same rows alone, in a logit."""
    tokens = [prompt_of(depth + length, seed) for seed, (depth, length) in enumerate(rows)]
    starts = [begun(model, each[:depth]) for each, (depth, _) in zip(tokens, rows, strict=True)]
    parted = padded_pass(model.module, starts, [each[depth:] for each, (depth, _) in zip(tokens, rows, strict=True)])
    assert [[cache.offset for cache in caches] for caches in parted] == [
        [depth + length] * len(starts[0]) for depth, length in rows
    ]
    assert [caches[0].offset for caches in starts] == [depth for depth, _ in rows], "the rows themselves stay"
    pairs = [
        (next_logits(model, own), next_logits(model, begun(model, each)))
        for own, each in zip(parted, tokens, strict=True)
    ]
    return max(mx.abs(found - expected).max().item() for found, expected in pairs)  # type: ignore[type-var]


@settings(max_examples=num_examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.sampled_from([0, 0, 1, 7, 300]), st.integers(1, 40)), min_size=2, max_size=5))
def test_a_row_has_what_it_has_alone(qwen3: LoadedModel, rows: list[tuple[int, int]]) -> None:
    """Any lengths at any depths, beyond a buffer's step too."""
    assert worst_difference(qwen3, rows) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("family", sorted(CUTTABLE))
def test_every_family_that_is_padded_is_exact(family: str) -> None:
    model = load(tiny_model(family), 131072)
    assert check_caches(model).can_pad
    assert worst_difference(model, [(0, 30), (50, 12), (7, 29)]) <= LOGIT_TOLERANCE


class Shifted(BatchKVCache):
    """A batch whose rows stand one token off: what padding wrongly counted would do."""

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        batch = BatchKVCache.merge(caches)
        batch.offset = batch.offset + 1
        return batch


@pytest.mark.parametrize("wrong", [Shifted, DropsPadding])
def test_wrong_padding_is_seen(wrong: type, qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison, and of the trial at load."""
    assert check_caches(qwen3).can_pad
    monkeypatch.setattr(prefill_pool, "BatchKVCache", wrong)
    assert worst_difference(qwen3, [(0, 30), (50, 12)]) > 100 * LOGIT_TOLERANCE
    assert not check_caches(qwen3).can_pad


# --- who computes together --------------------------------------------------------------------------------------------


def waiting(num_to_stop: int, *, num_done: int = 0) -> Any:
    return SimpleNamespace(num_to_stop=num_to_stop, num_done=num_done)


def company(
    model: LoadedModel,
    lengths: Sequence[Any],
    *,
    rate: float = 1e6,
    step_size: int = 4096,
    num_weight_bytes: int = 10**9,
) -> list[int]:
    """Which of the waiting rows, by their places, compute with the first one."""
    chunk_length = ChunkLength(max_tokens=step_size)
    for _ in range(NUM_NEWEST_CHUNKS):
        chunk_length.measured(1000, 1000 / rate)
    prefills: list[Prefill] = [each if isinstance(each, SimpleNamespace) else waiting(each) for each in lengths]
    large = replace(model, active_weight_bytes=num_weight_bytes)
    group = companions(prefills[0], prefills, large, chunk_length, 0.25)
    return [place for place, each in enumerate(prefills) if any(each is one for one in group)]


def test_short_rows_of_like_length_go_together(qwen3: LoadedModel) -> None:
    assert company(qwen3, [60, 64, SHORT_TOKENS, 70]) == [0, 1, 2, 3]
    assert company(qwen3, [60, SHORT_TOKENS + 1, 50]) == [0, 2], "a long one is quick enough alone"
    assert company(qwen3, [SHORT_TOKENS + 1, 60, 50]) == [0]
    assert company(qwen3, [100, 4, 90]) == [0, 1, 2], "one short row among long ones is little padding"
    assert company(qwen3, [4, 100, 5]) == [0, 2], "the nearest in length, until every second token would be padding"
    assert company(qwen3, [60, waiting(0), 60]) == [0, 2]
    mixed = [(123, 0), (35, 225), (25, 0), (83, 0), (43, 387), (124, 0), (10, 0), (64, 0)]
    found = company(qwen3, [waiting(length, num_done=num_done) for length, num_done in mixed])
    assert len(found) == 6, "one that spoils the group does not keep out those behind it"


def test_nobody_goes_together_where_it_costs_more_than_it_saves(
    qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that would take too long or be longer than the setting allows, KV that is larger than the weights or would
    be padded to a deep row's."""
    assert company(qwen3, [60, 60, 60], rate=500) == [0, 1], "180 tokens take longer than a stream may wait"
    assert company(qwen3, [60, 60, 60], step_size=128) == [0, 1]
    assert company(qwen3, [60, waiting(60, num_done=SHALLOW_TOKENS), 60]) == [0, 2]
    assert company(qwen3, [60, waiting(60, num_done=SHALLOW_TOKENS - 60), 60, 60]) == [0, 2, 3], "padded in depth"
    deep = [waiting(60, num_done=SHALLOW_TOKENS - 60) for _ in range(3)]
    assert company(qwen3, deep) == [0, 1, 2]
    assert company(qwen3, deep, num_weight_bytes=0) == [0, 1, 2], "next to nothing is copied"
    monkeypatch.setattr(prefill_pool, "NEGLIGIBLE_COPY_BYTES", 0)
    num_bytes = int(NUM_COPIES * 3 * SHALLOW_TOKENS * qwen3.sizes.per_token / 2)
    assert company(qwen3, deep, num_weight_bytes=num_bytes - 1) == [0]
    assert company(qwen3, deep, num_weight_bytes=num_bytes) == [0, 1, 2], "three are worth it where two are not"


# --- in the engine ----------------------------------------------------------------------------------------------------


class Passes:
    """What the prefill pool computed together: the number of rows of each shared pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rows: list[int] = []
        real = prefill_pool.step_together

        def counted(group: Sequence[Prefill], *given: Any) -> int:
            self.num_rows.append(len(group))
            return real(group, *given)

        monkeypatch.setattr(prefill_pool, "step_together", counted)
        # Whatever a busy machine measured, there is time for all of them.
        monkeypatch.setattr(ChunkLength, "fits", lambda *_: True)


def test_prompts_that_come_together_are_prefilled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cold prompts: one pass, each answer that of a cold server, each prompt kept as if it had come alone."""
    prompts = [prompt_of(40 + 3 * seed, seed) for seed in range(NUM_ROWS)]
    with running_engine() as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        passes = Passes(monkeypatch)
        for answer, tokens in zip(
            generate(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts)), expected, strict=True
        ):
            assert_exact(answer, tokens)
        assert passes.num_rows == [NUM_ROWS]
        for prompt, tokens in zip(prompts, expected, strict=True):
            [again] = generate(engine, request(prompt, NUM_TOKENS))
            assert_exact(again, tokens)
            assert cached(again) == len(prompt) - 1


def test_warm_turns_that_come_together_are_prefilled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at several depths go on from what is known of them."""
    known = [prompt_of(100 * (seed + 1), seed) for seed in range(3)]
    prompts = [[*prompt, *prompt_of(30, 50 + seed)] for seed, prompt in enumerate(known)]
    with running_engine() as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        for prompt in known:
            generate(engine, request(prompt, 1))
        passes = Passes(monkeypatch)
        monkeypatch.setattr("kvserve.engine.prefill_pool._is_worth_it", lambda *_: True)  # the weights are tiny
        for answer, tokens, prompt in zip(
            generate(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts)), expected, known, strict=True
        ):
            assert_exact(answer, tokens)
            assert cached(answer) == len(prompt)
        assert passes.num_rows == [3]


def test_a_shared_pass_that_breaks_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row computes alone then; a person reads of it."""
    prompts = [prompt_of(50, seed) for seed in range(3)]
    lines: list[str] = []
    with running_engine(report=lines.append) as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        passes = Passes(monkeypatch)
        monkeypatch.setattr("kvserve.engine.prefill_pool.padded_pass", _break)
        for answer, tokens in zip(
            generate(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts)), expected, strict=True
        ):
            assert_exact(answer, tokens)
            generate(engine, *(request(prompt_of(50, 10 + seed), 1) for seed in range(3)))
        assert passes.num_rows == [3], "it is not tried again"
    assert [line for line in lines if "one by one" in line] == [
        "Short prompts are prefilled one by one from now on: RuntimeError: planned"
    ]


def test_prompts_with_stops_are_kept_at_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages end within the prompts: each pass goes to a stop, and another conversation finds what lies before it."""
    prompts = [prompt_of(2 * MESSAGE_TOKENS + 10 + seed, seed) for seed in range(3)]
    with running_engine() as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        passes = Passes(monkeypatch)
        for answer, tokens in zip(
            generate(engine, *(turn(prompt, NUM_TOKENS) for prompt in prompts)), expected, strict=True
        ):
            assert_exact(answer, tokens)
        assert passes.num_rows and set(passes.num_rows) <= {2, 3}
        for prompt in prompts:
            branch = [*prompt[:MESSAGE_TOKENS], *prompt_of(20, 99)]
            assert cached(generate(engine, turn(branch, 1))[0]) == MESSAGE_TOKENS


def test_prompts_share_a_pass_beside_a_stream() -> None:
    """The measured rate decides who fits into the time that the stream allows; all texts are those of a cold server."""
    prompts = [prompt_of(40, seed) for seed in range(4)]
    with running_engine() as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        stream = prompt_of(60, 50)
        long_answer = cold(engine, stream, 40)
        wanted = [request(prompt, NUM_TOKENS) for prompt in prompts]
        answers, streamed = beside_stream(engine, stream, 40, lambda: generate(engine, *wanted))
    for answer, tokens in zip(answers, expected, strict=True):
        assert_exact(answer, tokens)
    assert_exact(streamed, long_answer)


def test_a_client_that_leaves_a_group_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(50, seed) for seed in range(3)]
    with running_engine() as engine:
        expected = [cold(engine, prompt, NUM_TOKENS) for prompt in prompts]
        _leave_during_the_pass(engine, monkeypatch)
        answers = generate(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts))
        assert_exact(answers[0], expected[0])
        assert_exact(answers[2], expected[2])
        assert answers[1].tokens == () and answers[1].end.reason == "cancelled"  # type: ignore[union-attr]


def _leave_during_the_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prefill_pool.step_together

    def left(group: Sequence[Prefill], *given: Any) -> int:
        num_tokens = real(group, *given)
        group[1].row.handle.cancel()
        return num_tokens

    monkeypatch.setattr(prefill_pool, "step_together", left)
    monkeypatch.setattr(ChunkLength, "fits", lambda *_: True)


def _break(*_: Any) -> Any:
    raise RuntimeError("planned")


def test_a_model_with_windows_never_shares_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    with running_engine("gemma3") as engine:
        generate(engine, *(request(prompt_of(50, seed), 2) for seed in range(3)))
    assert passes.num_rows == []
