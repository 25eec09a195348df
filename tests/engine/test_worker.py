"""The engine on tiny real models: exact text, fair neighbours, rows that leave, limits, failures, shutdown."""

import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from kvserve.core import GenerationDone, GenerationFailed, PrefillProgress, TokenDelta
from kvserve.engine import admission, decode_group, engine_start, policy
from kvserve.engine import scheduler as scheduler_module
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import DecodeResult
from kvserve.engine.kv_room import KvRoom
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle
from kvserve.engine.worker import Engine
from kvserve.errors import ContextOverflow, EngineFailure, MemoryExhausted, ModelLoadError, NotReady, QueueFull
from tests.engine.engines import (
    FAMILIES,
    beside_stream,
    collect,
    engine_settings,
    generate,
    held,
    let_prompts_take_no_time,
    prompt_of,
    request,
    running_engine,
)
from tests.laws import TWO_KINDS, sampled
from tests.models import tiny_model


def references(family: str, prompts: list[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Greedy tokens of mlx-lm's own single-row generator."""
    model, _ = load_model(tiny_model(family))
    return [
        tuple(int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens))
        for prompt in prompts
    ]


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def first_token(generation: RequestHandle) -> None:
    """Wait until a row streams."""
    for batch in generation.batches(30):
        if any(isinstance(event, TokenDelta) for event in batch):
            return


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_mlx_lms_own_alone_and_in_a_batch(family: str) -> None:
    """Each family writes what mlx-lm's single-row generator writes, alone and beside rows of other lengths."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((40, 150, 1))]
    expected = references(family, prompts, 8)
    assert len(set(expected)) == len(expected), "the prompts must lead to different texts, else nothing is tested"
    with running_engine(family) as engine:
        alone = [generate(engine, request(prompt, 8))[0].tokens for prompt in prompts]
        together = [result.tokens for result in generate(engine, *(request(prompt, 8) for prompt in prompts))]
    assert alone == expected
    assert together == expected


def test_a_late_row_changes_nothing_for_the_running_one() -> None:
    """A row that joins and one that leaves in the middle do not change a running row's tokens."""
    with running_engine("qwen3_5") as engine:
        [undisturbed] = generate(engine, request(prompt_of(60), 32))
        running = engine.submit(request(prompt_of(60), 32))
        leaver = engine.submit(request(prompt_of(90, 1), 64))
        first_token(leaver)
        leaver.cancel()
        joiner = engine.submit(request(prompt_of(150, 2), 8))
        assert collect(running).tokens == undisturbed.tokens
        assert len(collect(joiner).tokens) == 8


def test_stop_tokens_end_a_row_and_are_not_delivered() -> None:
    """The row ends with `stop` before its stop token, which counts as generated."""
    with running_engine() as engine:
        [free] = generate(engine, request(prompt_of(40), 16))
        stop = free.tokens[5]
        [stopped] = generate(engine, request(prompt_of(40), 16, stop=[stop]))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop)]
    assert isinstance(stopped.end, GenerationDone)
    assert stopped.end.reason == "stop"
    assert stopped.end.num_generated_tokens == len(stopped.tokens) + 1


def test_a_cancelled_row_is_gone_in_prefill_and_in_decode() -> None:
    """A client that leaves frees its row, whether it prefills or decodes; the engine is idle afterwards."""
    with running_engine(prefill_step_size=64) as engine:
        prefilling = engine.submit(request(prompt_of(20_000), 16))
        wait_for(lambda: engine.status.num_prefilling == 1)
        prefilling.cancel()
        assert collect(prefilling).end.reason == "cancelled"  # type: ignore[union-attr]
        decoding = engine.submit(request(prompt_of(40), 100_000))
        first_token(decoding)
        assert engine.status.num_decoding == 1
        decoding.cancel()
        assert collect(decoding).end.reason == "cancelled"  # type: ignore[union-attr]
        status = engine.status
        assert (status.num_waiting, status.num_prefilling, status.num_decoding) == (0, 0, 0)


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(20_000, 16), (40, 100_000)], ids=["prefill", "decode"])
def test_a_cancelled_row_is_gone_within_one_step(
    monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, max_tokens: int
) -> None:
    """From the moment on at which the client is gone the model computes one step at most for nobody."""
    rows: list[RequestHandle] = []
    num_calls = num_calls_at_leave = 0
    with running_engine(prefill_step_size=64) as engine:
        module = engine.wait_until_ready().module
        real_call = type(module).__call__

        def leaving(self, *args, **kwargs):
            nonlocal num_calls, num_calls_at_leave
            num_calls += 1
            if rows and num_calls == 6:
                rows[0].cancel()
                num_calls_at_leave = num_calls
            return real_call(self, *args, **kwargs)

        monkeypatch.setattr(type(module), "__call__", leaving)
        generate(engine, request([301], 1))
        num_of_another, num_calls = num_calls, 0
        with held(engine):  # until the model's calls know which row it is
            rows.append(engine.submit(request(prompt_of(prompt_tokens), max_tokens)))
        assert collect(rows[0]).end.reason == "cancelled"  # type: ignore[union-attr]
        assert (engine.status.num_prefilling, engine.status.num_decoding) == (0, 0)
        generate(engine, request([301], 1))  # so that whatever was under way is over
    assert num_calls_at_leave == 6
    assert num_calls - num_of_another <= num_calls_at_leave + 1


def test_a_row_that_waits_can_be_cancelled() -> None:
    """A cancelled row leaves the queue without being computed."""
    with running_engine(max_concurrent_requests=1) as engine:
        running = engine.submit(request(prompt_of(40), 100_000))
        first_token(running)
        waiting = engine.submit(request(prompt_of(40), 16))
        assert engine.status.num_waiting == 1
        waiting.cancel()
        result = collect(waiting)
        assert (result.tokens, result.end.reason) == ((), "cancelled")  # type: ignore[union-attr]
        running.cancel()


def test_the_watchdog_counts_what_a_row_decodes() -> None:
    """A row over its time ends with `watchdog`; time in the queue does not count."""
    with running_engine(max_concurrent_requests=1, watchdog_seconds=0.1) as engine:
        ends = [row.end for row in generate(engine, *(request(prompt_of(40, seed), 100_000) for seed in range(2)))]
    assert [end.reason for end in ends] == ["watchdog", "watchdog"]  # type: ignore[union-attr]
    assert ends[1].timing.queue_seconds >= 0.1  # type: ignore[union-attr]


def test_limits_refuse_before_any_work() -> None:
    """Context, queue and memory limits raise at submission, with the numbers a client needs."""
    with running_engine(max_kv_size=128, max_concurrent_requests=1, max_queued_requests=1) as engine:
        with pytest.raises(ContextOverflow, match=r"128 tokens.* 128 tokens"):
            engine.submit(request(prompt_of(128)))
        with held(engine):
            running = [engine.submit(request(prompt_of(40), 1000)) for _ in range(2)]
            with pytest.raises(QueueFull) as full:
                engine.submit(request(prompt_of(40)))
        assert full.value.retry_after_seconds
        for generation in running:
            generation.cancel()
    with running_engine(max_batch_bytes=2**20) as engine, pytest.raises(MemoryExhausted, match="MAX_BATCH_BYTES"):
        engine.submit(request(prompt_of(4000)))


def test_more_rows_than_a_generators_default_all_decode() -> None:
    """Every admitted row gets tokens, also beyond the 32 rows that the library's batch holds by default."""
    with running_engine(max_concurrent_requests=40) as engine:
        results = generate(engine, *(request(prompt_of(8, seed), 3) for seed in range(40)))
    assert {len(result.tokens) for result in results} == {3}


def test_a_rows_clock_starts_with_its_own_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are admitted together compute one after the other; what they wait for each other is queueing."""
    seen: dict[RequestHandle, tuple[float, float]] = {}
    ended_at, step = 0.0, Prefill.step

    def watched(prefill: Prefill, *arguments: Any) -> int:
        nonlocal ended_at
        seen.setdefault(prefill.row.handle, (prefill.row.submitted_at, ended_at))
        num_tokens = step(prefill, *arguments)
        ended_at = time.monotonic()
        return num_tokens

    monkeypatch.setattr(Prefill, "step", watched)
    with running_engine(prefill_step_size=64) as engine:
        with held(engine):
            rows = [engine.submit(request(prompt_of(300, seed), 1)) for seed in range(4)]
        queued = [collect(row).end.timing.queue_seconds for row in rows]  # type: ignore[union-attr]
    for row, seconds in zip(rows, queued, strict=True):
        submitted_at, others_computed_until = seen[row]
        assert submitted_at + seconds >= others_computed_until


def test_rows_beyond_the_memory_budget_wait_for_their_turn() -> None:
    """Two rows that do not fit together are computed one after the other, and both whole."""
    with running_engine(max_batch_bytes=3 * 2**20) as engine:
        results = generate(engine, *(request(prompt_of(100, seed), 12) for seed in range(3)))
        alone = [generate(engine, request(prompt_of(100, seed), 12))[0].tokens for seed in range(3)]
    assert [result.tokens for result in results] == alone


def test_an_answer_that_would_outgrow_the_memory_ends_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and with the number of tokens that fit; the terminal and the report say so."""
    monkeypatch.setattr(admission, "ANSWER_ALLOWANCE_TOKENS", 4)
    lines: list[str] = []
    with running_engine(max_batch_bytes=2**19, report=lines.append) as engine:
        budget = engine._settings.budget(engine.wait_until_ready())
        most = budget.most_tokens(10**6)
        [result] = generate(engine, request(prompt_of(most - 20), 100_000))
        pressures = engine.status.memory.pressures if engine.status.memory is not None else ()
    assert len(result.tokens) == 20
    assert [each.bound for each in pressures] == ["running_rows"] and "MAX_BATCH_BYTES" in lines[0]


def test_rows_that_outgrow_their_memory_wait_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers longer than their allowance: the newest row waits until there is room, and writes what it writes
    alone."""
    monkeypatch.setattr(admission, "ANSWER_ALLOWANCE_TOKENS", 4)
    wanted = [request(prompt_of(40, seed), 120) for seed in range(2)]
    held_bytes: list[float] = []
    with running_engine() as engine:
        alone = [generate(engine, each)[0].tokens for each in wanted]
        sizes = engine.wait_until_ready().sizes
    budget_bytes = 2.4 * (sizes.peak(100) + sizes.copied(sizes.peak(100)))
    step = DecodePool.step

    def watched(pool: DecodePool) -> DecodeResult:
        held_bytes.append(pool.held_bytes() + sizes.copied(pool.held_bytes()))
        return step(pool)

    monkeypatch.setattr(DecodePool, "step", watched)
    with running_engine(max_batch_bytes=int(budget_bytes)) as engine:
        results = generate(engine, *wanted)
    assert [result.tokens for result in results] == alone
    assert max(held_bytes) <= budget_bytes + 2 * sizes.per_token * (1 + sizes.copy_share)


def test_a_row_whose_sampler_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded row's broken sampler ends that row with an error; its neighbours' text is that of a quiet run."""
    real = decode_group.sampler_for

    def breaking(params, *more):
        sampler = real(params, *more)
        if params.seed != 13:
            return sampler
        calls = iter(range(100))
        return lambda logprobs: mx.array("broken") if next(calls) == 4 else sampler(logprobs)

    with running_engine() as engine:
        quiet = generate(engine, request(prompt_of(40), 12), request(prompt_of(70, 1), 12))
        monkeypatch.setattr(decode_group, "sampler_for", breaking)
        rows = [
            request(prompt_of(40), 12),
            request(prompt_of(50, 2), 12, temperature=1.0, seed=13),
            request(prompt_of(70, 1), 12),
        ]
        left, broken, right = generate(engine, *rows)
    assert isinstance(broken.end, GenerationFailed)
    assert isinstance(broken.end.error, EngineFailure)
    assert len(broken.tokens) == 4
    assert [left.tokens, right.tokens] == [result.tokens for result in quiet]


def test_a_broken_generator_costs_no_row_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a whole batch raises once, its rows, a seeded one too, enter again and write what they write undisturbed."""
    reports: list[str] = []
    rows = request(prompt_of(40), 12), request(prompt_of(70, 1), 12, temperature=1.0, seed=5)
    with running_engine("qwen3_5", report=reports.append) as engine:
        wanted = generate(engine, *rows)
        module = engine.wait_until_ready().module
        calls = iter(range(10_000))
        real_call = type(module).__call__

        def break_once(self, inputs, *args, **kwargs):
            if inputs.shape == (2, 1) and next(calls) == 5:
                raise RuntimeError("planted")
            return real_call(self, inputs, *args, **kwargs)

        monkeypatch.setattr(type(module), "__call__", break_once)
        let_prompts_take_no_time(monkeypatch)  # else the first may end before both step together
        results = generate(engine, *rows)
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    assert len(reports) == 2 and all("A decode batch failed (RuntimeError: planted); " in line for line in reports)


def test_a_prompt_that_breaks_the_model_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a prefill is that request's error; a running stream goes on."""
    with running_engine() as engine:
        [quiet] = generate(engine, request(prompt_of(40), 40))
        module = engine.wait_until_ready().module
        real_call = type(module).__call__

        def break_chunks(self, inputs, *args, **kwargs):
            if inputs.shape[1] > 1:  # the stream's prompt is kept
                raise ValueError("planted")
            return real_call(self, inputs, *args, **kwargs)

        monkeypatch.setattr(type(module), "__call__", break_chunks)
        [broken], stream = beside_stream(
            engine, prompt_of(40), 40, lambda: generate(engine, request(prompt_of(100), 8))
        )
    assert isinstance(broken.end, GenerationFailed)
    assert "planted" in str(broken.end.error)
    assert stream.tokens == quiet.tokens


def test_an_engine_defect_fails_the_rows_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no row can be blamed for ends all rows with an error, is reported, and the next request is served."""
    reports: list[str] = []
    with running_engine(report=reports.append) as engine:
        running = engine.submit(request(prompt_of(40), 100_000))
        first_token(running)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_module.Scheduler, "_begin_ready", lambda _: 1 / 0)
            assert isinstance(collect(running).end, GenerationFailed)
        assert len(generate(engine, request(prompt_of(40), 8))[0].tokens) == 8
        assert engine.status.num_waiting == 0
    assert "ZeroDivisionError" in reports[0]


def test_running_streams_get_a_step_between_prefill_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long prompt prefills, a running stream receives a token at least once per reported chunk. A fast machine
    computes several chunks in what a slice may last, so a slice is one chunk here."""
    monkeypatch.setattr(policy, "CHUNK_SECONDS_BESIDE_STREAMS", 0.0)
    with running_engine(prefill_step_size=64) as engine:
        running = engine.submit(request(prompt_of(40), 100_000))
        first_token(running)
        long = engine.submit(request(prompt_of(400), 4))
        num_chunks = len(collect(long).progress)
        running.cancel()
        num_tokens = len(collect(running).tokens)
    assert num_chunks >= 400 // 64
    assert num_tokens >= num_chunks


@pytest.mark.parametrize("sends", sampled([True, False], [True]))
def test_no_token_waits_for_anything_but_a_step(monkeypatch: pytest.MonkeyPatch, sends: bool) -> None:
    """What a stream wrote is on its way before other rows enter, compute a chunk or leave what they have; the control
    does not see to it."""
    monkeypatch.setattr(policy, "CHUNK_SECONDS_BESIDE_STREAMS", 0.01)  # a step between two chunks
    num_left: list[int] = []
    with running_engine(prefill_step_size=128) as engine:

        def look(owner: type, name: str) -> None:
            real = getattr(owner, name)

            def looked(*given: Any, **named: Any) -> Any:
                num_left.append(len(engine._dispatcher._waiting))
                return real(*given, **named)

            monkeypatch.setattr(owner, name, looked)

        if not sends:
            engine._ask(lambda scheduler: setattr(scheduler, "_send_tokens", lambda: None))
        running = engine.submit(request(prompt_of(40), 100_000))
        first_token(running)
        for owner, name in ((Prefill, "step"), *((PrefixCache, name) for name in ("pin", "enter", "finish"))):
            look(owner, name)
        collect(engine.submit(request(prompt_of(600), 4)))
        running.cancel()
        collect(running)
    assert len(num_left) >= 600 // 128
    assert any(num_left) != sends


def test_no_token_waits_for_a_call() -> None:
    """While the engine stands still between two steps, its streams have all that was written."""
    with running_engine() as engine:
        running = engine.submit(request(prompt_of(40), 100_000))
        for _ in range(3):  # the first one waits for nothing
            first_token(running)
        with held(engine):
            wait_for(lambda: engine._inbox.empty() and not engine._dispatcher._waiting)
        running.cancel()
        collect(running)


def test_short_prompts_that_came_together_enter_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four short prompts are prefilled within one slice: the first step that any of them gets has all four."""
    monkeypatch.setattr(policy, "CHUNK_SECONDS_BESIDE_STREAMS", 30.0)
    monkeypatch.setattr(policy, "PREFILL_SLICE_SECONDS", 30.0)
    num_rows_per_step: list[int] = []
    step_all = DecodePool.step_all

    def counted(pool: DecodePool) -> DecodeResult:
        num_rows_per_step.append(pool.num_rows)
        return step_all(pool)

    monkeypatch.setattr(DecodePool, "step_all", counted)
    with running_engine() as engine:
        num_rows_per_step.clear()
        generate(engine, *(request(prompt_of(40, seed), 8) for seed in range(4)))
    assert num_rows_per_step == [4]


def test_a_short_prompt_that_comes_during_another_ones_prefill_enters_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks for new requests before it ends a slice of prefill: the first decode step has both rows."""
    monkeypatch.setattr(policy, "PREFILL_SLICE_SECONDS", 30.0)
    num_rows_per_step: list[int] = []
    step_all, step = DecodePool.step_all, Prefill.step
    rows = []

    def counted(pool: DecodePool) -> DecodeResult:
        num_rows_per_step.append(pool.num_rows)
        return step_all(pool)

    def joined(prefill: Prefill, *arguments: Any) -> int:
        if len(rows) == 1:
            rows.append(engine.submit(request(prompt_of(40, 1), 8)))
        return step(prefill, *arguments)

    with running_engine() as engine:
        monkeypatch.setattr(DecodePool, "step_all", counted)
        monkeypatch.setattr(Prefill, "step", joined)
        with held(engine):
            rows.append(engine.submit(request(prompt_of(40), 8)))
        collect(rows[0])
        collect(rows[1])
    assert num_rows_per_step == [2]


@pytest.mark.parametrize(("part", "broken"), [(PrefixCache, "pin"), (PrefixCache, "make_room"), (KvRoom, "make_some")])
def test_a_row_between_two_stages_is_not_lost_when_the_engine_breaks(
    part: type, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in the cache while rows move on, every client hears of its row's end and its place is free."""
    real = getattr(part, broken)
    failures = iter([True])

    def failing(each: object, *args: object, **kwargs: object) -> object:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return real(each, *args, **kwargs)

    with running_engine() as engine:
        monkeypatch.setattr(part, broken, failing)
        rows = [engine.submit(request(prompt_of(40, seed), 4)) for seed in range(3)]
        ends = [collect(row, poll_seconds=60).end for row in rows]
        assert all(isinstance(end, GenerationDone | GenerationFailed) for end in ends)
        wait_for(lambda: engine.status.num_waiting == engine.status.num_prefilling == engine.status.num_decoding == 0)
        [again] = generate(engine, request(prompt_of(40), 4))
    assert isinstance(again.end, GenerationDone)


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_what_a_cancelled_prefill_computed_is_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that gives up in the middle of its prompt and asks again starts from about where it was."""
    with running_engine(family, prefill_step_size=64) as engine:
        prompt, step = prompt_of(500), Prefill.step

        def left(prefill: Prefill, *arguments: Any) -> int:
            num_tokens = step(prefill, *arguments)
            if prefill.num_done >= 320:
                prefill.row.handle.cancel()
            return num_tokens

        with monkeypatch.context() as patch:
            patch.setattr(Prefill, "step", left)
            [first] = generate(engine, request(prompt, 4))
        done = first.progress[-1].num_done_tokens
        [again] = generate(engine, request(prompt, 4))
    assert first.end.reason == "cancelled" and 320 <= done < 499  # type: ignore[union-attr]
    assert again.end.num_cached_tokens >= done  # type: ignore[union-attr]


def test_a_prompt_that_is_read_counts_as_memory_from_its_first_chunk_to_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole prompt is in the report's bytes of running requests at every chunk, however much of it is computed."""
    num_live_bytes: list[float] = []
    step = Prefill.step
    with running_engine(prefill_step_size=64) as engine:
        scheduler = engine._ask(lambda scheduler: scheduler)

        def watched(prefill: Prefill, *arguments: Any) -> int:
            num_live_bytes.append(scheduler.report().stats.live_bytes)
            return step(prefill, *arguments)

        monkeypatch.setattr(Prefill, "step", watched)
        generate(engine, request(prompt_of(600), 1))
        sizes = engine.wait_until_ready().sizes
    assert len(num_live_bytes) >= 600 // 64
    assert set(num_live_bytes) <= {sizes.live(600), sizes.live(601)}, "with room for the answer once it computes"


def test_progress_reaches_the_whole_prompt_but_its_last_token() -> None:
    """Progress grows to the prompt's length less the token that gives the first answer token."""
    with running_engine(prefill_step_size=128) as engine:
        [result] = generate(engine, request(prompt_of(500), 2))
    done = [event.num_done_tokens for event in result.progress]
    assert done == sorted(done)
    assert replace(result.progress[-1], first_token_seconds=None) == PrefillProgress(499, 500, 0)


def test_seeded_rows_repeat_and_differ_by_seed() -> None:
    """The same seed gives the same text, also beside other rows, and 0 is one; another seed another text."""
    with running_engine() as engine:

        def draw(seed: int):
            return request(prompt_of(40), 12, temperature=1.5, seed=seed)

        [alone] = generate(engine, draw(0))
        first, again, other = generate(engine, draw(0), draw(0), draw(2))
    assert first.tokens == again.tokens == alone.tokens
    assert other.tokens != first.tokens


def test_shutdown_ends_streams_and_refuses_new_ones() -> None:
    """`stop` ends a running and a waiting row with `shutdown`, joins the thread, and later submissions are refused."""
    with running_engine(max_concurrent_requests=1) as engine:
        running = engine.submit(request(prompt_of(40), 100_000))
        first_token(running)
        waiting = engine.submit(request(prompt_of(40), 100_000))
        engine.stop(60)
        assert [collect(row).end.reason for row in (running, waiting)] == ["shutdown"] * 2  # type: ignore[union-attr]
        assert engine.status.state == "stopped"
        assert engine.has_ended
        with pytest.raises(NotReady):
            engine.submit(request(prompt_of(40)))


def test_a_model_that_cannot_generate_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes a prompt but no further token is found out at the start, not by the first request."""
    whole = KVCache.update_and_fetch

    def only_prompts(cache: KVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if cache.offset:
            raise ValueError("no second call")
        return whole(cache, keys, values)

    monkeypatch.setattr(KVCache, "update_and_fetch", only_prompts)
    engine = Engine(tiny_model("qwen3"), engine_settings(), grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    with pytest.raises(ModelLoadError, match=r"could not be loaded: ValueError: no second call"):
        engine.wait_until_ready(60)
    engine.stop(60)


def test_whatever_goes_wrong_while_loading_reaches_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw ends the start with a message, not with a server that loads for ever."""
    monkeypatch.setattr(engine_start, "PrefixCache", lambda *_: 1 / 0)
    engine = Engine(tiny_model("qwen3"), engine_settings(), grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    with pytest.raises(ModelLoadError, match="ZeroDivisionError"):
        engine.wait_until_ready(60)
    assert engine.status.state == "failed"
    engine.stop(60)


def test_a_folder_without_a_model_is_an_error_of_the_start(tmp_path) -> None:
    """A load error reaches whoever waits for the model."""
    engine = Engine(tmp_path, engine_settings(), grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        engine.wait_until_ready(60)
    assert engine.status.state == "failed"
    engine.stop(60)
