"""The length of prefill chunks follows measured time."""

from kvserve.engine.prefill import FIRST_CHUNK_TOKENS, NUM_NEWEST_CHUNKS, ChunkLength


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
