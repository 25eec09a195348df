"""The watchdog ends what makes no progress or decodes too long, and never a healthy prompt, however slow. The clock is
the tests' own."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.core import GenerationDone, GenerationFailed, TokenDelta
from kvserve.engine import prefill_pool, turn_order
from kvserve.engine import rows as rows_module
from kvserve.engine import scheduler as scheduler_module
from kvserve.engine.decode import DecodePool
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.waiting_for_prefix import WaitingForPrefix
from kvserve.errors import NoProgress
from tests.engine.engines import cached, collect, generate, held, prompt_of, request, running_engine

LIMIT_SECONDS = 600.0
SLOW_PROMPT = prompt_of(400, 1)


class SlowClock:
    """`time.monotonic` as the engine reads it, and what is added to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.late_seconds = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.late_seconds, perf_counter=time.perf_counter)
        for module in (rows_module, turn_order, prefill_pool):
            patch.setattr(module, "time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SlowClock:
    return SlowClock(monkeypatch)


def slow_chunks(clock: SlowClock, patch: pytest.MonkeyPatch, seconds: float, num_good: int = 10**9) -> None:
    """Every chunk takes so long; those behind the first `num_good` compute nothing."""
    step, num_chunks = Prefill.step, 0

    def slow(prefill: Prefill, *arguments: Any) -> int:
        nonlocal num_chunks
        num_chunks += 1
        clock.late_seconds += seconds
        return step(prefill, *arguments) if num_chunks <= num_good else 0

    patch.setattr(Prefill, "step", slow)


def test_a_prompt_that_takes_longer_than_the_limit_beside_a_stream_ends_with_an_answer(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E7: 100k tokens at a rate that needs 1,000 seconds: it was ended at 600, and again when it was sent again."""
    with running_engine(watchdog_seconds=LIMIT_SECONDS, prefill_step_size=16) as engine:
        [alone] = generate(engine, request(SLOW_PROMPT, 4))
        engine.clear_cache()
        slow_chunks(clock, monkeypatch, 40)
        with held(engine):
            stream, slow = engine.submit(request(prompt_of(20), 100_000)), engine.submit(request(SLOW_PROMPT, 4))
        found = collect(slow)
        stream.cancel()
    assert clock.late_seconds >= 1000
    assert isinstance(found.end, GenerationDone) and found.end.reason == "length"
    assert found.tokens == alone.tokens


def test_a_row_that_decodes_for_longer_than_the_limit_is_ended(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt does not count; what that computed is there for the next try."""
    with running_engine(watchdog_seconds=LIMIT_SECONDS, prefill_step_size=16) as engine:
        with monkeypatch.context() as patch:
            slow_chunks(clock, patch, 100)
            endless = engine.submit(request(SLOW_PROMPT, 100_000))
            batch = next(each for each in endless.batches(60) if any(isinstance(event, TokenDelta) for event in each))
        assert clock.late_seconds > LIMIT_SECONDS and not isinstance(batch[-1], GenerationDone)
        clock.late_seconds += LIMIT_SECONDS + 1
        ended = collect(endless)
        [again] = generate(engine, request(SLOW_PROMPT, 2))
    assert isinstance(ended.end, GenerationDone) and ended.end.reason == "watchdog"
    assert cached(again) == len(SLOW_PROMPT) - 1


def test_a_row_that_makes_no_progress_is_ended_and_goes_on_where_it_was(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream that does. Its client hears why; the next try computes only the rest."""
    with running_engine(watchdog_seconds=LIMIT_SECONDS, prefill_step_size=16) as engine:
        with monkeypatch.context() as patch:
            slow_chunks(clock, patch, 0.0, num_good=11)  # the first one is the stream's
            with held(engine):
                stream, stuck = engine.submit(request(prompt_of(17), 100_000)), engine.submit(request(SLOW_PROMPT, 4))
            for batch in stuck.batches(60):
                if any(getattr(event, "num_done_tokens", 0) == 160 for event in batch):
                    break
            clock.late_seconds += LIMIT_SECONDS - 60
            engine.cache_report()
            assert (engine.status.num_prefilling, engine.status.num_decoding) == (1, 1)
            clock.late_seconds += 120
            end = collect(stuck).end
        stream.cancel()
        [again] = generate(engine, request(SLOW_PROMPT, 4))
    assert isinstance(end, GenerationFailed) and isinstance(end.error, NoProgress)
    assert "600 seconds (GENERATION_WATCHDOG_SECONDS)" in str(end.error)
    assert cached(again) == 160


def test_a_row_that_waits_for_what_never_comes_is_ended(clock: SlowClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that never answers, say: nothing was computed for it, though nobody else was before it."""
    with running_engine(watchdog_seconds=LIMIT_SECONDS) as engine:
        monkeypatch.setattr(WaitingForPrefix, "_is_restoring", lambda *_: True)
        waiting = engine.submit(request(SLOW_PROMPT, 4))
        engine.cache_report()
        clock.late_seconds += LIMIT_SECONDS + 1
        end = collect(waiting).end
    assert isinstance(end, GenerationFailed) and isinstance(end.error, NoProgress)


def test_a_prompt_that_is_computed_again_does_not_count_either(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch broke, and nothing of the prompt was kept: its answer ended in its middle."""
    real, num_broken = DecodePool._next, 0

    def breaking(pool: DecodePool, group: Any) -> Any:
        nonlocal num_broken
        if not num_broken and any(len(row.generated) == 3 for row in group.rows.values()):
            num_broken += 1
            raise RuntimeError("the batch broke")
        return real(pool, group)

    wanted = replace(request(SLOW_PROMPT, 8), ttl_seconds=0)
    with running_engine(watchdog_seconds=LIMIT_SECONDS, prefill_step_size=16) as engine:
        [alone] = generate(engine, wanted)
        monkeypatch.setattr(DecodePool, "_next", breaking)
        slow_chunks(clock, monkeypatch, 40)
        [found] = generate(engine, wanted)
    assert num_broken == 1 and clock.late_seconds >= 2000
    assert isinstance(found.end, GenerationDone) and found.end.reason == "length"
    assert found.tokens == alone.tokens


def test_a_row_that_the_disk_still_gives_something_is_not_ended(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt on a slow disk: all of it takes longer than the limit, no part of it does."""
    num_parts = 0

    def slow(_: PrefixCache, pinned: PinnedPrefix) -> bool:
        nonlocal num_parts
        num_parts += 1
        clock.late_seconds += 100
        pinned.num_restored_tokens += 16
        return num_parts < 12

    with running_engine(watchdog_seconds=LIMIT_SECONDS) as engine:
        monkeypatch.setattr(PrefixCache, "is_restoring", slow)
        [found] = generate(engine, request(SLOW_PROMPT, 4))
    assert clock.late_seconds > LIMIT_SECONDS
    assert isinstance(found.end, GenerationDone) and found.end.reason == "length"


def test_a_row_that_waits_for_what_streams_are_owed_is_not_ended(
    clock: SlowClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long chunk of another row, and a stream that is to have nine times as long."""
    now = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: clock.late_seconds)
    step_group, num_steps = DecodePool._step_group, 0

    def slow_step(pool: DecodePool, group: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        clock.late_seconds += 20
        return step_group(pool, group)

    with running_engine(watchdog_seconds=LIMIT_SECONDS, prefill_step_size=16, stream_share=0.9) as engine:
        stream = engine.submit(request(prompt_of(17), 100_000))
        next(each for each in stream.batches(60) if any(isinstance(event, TokenDelta) for event in each))
        rows: list[RequestHandle] = []
        step = Prefill.step

        def slow(prefill: Prefill, *arguments: Any) -> int:
            if not rows:
                clock.late_seconds += 100
                rows.append(engine.submit(request(prompt_of(20, 2), 1)))
            return step(prefill, *arguments)

        with held(engine):
            monkeypatch.setattr(scheduler_module, "time", now)
            monkeypatch.setattr(Prefill, "step", slow)
            monkeypatch.setattr(DecodePool, "_step_group", slow_step)
            monkeypatch.setattr(Row, "decoding_seconds", lambda *_: 0.0)
            long = engine.submit(request(SLOW_PROMPT, 1))
        while not rows:
            time.sleep(0.01)
        end = collect(rows[0]).end
        long.cancel()
        stream.cancel()
    assert num_steps * 20 > LIMIT_SECONDS
    assert isinstance(end, GenerationDone) and end.reason == "length"
