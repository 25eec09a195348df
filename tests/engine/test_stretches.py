"""Whose prompt computes next, and for how long running streams wait. The clock is the test's own."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.engine import stretches as stretches_module
from kvserve.engine.prefill import NUM_NEWEST_CHUNKS, ChunkLength
from kvserve.engine.stretches import (
    CHUNK_SECONDS_ALONE,
    CHUNK_SECONDS_BESIDE_STREAMS,
    STRETCH_SECONDS_ALONE,
    Stretches,
)

TOKENS_PER_SECOND = 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clock.now` is what `time.monotonic` says."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stretches_module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def stretches() -> Stretches:
    length = ChunkLength(max_tokens=4096)
    for _ in range(NUM_NEWEST_CHUNKS):
        length.measured(TOKENS_PER_SECOND, 1.0)
    return Stretches(length)


def prefill(num_left: int) -> Any:
    return SimpleNamespace(num_left=num_left)


def compute(stretches: Stretches, prefills: list[Any], clock: Any, *, is_beside_streams: bool) -> list[Any]:
    """Whose chunks one stretch had, each as long as it may be; those that are through leave."""
    order = []
    while (chosen := stretches.next(prefills, is_beside_streams=is_beside_streams)) is not None:
        num_tokens = min(chosen.num_left, int(stretches.chunk_seconds() * TOKENS_PER_SECOND))
        chosen.num_left -= num_tokens
        clock.now += num_tokens / TOKENS_PER_SECOND
        order.append(chosen)
        if not chosen.num_left:
            prefills.remove(chosen)
    assert stretches.end() == bool(order)
    return order


def test_prompts_that_come_together_all_enter_before_the_first_step(clock: Any, stretches: Stretches) -> None:
    """Eight short prompts take longer than one chunk may, and still nobody decodes alone."""
    prefills = [prefill(160) for _ in range(8)]
    expected = list(prefills)
    assert 8 * 160 / TOKENS_PER_SECOND > CHUNK_SECONDS_ALONE
    assert compute(stretches, prefills, clock, is_beside_streams=False) == expected


def test_a_flood_of_prompts_keeps_nobody_longer_than_a_stretch(clock: Any, stretches: Stretches) -> None:
    """What does not fit any more waits for the next stretch, which comes behind a step."""
    started = clock.now
    prefills = [prefill(160) for _ in range(50)]
    assert len(compute(stretches, prefills, clock, is_beside_streams=False)) == 12
    assert clock.now - started <= STRETCH_SECONDS_ALONE
    assert len(compute(stretches, prefills, clock, is_beside_streams=True)) == 1


def test_beside_streams_a_stretch_is_as_long_as_one_chunk(clock: Any, stretches: Stretches) -> None:
    """A running stream waits for a quarter of a second, whoever prefills."""
    started = clock.now
    prefills = [prefill(10_000), prefill(100), prefill(100), prefill(100)]
    compute(stretches, prefills, clock, is_beside_streams=True)
    assert clock.now - started == pytest.approx(CHUNK_SECONDS_BESIDE_STREAMS)


def test_a_long_prompt_alone_gets_one_chunk_per_stretch(clock: Any, stretches: Stretches) -> None:
    """Between its chunks the engine looks at who came and who left, at least once a second."""
    long = prefill(10_000)
    assert compute(stretches, [long], clock, is_beside_streams=False) == [long]
    assert long.num_left == 10_000 - CHUNK_SECONDS_ALONE * TOKENS_PER_SECOND


def test_oldest_and_shortest_begin_by_turns(clock: Any, stretches: Stretches) -> None:
    """A long prompt goes on beside a stream of short ones, and these beside it."""
    long, short = prefill(100_000), prefill(5_000)
    begun = [compute(stretches, [long, short], clock, is_beside_streams=True)[0] for _ in range(4)]
    assert begun == [long, short, long, short]


def test_without_prefills_there_is_no_stretch(stretches: Stretches) -> None:
    """And nothing to end."""
    assert stretches.next([], is_beside_streams=False) is None
    assert not stretches.end()
