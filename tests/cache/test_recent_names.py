"""Names come from memory where they can, and are always those that hashing everything would give."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.block_hash import BlockHasher, sha256
from kvserve.cache.match import NUM_KEPT, RecentNames
from kvserve.cache.token_run import pack
from kvserve.core import TokenSequence
from tests.cache.payloads import Atom, flatten
from tests.laws import num_examples

prompts = st.lists(
    st.tuples(
        st.lists(st.one_of(st.integers(0, 1), st.sampled_from(["cat", "dog"])), max_size=12), st.sampled_from("ab")
    ),
    max_size=12,
)


@given(asked=prompts)
@settings(max_examples=num_examples(50))
def test_names_are_those_of_hashing_everything(asked: list[tuple[list[Atom], str]]) -> None:
    """Whatever was named before, in whichever partition, with images or without."""
    hasher = BlockHasher(3, "model")
    names = RecentNames(hasher)
    for atoms, partition in asked:
        tokens = flatten(atoms)
        for _ in range(2):
            named = names.name(tokens, partition)
            assert named.chain == hasher.start(partition).extended(pack(tokens))
            assert named.run.end == len(tokens)


class Counting:
    """A digest that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, data: bytes) -> bytes:
        self.num_calls += 1
        return sha256(data)


def test_only_new_blocks_are_hashed() -> None:
    """Turns of as many conversations as are remembered, taking turns, cost one hash per new block and one seed each."""
    digest = Counting()
    names = RecentNames(BlockHasher(16, "model", digest))
    rng = random.Random(3)
    conversations = [[rng.randrange(1000) for _ in range(1600)] for _ in range(NUM_KEPT)]
    for ids in conversations:
        names.name(TokenSequence(tuple(ids)), "")
    assert digest.num_calls == NUM_KEPT * (100 + 1)
    for _ in range(5):
        for ids in conversations:
            ids += [rng.randrange(1000) for _ in range(160)]
            digest.num_calls = 0
            names.name(TokenSequence(tuple(ids)), "")
            assert digest.num_calls == 10


def test_what_was_long_ago_is_forgotten() -> None:
    """Memory is bounded: a prompt that many others followed is hashed again."""
    digest = Counting()
    names = RecentNames(BlockHasher(1, "model", digest))
    for first in range(NUM_KEPT + 1):
        names.name(TokenSequence((first, 7, 7)), "")
    digest.num_calls = 0
    names.name(TokenSequence((0, 7, 7)), "")
    assert digest.num_calls >= 3


def test_cleared_names_are_gone() -> None:
    """After clear nothing of a prompt is held."""
    digest = Counting()
    names = RecentNames(BlockHasher(1, "model", digest))
    tokens = TokenSequence((1, 2, 3))
    names.name(tokens, "")
    names.clear()
    digest.num_calls = 0
    names.name(tokens, "")
    assert digest.num_calls == 4
