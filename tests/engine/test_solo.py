"""Models whose caches cannot be batched: the same text as mlx-lm's own, row by row, cold and warm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences, generate_step
from mlx_lm.models.cache import ConcatenateKVCache
from mlx_lm.utils import load_model

from kvserve.core import GenerationDone, GenerationFailed, Grammar, TokenDelta
from kvserve.engine import decode_group
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.sampling import sampler_for
from kvserve.engine.solo import SoloGenerator
from kvserve.engine.worker import Engine
from tests.engine.engines import collect, engine_settings, generate, held, prompt_of, request, running_engine
from tests.engine.odd_caches import (
    DEEPSEEK_V41,
    LLAMA4,
    CopiesItself,
    DropsPadding,
    HidesItsArrays,
    Unmergeable,
    random_model,
    use_cache,
)
from tests.laws import IS_FULL, sampled
from tests.models import tiny_model

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((40, 170, 100))]
NUM_TOKENS = 12 if IS_FULL else 8
ODD = (Unmergeable, ConcatenateKVCache, DropsPadding, CopiesItself, HidesItsArrays)


def reference(folder: Path, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Greedy tokens of mlx-lm's own single-row generator, with the caches that the model makes in this test."""
    model, _ = load_model(folder)
    return tuple(int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens))


def cached(result: Any) -> int:
    assert isinstance(result.end, GenerationDone)
    return result.end.num_cached_tokens


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose model decodes in turns."""
    use_cache(monkeypatch, Unmergeable)
    with running_engine() as running:
        yield running


@pytest.mark.parametrize("new_cache", sampled(ODD, (DropsPadding,)))
def test_the_text_is_mlx_lms_own_cold_and_warm_alone_and_together(
    monkeypatch: pytest.MonkeyPatch, new_cache: type
) -> None:
    """Whatever is odd about the caches, three rows at once and each one's next turn are what mlx-lm writes."""
    use_cache(monkeypatch, new_cache)
    folder = tiny_model("qwen3")
    expected = [reference(folder, prompt) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    with running_engine() as engine:
        cold = generate(engine, *(request(prompt, NUM_TOKENS) for prompt in PROMPTS))
        longer = [[*prompt, *text, *prompt_of(30, 7)] for prompt, text in zip(PROMPTS, expected, strict=True)]
        warm = generate(engine, *(request(prompt, NUM_TOKENS) for prompt in longer))
        support = engine.status.cache_support
    assert [result.tokens for result in cold] == expected
    assert [result.tokens for result in warm] == [reference(folder, prompt) for prompt in longer]
    assert support is not None and not support.can_batch
    reused = [len(prompt) + NUM_TOKENS if support.can_keep else 0 for prompt in PROMPTS]
    assert [cached(result) for result in warm] == reused
    assert support.can_keep == (new_cache not in (CopiesItself, HidesItsArrays))


@pytest.mark.parametrize("config", sampled([LLAMA4, DEEPSEEK_V41], [LLAMA4]), ids=lambda config: config["model_type"])
def test_real_architectures_that_cannot_be_batched(tmp_path: Path, config: dict[str, Any]) -> None:
    """Chunked attention and compressed windows in caches of their own are served, and their state is kept."""
    folder = random_model(tmp_path, config)
    expected = [reference(folder, prompt) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    engine = Engine(folder, engine_settings(), grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    try:
        engine.wait_until_ready(60)
        cold = generate(engine, *(request(prompt, NUM_TOKENS) for prompt in PROMPTS))
        longer = [[*prompt, *text, *prompt_of(30, 7)] for prompt, text in zip(PROMPTS, expected, strict=True)]
        warm = generate(engine, *(request(prompt, NUM_TOKENS) for prompt in longer))
        support = engine.status.cache_support
    finally:
        engine.stop(60)
    assert [result.tokens for result in cold] == expected
    assert [result.tokens for result in warm] == [reference(folder, prompt) for prompt in longer]
    assert [cached(result) for result in warm] == [len(prompt) + NUM_TOKENS for prompt in PROMPTS]
    assert support is not None and (support.can_batch, support.can_keep) == (False, True)


def test_without_a_prefix_cache_nobody_waits_for_what_nobody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with one beginning come at once and in turn: each is computed whole, and the cache stays empty."""
    use_cache(monkeypatch, CopiesItself)
    prompt = prompt_of(120)
    expected = reference(tiny_model("qwen3"), prompt, 8)
    with running_engine() as engine:
        results = [*generate(engine, *[request(prompt, 8)] * 3), *generate(engine, request(prompt, 8))]
        report = engine.cache_report()
    assert [result.tokens for result in results] == [expected] * 4
    assert [cached(result) for result in results] == [0] * 4
    assert (report.stats.ram_bytes, report.stats.num_nodes, report.stats.num_leases) == (0, 0, 0)
    assert report.totals.num_prefill_tokens == 4 * 120


def test_rows_take_turns(engine: Engine, even_steps: None) -> None:
    """Two long answers advance together; a row that comes later gets its tokens while they run."""
    with held(engine):
        running = [engine.submit(request(prompt_of(40, seed), 100_000)) for seed in range(2)]
        last = engine.submit(request(prompt_of(100, 5), 24))
    late = collect(last)
    with held(engine):
        for generation in running:
            generation.cancel()
    lengths = [len(collect(generation).tokens) for generation in running]
    assert len(late.tokens) == 24
    assert min(lengths) > 18 and max(lengths) < 3 * min(lengths)


def test_stop_tokens_and_limits_end_a_row_as_in_a_batch(engine: Engine) -> None:
    """A stop token ends a row and is not delivered; a limit of one token is one token."""
    free, one = generate(engine, request(PROMPTS[0]), request(PROMPTS[1], 1))
    stop = free.tokens[5]
    [stopped] = generate(engine, request(PROMPTS[0], stop=[stop]))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop)]
    assert isinstance(stopped.end, GenerationDone) and isinstance(one.end, GenerationDone)
    assert (stopped.end.reason, stopped.end.num_generated_tokens) == ("stop", len(stopped.tokens) + 1)
    assert (len(one.tokens), one.end.reason) == (1, "length")


def test_seeds_and_penalties_draw_what_a_batch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded sampling, penalties and biases give the tokens that the same model gives when it is batched."""
    rows = [
        request(PROMPTS[0], NUM_TOKENS, temperature=1.5, top_p=0.9, seed=3),
        request(PROMPTS[1], NUM_TOKENS, repetition_penalty=1.5, presence_penalty=0.5),
        request(PROMPTS[2], NUM_TOKENS, temperature=0.8, seed=4, logit_bias=((17, 5.0),), frequency_penalty=0.7),
    ]
    with running_engine() as batched:
        expected = [result.tokens for result in generate(batched, *rows)]
    use_cache(monkeypatch, Unmergeable)
    with running_engine() as solo:
        assert [result.tokens for result in generate(solo, *rows)] == expected


def test_a_grammar_holds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row under a constraint sees every token of its own, the last one included."""
    seen: list[list[int]] = []

    class Recorder:
        def __init__(self, grammar: Grammar, tokenizer: object, num_prompt_tokens: int) -> None:
            pass

        def reset(self) -> None:
            seen.clear()

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())  # type: ignore[arg-type]
            return logits

    monkeypatch.setattr("kvserve.engine.submitting.GrammarProcessor", Recorder)
    [result] = generate(engine, request(PROMPTS[0], 4, grammar=Grammar("start: /.*/")))
    whole = [*PROMPTS[0], *result.tokens]
    assert seen == [whole[: len(PROMPTS[0]) + index] for index in range(5)]


def test_a_cancelled_row_is_gone_and_what_it_computed_is_kept(engine: Engine) -> None:
    """A client that leaves frees its row at once; its prompt and answer serve the next request."""
    row = engine.submit(request(PROMPTS[0], 100_000))
    tokens: list[int] = []
    for batch in row.batches(30):
        tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
        if len(tokens) > 5:
            row.cancel()
        end = batch[-1]
    assert isinstance(end, GenerationDone) and end.reason == "cancelled"
    assert engine.status.num_decoding == 0
    [again] = generate(engine, request([*PROMPTS[0], *tokens, 5], 2))
    assert cached(again) == len(PROMPTS[0]) + len(tokens)


def test_the_watchdog_ends_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row over its time ends with `watchdog`; its neighbour ends whole."""
    use_cache(monkeypatch, Unmergeable)
    with running_engine() as engine:
        with held(engine):
            endless, short = engine.submit(request(PROMPTS[0], 100_000)), engine.submit(request(PROMPTS[1], 8))
        assert len(collect(short).tokens) == 8
        engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 1e-6))  # from here on its time is over
        end = collect(endless).end
    assert isinstance(end, GenerationDone) and end.reason == "watchdog"


def test_a_row_whose_sampler_raises_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded row's broken sampler ends that row with an error; its neighbours' text is that of a quiet run."""
    quiet = generate(engine, request(PROMPTS[0], NUM_TOKENS), request(PROMPTS[2], NUM_TOKENS))
    real = decode_group.sampler_for

    def breaking(params: Any, *more: int) -> Any:
        sampler, calls = real(params, *more), iter(range(100))
        return (lambda logprobs: 1 / 0 if next(calls) == 4 else sampler(logprobs)) if params.seed == 13 else sampler

    monkeypatch.setattr(decode_group, "sampler_for", breaking)
    broken = request(PROMPTS[1], NUM_TOKENS, temperature=1.0, seed=13)
    left, failed, right = generate(engine, request(PROMPTS[0], NUM_TOKENS), broken, request(PROMPTS[2], NUM_TOKENS))
    assert isinstance(failed.end, GenerationFailed) and len(failed.tokens) == 4
    assert [left.tokens, right.tokens] == [result.tokens for result in quiet]


def test_a_step_that_raises_costs_its_row_nothing_the_first_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose step raises once enters again from its tokens; a second time is its own failure."""
    [wanted] = generate(engine, request(PROMPTS[0], NUM_TOKENS))
    module = engine.wait_until_ready().module
    real_call, calls = type(module).__call__, iter(range(10_000))
    failures = {5}

    def break_some(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        if inputs.shape == (1, 1) and next(calls) in failures:
            raise RuntimeError("planted")
        return real_call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(module), "__call__", break_some)
    [result] = generate(engine, request(PROMPTS[0], NUM_TOKENS))
    assert result.tokens == wanted.tokens
    failures.update(range(10_000))
    [failed] = generate(engine, request(PROMPTS[2], NUM_TOKENS))
    assert isinstance(failed.end, GenerationFailed) and "planted" in str(failed.end.error)


# --- the generator by itself ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_model("qwen3"), 131072)


def insert(generator: SoloGenerator, model: LoadedModel, prompt: list[int], max_tokens: int) -> int:
    caches = model.new_caches()
    model.module(mx.array([prompt[:-1]]), cache=caches)
    [uid] = generator.insert(
        [prompt[-1:]],
        max_tokens=[max_tokens],
        caches=[caches],
        all_tokens=[prompt[:-1]],
        samplers=[sampler_for(request(prompt).sampling, model.vocab_size)],
        logits_processors=[[]],
        stop_sequences=[StopSequences([])],
    )
    return uid


def test_a_finished_rows_caches_hold_all_its_tokens(model: LoadedModel) -> None:
    """Prompt and every delivered token, the last one included, and no more."""
    generator = SoloGenerator(model.module)
    prompt = prompt_of(20)
    insert(generator, model, prompt, 3)
    responses = [response for _ in range(4) for response in generator.next()[1]]
    assert [response.finish_reason for response in responses] == [None, None, "length"]
    assert responses[-1].all_tokens == [*prompt, *(response.token for response in responses)]
    assert responses[-1].prompt_cache is not None
    assert {cache.offset for cache in responses[-1].prompt_cache} == {23}
    assert generator.next() == ([], [])


def test_a_removed_row_leaves_with_what_it_has_computed(model: LoadedModel) -> None:
    """Before its first step, between two steps, and not a second time; a copy does not move with the row."""
    generator = SoloGenerator(model.module)
    prompt = prompt_of(20)
    uid = insert(generator, model, prompt, 10)
    assert generator.remove([uid], return_prompt_caches=True)[uid][1] == prompt[:-1]
    uid = insert(generator, model, prompt, 10)
    for _ in range(3):
        generator.next()
    copied, known = generator.extract_cache([uid])[uid]
    generator.next()
    caches, tokens = generator.remove([uid], return_prompt_caches=True)[uid]
    assert ([cache.offset for cache in caches], len(tokens)) == ([23] * len(caches), 23)
    assert ([cache.offset for cache in copied], known) == ([22] * len(caches), tokens[:22])
    assert generator.remove([uid], return_prompt_caches=True) == {}


def test_it_has_room_for_one_row(model: LoadedModel) -> None:
    """A second row is refused while one decodes, and welcome when it has gone."""
    generator = SoloGenerator(model.module)
    first = insert(generator, model, prompt_of(20), 10)
    with pytest.raises(ValueError, match="already"):
        insert(generator, model, prompt_of(30), 10)
    generator.remove([first])
    assert insert(generator, model, prompt_of(30), 10) != first
    generator.close()
