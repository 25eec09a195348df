"""A tree that gets other names is the tree that was built under them."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.node import Lease
from kvserve.cache.records import Limits
from kvserve.cache.tree import PrefixTree
from kvserve.cache.warmed import WarmedTokens
from kvserve.core import TokenSequence
from tests.cache.payloads import WholeState, flatten, keys_of, make_tree, rows_of
from tests.integrity import check_integrity
from tests.laws import num_examples

LIMITS = Limits(10**6, 10**6, 100, 100, 0.0, 0.0)
atom = st.one_of(st.integers(0, 2), st.sampled_from(["cat", "dog"]))
talk = st.tuples(st.lists(atom, min_size=1, max_size=14), st.sampled_from(["", "a"]), st.booleans())
talks = st.lists(talk, max_size=8)


def hasher_like(tree: PrefixTree, fingerprint: str) -> BlockHasher:
    return BlockHasher(tree._hasher.block_size, fingerprint, tree._hasher.digest)


def add(tree: PrefixTree, tokens: TokenSequence, partition: str) -> Lease:
    """A row that computes all of its tokens, with a state in the middle and at its end."""
    keys = keys_of(tokens)
    lease = tree.acquire(tree.lookup(tokens, partition=partition))
    for end in (max(lease.num_tokens, len(keys) // 2), len(keys)):
        tree.extend(lease, tokens, end, rows_of(tokens), lambda end=end: WholeState(keys[:end]))  # type: ignore[misc]
    tree.mark_end(lease)
    return lease


def names(tree: PrefixTree) -> list[Any]:
    """Every path with its names, whose it is, and where rows stand with the names that they hold."""
    paths = [
        (path.chain.partition, path.run.ids, path.run.images, path.chain.seed, path.chain.hashes)
        for path in tree.kept_paths()
    ]
    return [sorted(paths, key=repr), sorted((lease.num_tokens, lease.chain.hashes) for lease in tree._leases)]


@settings(max_examples=num_examples(40), deadline=None)
@given(before=talks, after=talks, needs_checkpoints=st.booleans(), use_index=st.booleans())
def test_a_renamed_tree_is_the_tree_built_under_that_name(
    before: Any, after: Any, needs_checkpoints: bool, use_index: bool
) -> None:
    """With live rows and images, in every partition; and it goes on as that tree does, whatever is added later."""
    trees = [make_tree(LIMITS, needs_checkpoints=needs_checkpoints, use_index=use_index) for _ in range(2)]
    one, other = trees
    other.rename(hasher_like(other, "known"))
    for talk, stage in [*((talk, "before") for talk in before), (None, "rename"), *((talk, "after") for talk in after)]:
        if talk is None:
            one.rename(hasher_like(one, "known"))
            assert stage == "rename" and names(one) == names(other)
            continue
        atoms, partition, stays = talk
        for tree in trees:
            lease = add(tree, flatten(atoms), partition)
            if not stays:
                tree.release(lease)
            check_integrity(tree)
    assert names(one) == names(other)
    for atoms, partition, _ in [*before, *after]:
        tokens = flatten([*atoms, 1, 1])
        found = [tree.lookup(tokens, partition=partition) for tree in trees]
        assert found[0].num_usable_tokens == found[1].num_usable_tokens
        assert found[0].chain == found[1].chain


def test_a_name_of_before_finds_nothing() -> None:
    """The control: two fingerprints have no name in common."""
    tree = make_tree(LIMITS, needs_checkpoints=False)
    tree.release(add(tree, flatten([1, 2, 0, 1, 2, 0, 1, 2]), ""))
    before = {name for path in tree.kept_paths() for name in path.chain.hashes}
    tree.rename(hasher_like(tree, "known"))
    after = {name for path in tree.kept_paths() for name in path.chain.hashes}
    assert before and len(before) == len(after) and not before & after


def test_what_was_warmed_is_used_under_its_new_name() -> None:
    """Its tokens count as used once, by whatever name a request comes."""
    tree, warmed = make_tree(LIMITS, needs_checkpoints=False), WarmedTokens(lambda *_: 0)
    tokens = flatten([1, 2, 0, 1, 2, 0, 1, 2])
    match = tree.lookup(tokens)
    warmed.add(tokens, match.run, match.chain, 0, 8, None)
    warmed.rename(hasher_like(tree, "known"))
    tree.rename(hasher_like(tree, "known"))
    match = tree.lookup(flatten([1, 2, 0, 1, 2, 0, 1, 2, 2]))
    assert (warmed.use(match.run, match.chain, 8), warmed.totals().num_used_tokens) == (8, 8)
