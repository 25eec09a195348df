"""The policy carried out on a real model: whose prompt computes, who enters, and how many steps streams get. Clocks are
the tests' own."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvserve.core import GenerationDone, GenerationFailed, PrefillProgress, RequestId, TokenDelta
from kvserve.engine import prefill as prefill_module
from kvserve.engine import scheduler as scheduler_module
from kvserve.engine import turn_order
from kvserve.engine.decode import DecodePool
from kvserve.engine.kv_room import KvRoom
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from tests.engine.engines import collect, generate, held, prompt_of, request, running_engine
from tests.laws import sampled

SHARED = prompt_of(200)


class PassedTime:
    """Stands for `time` where only what is told to take time does; `done` says what did, in order."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: float, what: str, real: Any) -> Any:
        """The real one, which takes so long."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            self.done.append(what)
            return real(*arguments, **named)

        return call


def order_of_chunks(patch: pytest.MonkeyPatch, before: Callable[[], None]) -> list[str]:
    """The requests whose chunks are computed, one after the other; `before` each something else happens."""
    order: list[str] = []
    step = Prefill.step

    def noted(prefill: Prefill, *arguments: Any) -> int:
        before()
        order.append(prefill.row.request.request_id)
        return step(prefill, *arguments)

    patch.setattr(Prefill, "step", noted)
    return order


def test_what_others_wait_for_is_computed_first_up_to_where_they_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: neither the oldest prompt nor the shortest, and a short row begins like it; it waited for both of them."""
    prompts = {
        "oldest": prompt_of(500, 1),
        "awaited": [*SHARED, *prompt_of(750, 2)],
        "shortest": prompt_of(300, 3),
        "waiting": [*SHARED, *prompt_of(20, 4)],
    }
    requests = {name: replace(request(prompt, 2), request_id=RequestId(name)) for name, prompt in prompts.items()}
    rows: list[RequestHandle] = []
    with running_engine(prefill_step_size=64) as engine:

        def join() -> None:
            if len(rows) < len(requests):
                rows.append(engine.submit(requests["waiting"]))

        order = order_of_chunks(monkeypatch, join)
        with held(engine):
            rows += [engine.submit(requests[name]) for name in ("oldest", "awaited", "shortest")]
        for row in rows:
            assert isinstance(collect(row).end, GenerationDone)
    changes = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert changes == ["shortest", "awaited", "waiting", "shortest", "oldest", "awaited"]
    assert 200 // 64 <= order[: order.index("waiting")].count("awaited") <= 200 // 64 + 3


def test_a_row_without_room_keeps_nobody_waiting() -> None:
    """E6: twenty tokens waited for the end of another one's long answer, behind a row that had no room."""
    with running_engine() as engine:
        budget = engine._settings.budget(engine.wait_until_ready())
        max_bytes = budget.held_bytes([1040, 600], 0.0)
    assert max_bytes > budget.peak_bytes(1500)
    with running_engine(max_batch_bytes=int(max_bytes)) as engine:
        running = engine.submit(request(prompt_of(40), 1000))
        next(running.batches(60))
        large = engine.submit(request(prompt_of(500, 1), 1000))
        engine._ask(lambda scheduler: setattr(scheduler._turn_order.waiting[0], "submitted_at", 0.0))  # it is the first
        [small] = generate(engine, request(prompt_of(20, 2), 4))
        assert (engine.status.num_waiting, engine.status.num_decoding) == (1, 1)
        running.cancel()
        large.cancel()
        ends = [collect(each).end for each in (running, large)]
    assert len(small.tokens) == 4
    assert [end.reason for end in ends if isinstance(end, GenerationDone)] == ["cancelled", "cancelled"]


def test_a_place_that_becomes_free_where_a_row_cannot_begin_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a row that has no room: who else fits was asked in vain, and not again before the stream's end."""
    enter = PrefixCache.enter

    def broken(cache: PrefixCache, row: Row, **arguments: Any) -> Any:
        if row.request.request_id == "broken":
            raise ValueError("nothing can be restored")
        return enter(cache, row, **arguments)

    monkeypatch.setattr(PrefixCache, "enter", broken)
    with running_engine() as engine:
        budget = engine._settings.budget(engine.wait_until_ready())
        max_bytes = budget.held_bytes([1040, 600], 0.0)
    with running_engine(max_batch_bytes=int(max_bytes), max_concurrent_requests=2) as engine:
        running = engine.submit(request(prompt_of(40), 1000))
        next(running.batches(60))
        large = engine.submit(request(prompt_of(500, 1), 1000))
        engine._ask(lambda scheduler: setattr(scheduler._turn_order.waiting[0], "submitted_at", 0.0))  # it is the first
        with held(engine):
            gone = engine.submit(replace(request(prompt_of(20, 2), 4), request_id=RequestId("broken")))
            small = engine.submit(request(prompt_of(20, 3), 4))
        found = collect(small)
        assert (engine.status.num_waiting, engine.status.num_decoding) == (1, 1)
        running.cancel()
        large.cancel()
        assert isinstance(collect(gone).end, GenerationFailed)
    assert len(found.tokens) == 4


@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5"), ("qwen3_5",)))
def test_nobody_waits_on_for_what_could_not_be_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for it: a row waited in vain for all of another one's prompt."""
    prompts = {"awaited": [*SHARED, *prompt_of(750, 2)], "waiting": [*SHARED, *prompt_of(40, 4)]}
    requests = {name: replace(request(prompt, 2), request_id=RequestId(name)) for name, prompt in prompts.items()}
    rows: list[RequestHandle] = []
    monkeypatch.setattr(KvRoom, "takes", lambda *_, **__: False)
    with running_engine(family, prefill_step_size=64) as engine:

        def join() -> None:
            if len(rows) < len(requests):
                rows.append(engine.submit(requests["waiting"]))

        order = order_of_chunks(monkeypatch, join)
        with held(engine):
            rows.append(engine.submit(requests["awaited"]))
        for row in rows:
            assert isinstance(collect(row).end, GenerationDone)
    assert 200 // 64 <= order.index("waiting") <= 200 // 64 + 3


@pytest.mark.parametrize(("share", "num_steps"), [(0.5, 4), (0.75, 12)])
def test_a_stream_gets_its_share_of_the_time_beside_a_prompt(
    share: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E11: a chunk takes a quarter of a second and a step a quarter of that: it was one step for each chunk."""
    clock = PassedTime()
    step_group, step = DecodePool._step_group, Prefill.step

    with running_engine(prefill_step_size=64, stream_share=share) as engine:
        for module in (scheduler_module, prefill_module):  # no rate of prefill is known: chunks take no time there
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(DecodePool, "_step_group", clock.taking(0.0625, "step", step_group))
        running = engine.submit(request(prompt_of(20), 100_000))
        next(batch for batch in running.batches(60) if any(isinstance(event, TokenDelta) for event in batch))
        with held(engine):
            monkeypatch.setattr(Prefill, "step", clock.taking(0.25, "chunk", step))
            long = engine.submit(request(prompt_of(400, 1), 1))
        collect(long)
        running.cancel()
    first, last = clock.done.index("chunk"), len(clock.done) - 1 - clock.done[::-1].index("chunk")
    between = "".join("c" if what == "chunk" else "s" for what in clock.done[first : last + 1])
    assert between.count("c") >= 400 // 64
    assert {len(steps) for steps in between.strip("c").split("c") if steps} == {num_steps}


def test_a_stream_has_the_share_of_a_long_prompts_last_chunk_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens in a quarter of a second and 7 at the end, for which a step takes a sixteenth of a second twice."""
    clock = PassedTime()
    compute, step_group = Prefill._compute, DecodePool._step_group

    with running_engine(prefill_step_size=64) as engine:
        for module in (scheduler_module, prefill_module):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(DecodePool, "_step_group", clock.taking(0.0625, "s", step_group))
        monkeypatch.setattr(Prefill, "_compute", clock.taking(0.25, "c", compute))
        running = engine.submit(request(prompt_of(20), 100_000))
        next(batch for batch in running.batches(60) if any(isinstance(event, TokenDelta) for event in batch))
        long = engine.submit(request(prompt_of(200, 1), 1))
        collect(long)
        running.cancel()
    between = "".join(clock.done).strip("s").split("c")
    assert [len(steps) for steps in between if steps][-3:] == [4, 4, 6]


def test_streams_are_owed_for_what_is_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as a chunk where a prompt is long, and streams stand still for it."""
    clock = PassedTime()
    enter, step_group, step = PrefixCache.enter, DecodePool._step_group, Prefill.step

    with running_engine(prefill_step_size=64) as engine:
        for module in (scheduler_module, prefill_module):  # no rate of prefill is known: chunks take no time there
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(DecodePool, "_step_group", clock.taking(0.0625, "step", step_group))
        running = engine.submit(request(prompt_of(20), 100_000))
        next(batch for batch in running.batches(60) if any(isinstance(event, TokenDelta) for event in batch))
        with held(engine):
            monkeypatch.setattr(PrefixCache, "enter", clock.taking(1.0, "restored", enter))
            monkeypatch.setattr(Prefill, "step", clock.taking(0.25, "chunk", step))
            long = engine.submit(request(prompt_of(100, 1), 1))
        collect(long)
        running.cancel()
    between = clock.done[clock.done.index("restored") : clock.done.index("chunk")]
    assert between == ["restored", *["step"] * 16]


def test_a_prompt_that_waits_for_its_turn_says_when_its_first_token_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others compute before it: its progress stood still for minutes without a word."""
    monkeypatch.setattr(turn_order, "TELL_SECONDS", 0.0)
    with running_engine(prefill_step_size=64) as engine:
        generate(engine, request(prompt_of(64, 9), 1))  # a speed is known
        with held(engine):
            long, short = (engine.submit(request(prompt_of(num, num), 1)) for num in (700, 350))
        told = [event for event in collect(long).progress if isinstance(event, PrefillProgress)]
        collect(short)
    waiting = [event for event in told if not event.num_done_tokens]
    assert len(waiting) > 2
    assert all(event.first_token_seconds and event.first_token_seconds > 0 for event in waiting[1:])
