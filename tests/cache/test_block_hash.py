"""Block names: equal exactly for equal prefixes, and never computed twice."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.block_hash import BlockHasher, sha256
from kvserve.cache.token_run import pack
from kvserve.core import ImageSpan, TokenSequence
from tests.cache.payloads import Atom, flatten, keys_of
from tests.laws import num_examples

atoms = st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["cat", "dog"])), max_size=24)
HASHER = BlockHasher(4, "model")


@given(base=atoms, one=atoms, other=atoms, block_size=st.integers(1, 5))
@settings(max_examples=num_examples(60))
def test_common_prefix_means_common_hashes(
    base: list[Atom], one: list[Atom], other: list[Atom], block_size: int
) -> None:
    """Two sequences share as many hashes as their common prefix has whole blocks, images by digest and index."""
    sequences = [flatten([*base, *one]), flatten([*base, *other])]
    keys = [keys_of(tokens) for tokens in sequences]
    common = next((n for n, (a, b) in enumerate(zip(*keys, strict=False)) if a != b), min(map(len, keys)))
    hashes = [BlockHasher(block_size, "model").start().extended(pack(tokens)).hashes for tokens in sequences]
    num_equal = sum(a == b for a, b in zip(*hashes, strict=False))
    assert num_equal == common // block_size
    assert hashes[0][:num_equal] == hashes[1][:num_equal]


@given(atoms=atoms, cuts=st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=num_examples(60))
def test_a_chain_extended_piecewise_is_the_chain_of_the_whole(atoms: list[Atom], cuts: list[int]) -> None:
    """Wherever a chain is interrupted, from a whole sequence or a run, it ends with the same hashes."""
    tokens = flatten(atoms)
    whole = HASHER.start().extended(pack(tokens))
    chain = HASHER.start()
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        chain = chain.extended(pack(tokens, chain.num_tokens, cut))
        assert chain == whole.truncated(cut)
    assert chain.extended(pack(tokens)) == whole


def test_only_new_blocks_are_hashed() -> None:
    """A longer prompt of a known prefix costs its own blocks, not the old ones."""
    calls: list[bytes] = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return sha256(data)

    ids = tuple(range(4000))
    chain = BlockHasher(16, "model", counting).start().extended(pack(TokenSequence(ids[:3990])))
    calls.clear()
    chain.extended(pack(TokenSequence(ids)))
    assert len(calls) == 4000 // 16 - 3990 // 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BlockHasher(4, "model").start(), BlockHasher(4, "other").start()),
        (BlockHasher(4, "model").start("tenant"), BlockHasher(4, "model").start()),
        (BlockHasher(4, "model").start("a"), BlockHasher(4, "modela").start()),
        (BlockHasher(4, "model").start(), BlockHasher(2, "model").start()),
    ],
)
def test_seeds_separate(one: object, other: object) -> None:
    """Another model, tenant or block size never shares a name, not even by shifting text between the fields."""
    tokens = TokenSequence(tuple(range(16)))
    names = [set(chain.extended(pack(tokens)).hashes) for chain in (one, other)]  # type: ignore[attr-defined]
    assert not names[0] & names[1]


def test_names_are_constant() -> None:
    """What a store outside of the process holds is found again: the names change only with their format version."""
    tokens = TokenSequence((1, 2, 3, 9, 9, 9, 7, 8), (ImageSpan(3, 6, "cat"),))
    first, second = HASHER.start().extended(pack(tokens)).hashes
    assert (first.hex()[:16], second.hex()[:16]) == ("9cc7c53dce734a64", "d972f0d51c3216f0")


def test_images_of_one_size_differ() -> None:
    """Equal ids under two digests, or under one digest but another index, have different names."""
    ids = (9,) * 8
    spans = [(ImageSpan(0, 8, "cat"),), (ImageSpan(0, 8, "dog"),), (ImageSpan(0, 4, "cat"), ImageSpan(4, 8, "cat")), ()]
    names = [HASHER.start().extended(pack(TokenSequence(ids, images))).hashes for images in spans]
    assert len({name[1] for name in names}) == len(spans)


def test_a_block_has_tokens() -> None:
    """A block size of 0 is refused."""
    with pytest.raises(ValueError, match="at least one token"):
        BlockHasher(0, "model")


def test_a_long_prompt_is_hashed_in_milliseconds() -> None:
    """100,000 tokens take about 8 ms of a processor; the bound leaves room for a busy machine's slower one."""
    rng = random.Random(1)
    tokens = TokenSequence(tuple(rng.randrange(150_000) for _ in range(100_000)))
    hasher = BlockHasher(16, "model")
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        hasher.start().extended(pack(tokens))
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.06
