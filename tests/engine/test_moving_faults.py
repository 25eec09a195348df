"""KV that moves where something goes wrong, and where rows are no plain text in full precision: nothing is lost that
could be kept, and what is counted adds up."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from kvserve.core import GenerationDone, GenerationFailed, TokenSequence
from kvserve.engine import snapshot
from kvserve.engine.decode_group import Decoder
from kvserve.engine.prefill import Prefill
from kvserve.engine.rows import Row
from kvserve.engine.snapshot import CacheLayout
from tests.engine.engines import (
    CACHE,
    assert_exact,
    cached,
    collect,
    generate,
    let_watchdog_end,
    prompt_of,
    running_engine,
)
from tests.engine.full_engines import (
    NEXT_TOKENS,
    NUM_ALL_TOKENS,
    budget_bytes,
    check,
    cold,
    conversation_of,
    full_engine,
    moves_counted,
    turn,
)
from tests.engine.moving_rows import KINDS
from tests.engine.test_kv_quantisation import QWEN3, engine_of
from tests.engine.test_out_of_memory import Faults
from tests.engine.test_vision import Sighted
from tests.engine.visions import Prompted, picture
from tests.laws import sampled, sampled_cells

IN, OUT = (snapshot, "_parts_of"), (snapshot, "_fill_at_once")
STATE_IN, STATE_OUT = (CacheLayout, "read_state"), (snapshot, "_twin")
STEPS = [("qwen3", IN), ("qwen3", OUT), ("qwen3_5", IN), ("qwen3_5", OUT), ("qwen3_5", STATE_OUT)]
"""Where KV moves in and out: a layer of it, or a state."""

FEW_TOKENS = 448
"""Where quantised KV begins long before the end."""

NUM_DONE = {"qwen3": 1, "qwen3_5": 0}
"""Layers that have moved when one fails; the tiny hybrid has a single one beside its states."""


@sampled_cells(lambda family, step: step in (STATE_IN, STATE_OUT) or (family, step) == ("qwen3", IN))
@pytest.mark.parametrize(("family", "step"), [*STEPS, ("qwen3_5", STATE_IN)])
def test_an_allocation_that_fails_on_the_way_is_tried_again(
    family: str, step: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it, when layers have left already: both turns are exact, and all is found."""
    lines: list[str] = []
    with full_engine(family, NUM_ALL_TOKENS, 0.99, report=lines.append) as engine, moves_counted() as moves:
        said = conversation_of(family)
        num_states = 0
        if step == STATE_IN:  # the last one is read when all layers have moved
            with monkeypatch.context() as patch:
                counted = Faults(patch, *step, 0)
                generate(engine, turn(said.first))
                num_states = counted.num_calls
            engine.clear_cache()
        faults = Faults(monkeypatch, *step, 1, first=max(NUM_DONE[family], num_states - 1))
        generate(engine, turn(said.first))
        found = generate(engine, turn(said.second))[0]
        check(engine)
    assert faults.num_raised == 1 and lines == [] and moves["out"] == 1
    assert_exact(found, said.expected)
    assert cached(found) == said.num_kept


@sampled_cells(lambda family, step: (family, step) in {("qwen3", OUT), ("qwen3_5", IN)})
@pytest.mark.parametrize(("family", "step"), STEPS)
def test_an_allocation_that_fails_for_good_costs_what_moved(
    family: str, step: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed again: nothing of it is found in part or counted twice, and no client hears of it."""
    lines: list[str] = []
    with full_engine(family, NUM_ALL_TOKENS, 0.99, report=lines.append) as engine:
        said = conversation_of(family)
        num_faults = 4 if (family, step) == ("qwen3_5", IN) else 2  # before anything has moved all of it is tried again
        faults = Faults(monkeypatch, *step, num_faults, first=NUM_DONE[family])
        first = generate(engine, turn(said.first))[0]
        check(engine)
        found = generate(engine, turn(said.second))[0]
        check(engine)
        monkeypatch.undo()
        again = generate(engine, turn(said.third(), 4))[0]
        check(engine)
    assert faults.num_raised == num_faults
    assert (len(lines) == 1 and "could not be kept" in lines[0]) if step == IN else lines == []
    assert_exact(first, said.answer)
    assert_exact(found, said.expected)
    assert_exact(again, said.last)
    assert cached(found) < said.num_kept
    assert cached(again) == len(said.second) + len(said.expected)


@pytest.mark.parametrize("family", sampled(KINDS, {"qwen3_5"}))
def test_a_row_that_fails_by_itself_leaves_what_it_took_over(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sampler broke, not its KV."""
    real = Decoder.of

    def broken(row: Row, vocab_size: int) -> Decoder:
        def fail(tokens: mx.array, logits: mx.array) -> mx.array:
            if len(row.generated) >= 3:
                raise ValueError("no token may follow")
            return logits

        return replace(real(row, vocab_size), processors=[fail])

    with full_engine(family, NUM_ALL_TOKENS, 0.99) as engine, moves_counted() as moves:
        said = conversation_of(family)
        generate(engine, turn(said.first))
        monkeypatch.setattr(Decoder, "of", broken)
        failed = generate(engine, turn(said.second))[0]
        monkeypatch.undo()
        check(engine)
        again = generate(engine, turn(said.second))[0]
    assert isinstance(failed.end, GenerationFailed) and moves["out"] == 2
    assert_exact(again, said.expected)
    assert cached(again) >= said.num_kept


@pytest.mark.parametrize("family", sampled(KINDS, {"qwen3_5"}))
def test_a_first_turn_that_the_watchdog_ended_leaves_its_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its prefill could not keep beside it moves in, up to its last stop; nothing of the answer does."""
    with full_engine(family, NUM_ALL_TOKENS, 0.99) as engine:
        first = prompt_of(NUM_ALL_TOKENS - 156)
        answer = cold(engine, first, 12)
        with monkeypatch.context() as patch:
            let_watchdog_end(patch, lambda row: bool(row.generated))
            assert collect(engine.submit(turn(first))).end.reason == "watchdog"  # type: ignore[union-attr]
        check(engine)
        num_kept = engine.cache_report().stats.num_stored_tokens
        again = generate(engine, turn(first, 12))[0]
    assert_exact(again, answer)
    assert (250 if family == "qwen3_5" else len(first) - 60) <= cached(again) <= num_kept < len(first)


def test_nothing_leaves_for_a_row_that_is_not_kept() -> None:
    """It is to be forgotten at once (a lifetime of 0)."""
    with full_engine("qwen3", 819, 1.0) as engine:
        generate(engine, turn(prompt_of(240), 4))
        before = engine.cache_report().stats.num_stored_tokens
        generate(engine, replace(turn(prompt_of(600, 1)), ttl_seconds=0))
        assert engine.cache_report().stats.num_stored_tokens == before > 240
        assert engine._start.ledger is not None and engine._start.ledger.pressures() == ()


def test_quantised_kv_is_not_moved() -> None:
    """Its two forms share a row: it is kept as far as it fits, and found again exactly."""
    with engine_of(QWEN3) as engine:
        num_bytes = budget_bytes(engine.wait_until_ready().sizes, FEW_TOKENS, 0.9)
    settings = {"cache": replace(CACHE, max_bytes=num_bytes), "max_batch_bytes": num_bytes}
    with engine_of(QWEN3, **settings) as engine, moves_counted() as moves:
        first = prompt_of(FEW_TOKENS - 100)
        second = [*first, *generate(engine, turn(first, 16))[0].tokens, *prompt_of(NEXT_TOKENS, 1)]
        found = generate(engine, turn(second, 16))[0]
        check(engine)
        assert moves == {}
        assert_exact(found, cold(engine, second, 16))


@pytest.mark.parametrize("family", sampled(("qwen3_5_vl", "qwen3_vl"), {"qwen3_5_vl"}))
def test_rows_with_images_move(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn, with one more image, is exact; where its prefill ends inside that image all is there that was."""
    with running_engine(family) as engine:
        sighted = Sighted(family, engine)
        first = _asked(sighted, 1)
        answer = sighted.cold(first)
        second = _joined(first.followed_by(answer, ()), _asked(sighted, 2))
    with full_engine(family, len(second.tokens) + 12, 0.9, prefill_step_size=16) as engine, moves_counted() as moves:
        sighted = Sighted(family, engine)
        expected = sighted.cold(second)
        generate(engine, first.request())
        real, span = Prefill.step, second.tokens.images[-1]

        def step(self: Prefill, *args: Any) -> int:
            num_tokens = real(self, *args)
            if span.start < self.num_done < span.end:
                self.row.handle.cancel()
            return num_tokens

        monkeypatch.setattr(Prefill, "step", step)
        [cancelled] = generate(engine, second.request())
        monkeypatch.undo()
        [warm] = generate(engine, second.request())
        check(engine)
    num_kept = len(first.tokens) + len(answer)
    assert isinstance(cancelled.end, GenerationDone) and cancelled.end.reason == "cancelled"
    assert moves["out"] >= 1 and cached(cancelled) == num_kept <= cached(warm)
    assert_exact(warm, expected)


def _asked(sighted: Sighted, seed: int) -> Prompted:
    return sighted.writer.prompt("What is this? ", picture(seed, 128, 96), " Say it.")


def _joined(first: Prompted, second: Prompted) -> Prompted:
    """A prompt that begins with another one."""
    start = len(first.tokens)
    spans = tuple(replace(span, start=start + span.start, end=start + span.end) for span in second.tokens.images)
    starts = tuple(replace(each, offset=start + each.offset) for each in second.starts)
    return replace(
        first,
        tokens=TokenSequence((*first.tokens.ids, *second.tokens.ids), (*first.tokens.images, *spans)),
        starts=(*first.starts, *starts),
        images=(*first.images, *second.images),
    )


@pytest.mark.parametrize("num_faults", sampled((0, 1), {1}))
def test_states_of_missed_stops_outlive_an_allocation_that_fails(
    num_faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill's stops did not fit beside it, and at its end all of it does: an edit of any message starts there."""
    with running_engine("qwen3_5") as engine:
        cache = engine._ask(lambda scheduler: scheduler.cache)
        room, fixed_bytes, finish = cache.kv_room, engine.wait_until_ready().sizes.fixed, cache.finish
        takes, is_tight = room.takes, True

        def finish_with_room(*args: Any) -> bool:
            nonlocal is_tight
            if is_tight and num_faults:
                Faults(monkeypatch, CacheLayout, "read_kv", num_faults)
            is_tight = False
            return bool(finish(*args))

        def takes_if_there_is_room(num_bytes: int, **options: Any) -> bool:
            return (num_bytes <= fixed_bytes or not is_tight) and takes(num_bytes, **options)

        monkeypatch.setattr(room, "takes", takes_if_there_is_room)
        monkeypatch.setattr(cache, "finish", finish_with_room)
        generate(engine, turn(prompt_of(796), 4))
        assert engine.cache_report().stats.num_checkpoints > 10
