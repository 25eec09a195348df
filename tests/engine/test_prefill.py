"""The length of prefill chunks follows measured time."""

import mlx.core as mx
import pytest

from kvserve.engine import prefill as prefill_module
from kvserve.engine.cache_records import CacheLease
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.prefill import FIRST_CHUNK_TOKENS, NUM_NEWEST_CHUNKS, ChunkLength, Prefill
from kvserve.engine.rows import RequestHandle, Row
from tests.engine.engines import prompt_of, request
from tests.models import tiny_model


def test_the_first_chunk_is_short_the_next_follow_the_clock() -> None:
    """A chunk takes about the seconds it may: twice the rate, twice the tokens, in multiples of 16."""
    length = ChunkLength(max_tokens=2048)
    assert length.within(0.25, 0) == FIRST_CHUNK_TOKENS
    length.measured(256, 0.5)
    assert length.within(0.25, 4096) == 128
    for _ in range(NUM_NEWEST_CHUNKS):
        length.measured(128, 0.125)
    assert length.within(0.25, 4096) == 256
    assert length.within(0.27, 4096) == 272


def test_the_slowest_of_the_newest_chunks_counts() -> None:
    """One slow chunk makes the next ones shorter at once, a quick one among slow ones does not make them longer."""
    length = ChunkLength(max_tokens=2048)
    for _ in range(NUM_NEWEST_CHUNKS):
        length.measured(256, 0.25)
    assert (length.within(0.25, 4096), length.fits(256, 0.25)) == (256, True)
    length.measured(256, 0.5)
    assert (length.within(0.25, 4096), length.fits(256, 0.25)) == (128, False)
    length.measured(256, 0.125)
    assert (length.within(0.25, 4096), length.fits(256, 0.25)) == (128, False)
    assert length.tokens_per_second == 2048


def test_a_chunk_stays_between_its_bounds() -> None:
    """A very slow machine still computes 16 tokens at a time, a very fast one not more than the setting."""
    length = ChunkLength(max_tokens=512)
    length.measured(256, 1000.0)
    assert length.within(0.25, 4096) == 16
    for _ in range(NUM_NEWEST_CHUNKS):
        length.measured(256, 0.0001)
    assert length.within(0.25, 4096) == 512


def test_a_prompts_chunks_grow_from_a_short_one() -> None:
    """Whatever rate another prompt left behind, the first chunk is short and each next one at most twice as long."""
    length = ChunkLength(max_tokens=2048)
    length.measured(2048, 0.1)
    assert length.within(0.25, 0) == FIRST_CHUNK_TOKENS
    assert length.within(0.25, 256) == 512
    assert length.within(0.25, 1500) == 2048


def test_a_tiny_rest_teaches_nothing() -> None:
    """The last tokens of a prompt are too few to measure a rate."""
    length = ChunkLength(max_tokens=512)
    length.measured(256, 0.25)
    length.measured(3, 0.2)
    assert length.within(0.25, 4096) == 256


# --- memory -----------------------------------------------------------------------------------------------------------

CHUNK_TOKENS = 64


def buffers_left_behind(model: LoadedModel, num_tokens: int) -> list[int]:
    """Bytes that MLX holds for reuse after each chunk of a prompt, where nothing limits it, as on a GPU."""
    row = Row(RequestHandle(request(prompt_of(num_tokens), 1)), lambda: None)
    prefill = Prefill(row, CacheLease(row, None, None), model.new_caches(), 0)  # type: ignore[arg-type]
    limit = mx.set_cache_limit(2**33)
    mx.clear_cache()
    found = []
    try:
        while prefill.num_left:
            prefill.step(model, ChunkLength(CHUNK_TOKENS), 1000.0)
            found.append(mx.get_cache_memory())
    finally:
        mx.set_cache_limit(limit)
        mx.clear_cache()
    return found


def test_a_prefill_leaves_no_buffers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of many chunks MLX holds less free memory than a chunk's own KV takes a few times; with the negative
    control, in which nothing is given back, many times that."""
    model = load(tiny_model("qwen3"), 131072)
    chunk_bytes = CHUNK_TOKENS * model.sizes.per_token
    assert max(buffers_left_behind(model, 1200)) < 4 * chunk_bytes
    monkeypatch.setattr(prefill_module.mx, "clear_cache", lambda: None)
    assert max(buffers_left_behind(model, 1200)) > 16 * chunk_bytes
