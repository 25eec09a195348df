"""What is let go with a conversation: its own part of the tree and of the disk's trie, nothing of anybody else's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.disks import HASHER, MODEL, named
from tests.cache.payloads import make_tree, store
from tests.cache.test_disk_trie import add, common
from tests.integrity import check_integrity
from tests.laws import num_examples

SYSTEM = list(range(10))
ONE, OTHER = [*SYSTEM, *range(20, 40)], [*SYSTEM, *range(50, 70)]

owned = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=20)), min_size=1, max_size=8
)


def depth(tree: PrefixTree, ids: list[int]) -> int:
    """How much of a conversation that goes on is known."""
    return tree.known_depth(TokenSequence((*ids, 99)))


def discard(tree: PrefixTree, ids: list[int], owner: str) -> int:
    """Let a conversation and an owner's entries go; how many paths ended there."""
    paths = tree.discard(TokenSequence(tuple(ids)), lambda name: name == owner)
    check_integrity(tree)
    return len(paths)


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_what_two_share_stays(needs_checkpoints: bool) -> None:
    """All of the other conversation is there; of the first one what both begin with."""
    tree = make_tree(needs_checkpoints=needs_checkpoints)
    for owner, ids in (("a", ONE), ("b", OTHER)):
        store(tree, TokenSequence(tuple(ids)), (len(SYSTEM), len(ids)), owner=owner)
    before = tree.num_ram_bytes
    assert discard(tree, [], "a") == 1
    assert (depth(tree, ONE), depth(tree, OTHER)) == (len(SYSTEM), len(OTHER))
    assert tree.num_ram_bytes < before


def test_the_end_of_system_and_tools_stays() -> None:
    """The next conversation begins with it, although nobody else did so far."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)), (len(SYSTEM), len(ONE)), owner="a", kinds={len(SYSTEM): "system"})
    assert discard(tree, [], "a") == 1
    assert depth(tree, ONE) == len(SYSTEM)


def test_a_conversation_is_found_by_its_tokens() -> None:
    """Also where its entry is nobody's; tokens that go another way touch nothing."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)))
    assert discard(tree, ONE[:15], "") == discard(tree, OTHER, "") == 0
    assert depth(tree, ONE) == len(ONE)
    assert discard(tree, ONE, "") == 1
    assert depth(tree, ONE) == 0


def test_what_a_live_row_stands_on_stays() -> None:
    """It goes once nobody stands on it."""
    tree = make_tree()
    lease = store(tree, TokenSequence(tuple(ONE)), owner="a", keep=True)
    assert discard(tree, ONE, "a") == 0
    tree.release(lease)
    assert discard(tree, ONE, "a") == 1


def test_what_is_nobodys_goes_with_what_it_stands_on() -> None:
    """Such as what was computed ahead; beside another owner's conversation it stays."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)), owner="a")
    store(tree, TokenSequence((*ONE[:20], 98)))
    store(tree, TokenSequence(tuple(OTHER)), owner="b")
    store(tree, TokenSequence((*OTHER[:20], 98)))
    discard(tree, [], "a")
    assert depth(tree, [*ONE[:20], 98]) == len(SYSTEM)
    assert depth(tree, [*OTHER[:20], 98]) == 21


@given(owned)
@settings(max_examples=num_examples(60))
def test_only_what_nobody_else_has_leaves(said: list[tuple[str, list[int]]]) -> None:
    """What is left is what leads to another owner's entries, token for token."""
    tree = make_tree()
    for owner, ids in said:
        store(tree, TokenSequence(tuple(ids)), owner=owner)
    paths = zip(tree.sequences(), tree.kept_paths(), strict=True)
    others = [
        memoryview(kept.run.ids).cast("I").tolist()
        for nodes, kept in paths
        if (end := nodes[-1].sequence_end) is not None and end.owner == "b"
    ]
    discard(tree, [], "a")
    assert [depth(tree, ids) for ids in others] == [len(ids) for ids in others]
    prefixes = {tuple(ids[:end]) for ids in others for end in range(1, len(ids) + 1)}
    assert tree.stats().num_stored_tokens == len(prefixes)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6))
@settings(max_examples=num_examples(60))
def test_the_disk_lets_go_of_one_conversation(said: list[list[int]]) -> None:
    """Afterwards all others are known as deep as before, but for what only it had."""
    index, heads = BlobTrie(HASHER, MODEL), []
    for ids in said:
        add(index, ids, heads, (len(ids),))
    first, *rest = said
    for name in index.exclusive(*named(first)):
        index.forget(name)
    for ids in rest:
        if common(ids, first) < len(ids):  # what only begins the first one is its own
            assert index.find(*named(ids)).depth == len(ids)
    is_alone = all(common(ids, first) == 0 for ids in rest)
    assert not is_alone or index.find(*named(first)).depth == 0
