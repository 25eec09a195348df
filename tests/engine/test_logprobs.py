"""Log-probabilities of tokens: those of a plain forward pass, whoever shares the batch and however tokens are drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from kvserve.core import GenerationDone, GenerationRequest, Grammar, TokenDelta, TokenLogprobs
from kvserve.engine import decode_group
from kvserve.engine.decode_group import Decoder
from kvserve.engine.logits_processors import LogprobReader
from kvserve.engine.quantised import KvSettings
from kvserve.engine.rows import RequestHandle
from kvserve.engine.worker import Engine
from kvserve.prompt.tokenizer import load_tokenizer
from tests.engine.engines import (
    beside_stream,
    engine_settings,
    held,
    let_prompts_take_no_time,
    prompt_of,
    request,
    running_engine,
)
from tests.engine.odd_caches import Unmergeable, use_cache
from tests.engine.test_kv_quantisation import WIDE
from tests.laws import TWO_KINDS
from tests.models import tiny_model

NUM_TOKENS = 20
NUM_TOP = 5
TOLERANCE = 1e-4

type Said = list[tuple[int, TokenLogprobs]]


def asking(wanted: GenerationRequest, num_top: int = NUM_TOP) -> GenerationRequest:
    return replace(wanted, num_top_logprobs=num_top)


def said(generation: RequestHandle) -> Said:
    """The tokens of a row that asks, each with what came with it."""
    tokens: Said = []
    for batch in generation.batches(60):
        assert batch, "the engine said nothing for too long"
        for event in batch:
            if isinstance(event, TokenDelta):
                assert event.logprobs is not None
                tokens.append((event.token, event.logprobs))
        if isinstance(batch[-1], GenerationDone):
            assert len(tokens) > 0
            return tokens
    raise AssertionError("the row did not end well")


def ask(engine: Engine, *wanted: GenerationRequest, beside: Sequence[GenerationRequest] = ()) -> list[Said]:
    """Rows that ask, and others that come at the same moment and do not."""
    with held(engine):
        others = [engine.submit(each) for each in beside]
        generations = [engine.submit(asking(each)) for each in wanted]
    found = [said(generation) for generation in generations]
    for other in others:
        events = [event for batch in other.batches(60) for event in batch]
        assert [event.logprobs for event in events if isinstance(event, TokenDelta)] == [None] * NUM_TOKENS
    return found


def of_a_plain_pass(family: str, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """The log-probabilities in the places of `tokens`, of one pass over everything without a cache."""
    model, _ = load_model(tiny_model(family))
    logits = model(mx.array([[*prompt, *tokens]]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(logprobs)[len(prompt) - 1 : -1]


def assert_told(found: Said, expected: np.ndarray) -> None:
    """Each token's own value and its likeliest ones are those expected."""
    assert len(found) == len(expected)
    for (token, told), row in zip(found, expected, strict=True):
        assert told.logprob == pytest.approx(row[token], abs=TOLERANCE)
        assert [logprob for _, logprob in told.top] == pytest.approx(np.sort(row)[::-1][:NUM_TOP], abs=TOLERANCE)
        assert [logprob for _, logprob in told.top] == pytest.approx(row[[each for each, _ in told.top]], abs=TOLERANCE)


def assert_lawful(found: Said, *, is_greedy: bool) -> None:
    """The likeliest come in order, are no more than everything, and agree with the token's own value."""
    for token, told in found:
        values = [logprob for _, logprob in told.top]
        assert len({each for each, _ in told.top}) == NUM_TOP
        assert values == sorted(values, reverse=True) and sum(np.exp(values)) <= 1 + 1e-5
        assert dict(told.top).get(token, told.logprob) == told.logprob <= values[0]
        assert not is_greedy or told.top[0][0] == token


@pytest.fixture(scope="module", params=TWO_KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with running_engine(request.param) as running:
        yield running


@pytest.fixture
def family(engine: Engine) -> str:
    return "qwen3_5" if engine.wait_until_ready().module.model_type == "qwen3_5" else "qwen3"


def test_they_are_those_of_a_plain_pass(engine: Engine, family: str) -> None:
    """Alone, cold and warm, from the first token behind the prompt to the last."""
    prompt = prompt_of(90)
    for _ in ("cold", "warm"):
        [found] = ask(engine, request(prompt, NUM_TOKENS))
        assert len(found) == NUM_TOKENS
        assert_lawful(found, is_greedy=True)
        assert_told(found, of_a_plain_pass(family, prompt, [token for token, _ in found]))


def test_a_batch_with_rows_that_do_not_ask_changes_nothing(engine: Engine, family: str) -> None:
    """Rows of other lengths and samplers beside them hear nothing of it and write what they write alone."""
    prompts = [prompt_of(40, 1), prompt_of(120, 2)]
    beside = [request(prompt_of(70, 3), NUM_TOKENS), request(prompt_of(30, 4), NUM_TOKENS, temperature=1.0, seed=5)]
    rows = ask(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts), beside=beside)
    for prompt, found in zip(prompts, rows, strict=True):
        assert_lawful(found, is_greedy=True)
        assert_told(found, of_a_plain_pass(family, prompt, [token for token, _ in found]))


STEERED: list[dict[str, Any]] = [
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    {"logit_bias": ((310, 100.0),)},
]


def test_what_steers_the_draw_does_not_change_them(engine: Engine, family: str) -> None:
    """Temperature, truncation, penalties and biases: what is told is what the model itself held likely."""
    prompt = prompt_of(60, 6)
    rows = ask(engine, *(request(prompt, NUM_TOKENS, **sampling) for sampling in STEERED))
    for found in rows:
        assert_lawful(found, is_greedy=False)
        assert_told(found, of_a_plain_pass(family, prompt, [token for token, _ in found]))
    assert {token for token, _ in rows[-1]} == {310} and max(told.logprob for _, told in rows[-1]) < -0.1


def test_a_row_that_joins_a_running_batch_and_one_that_leaves(engine: Engine, family: str) -> None:
    """Rows come and go at any step; each token keeps its own values."""
    prompt = prompt_of(50, 7)
    stream = prompt_of(80, 8)
    [found], _ = beside_stream(engine, stream, 5, lambda: ask(engine, request(prompt, NUM_TOKENS)))
    assert_told(found, of_a_plain_pass(family, prompt, [token for token, _ in found]))


def test_a_row_that_does_not_ask_has_no_processor(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without a row that asks takes mlx-lm's fast way."""
    seen: list[int] = []
    real = Decoder.of

    def noting(row: Any, vocab_size: int) -> Any:
        decoder = real(row, vocab_size)
        seen.append(len(decoder.processors))
        return decoder

    monkeypatch.setattr(Decoder, "of", noting)
    ask(engine, request(prompt_of(30, 9), 2), beside=[request(prompt_of(31, 9), NUM_TOKENS)])
    assert sorted(seen) == [0, 1]


def test_rows_that_decode_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where caches cannot be batched it is the same."""
    use_cache(monkeypatch, Unmergeable)
    prompts = [prompt_of(40, 1), prompt_of(90, 2)]
    with running_engine() as engine:
        support = engine.status.cache_support
        assert support is not None and not support.can_batch
        beside = [request(prompt_of(50), NUM_TOKENS)]
        rows = ask(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts), beside=beside)
    monkeypatch.undo()
    for prompt, found in zip(prompts, rows, strict=True):
        assert_told(found, of_a_plain_pass("qwen3", prompt, [token for token, _ in found]))


def test_a_broken_generator_costs_no_token_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that enter again from their tokens tell the values of the tokens that they then write."""
    reports: list[str] = []
    prompts = [prompt_of(40), prompt_of(70, 1)]
    with running_engine(report=reports.append) as engine:
        module = engine.wait_until_ready().module
        calls = iter(range(10_000))
        real_call = type(module).__call__

        def break_once(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            if inputs.shape == (2, 1) and next(calls) == 5:
                raise RuntimeError("planted")
            return real_call(self, inputs, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(module), "__call__", break_once)
            let_prompts_take_no_time(patch)  # else the first may end before both step together
            rows = ask(engine, *(request(prompt, NUM_TOKENS) for prompt in prompts))
    assert len(reports) == 2
    for prompt, found in zip(prompts, rows, strict=True):
        assert_told(found, of_a_plain_pass("qwen3", prompt, [token for token, _ in found]))


def test_an_answer_that_comes_past_the_start_of_quantised_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row leaves one batch for another one there: told is what was drawn from."""
    kv = KvSettings(bits=4, scheme="uniform", group_size=32, start=100)
    drawn_from: dict[int, np.ndarray] = {}
    real = Decoder.of

    def listening(row: Any, vocab_size: int) -> Any:
        def listen(tokens: mx.array, logits: mx.array) -> mx.array:
            drawn_from[len(tokens)] = np.array(logits[0] - mx.logsumexp(logits[0]))
            return logits

        decoder = real(row, vocab_size)
        return replace(decoder, processors=[*decoder.processors, listen])

    monkeypatch.setattr(Decoder, "of", listening)
    engine = Engine(
        tiny_model("qwen3", scale=WIDE), engine_settings(kv=kv), grammar_tokenizer=lambda _: None, report=print
    )
    engine.start()
    try:
        engine.wait_until_ready(60)
        prompt = prompt_of(90)
        [found] = ask(engine, request(prompt, NUM_TOKENS))
    finally:
        engine.stop(60)
    assert len(found) == NUM_TOKENS
    assert_lawful(found, is_greedy=True)
    assert_told(found, np.stack([drawn_from[len(prompt) + index] for index in range(NUM_TOKENS)]))


def test_under_a_grammar_they_are_the_models_own() -> None:
    """A token that the grammar forces is told with the likelihood that it had without the grammar."""
    tokenizer = load_tokenizer(tiny_model("qwen3"))
    prompt, eos = prompt_of(40, 3), sorted(tokenizer.stop_token_ids)

    def guide(width: int) -> Any:
        return llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=width, eos_token=eos)

    with running_engine(grammar_tokenizer=guide) as engine:
        grammar = Grammar('start: "yes and no"')
        [found] = ask(engine, request(prompt, NUM_TOKENS, stop=eos, grammar=grammar))
    assert tokenizer.decode([token for token, _ in found]) == "yes and no"
    assert_told(found, of_a_plain_pass("qwen3", prompt, [token for token, _ in found]))


def test_a_row_that_raises_beside_one_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone, also when it asks itself."""
    real = decode_group.sampler_for

    def breaking(params: Any, *more: int) -> Any:
        sampler, calls = real(params, *more), iter(range(100))
        return (lambda logprobs: 1 / 0 if next(calls) == 4 else sampler(logprobs)) if params.seed == 13 else sampler

    prompt = prompt_of(40)
    with running_engine() as engine:
        monkeypatch.setattr(decode_group, "sampler_for", breaking)
        with held(engine):
            broken = engine.submit(asking(request(prompt_of(50, 2), NUM_TOKENS, temperature=1.0, seed=13)))
            good = engine.submit(asking(request(prompt, NUM_TOKENS)))
        found = said(good)
        events = [event for batch in broken.batches(60) for event in batch]
    assert sum(isinstance(event, TokenDelta) and event.logprobs is not None for event in events) == 4
    assert_told(found, of_a_plain_pass("qwen3", prompt, [token for token, _ in found]))


# --- the reader by itself ---------------------------------------------------------------------------------------------


def test_logits_of_half_precision_are_told_in_single_precision() -> None:
    """Their own rounding is the model's; nothing is added to it."""
    logits = mx.random.normal((1, 500), key=mx.random.key(1)).astype(mx.bfloat16) * 4
    reader = LogprobReader(3)
    assert reader(mx.zeros(7), logits) is logits
    exact = np.array(logits.astype(mx.float32), dtype=np.float64)[0]
    exact -= np.log(np.exp(exact).sum())
    told = reader.take(7, 11)
    assert told.logprob == pytest.approx(exact[11], abs=1e-5)
    assert [value for _, value in told.top] == pytest.approx(sorted(exact, reverse=True)[:3], abs=1e-5)


@pytest.mark.parametrize("drawn", range(6))
def test_of_equally_likely_tokens_the_drawn_one_comes_first(drawn: int) -> None:
    """Whichever it is and however few are told: a greedy draw is the first of the likeliest."""
    reader = LogprobReader(2)
    reader(mx.zeros(1), mx.zeros((1, 6)))
    told = reader.take(1, drawn)
    assert told.top[0][0] == drawn and len(told.top) == 2


@pytest.mark.parametrize(("num_top", "num_told"), [(0, 0), (6, 6), (20, 6)])
def test_no_more_than_there_are(num_top: int, num_told: int) -> None:
    """None where none are wanted, all where the vocabulary has no more."""
    reader = LogprobReader(num_top)
    reader(mx.zeros(1), mx.arange(6)[None].astype(mx.float32))
    assert [token for token, _ in reader.take(1, 0).top] == [5, 4, 3, 2, 1, 0][:num_told]
