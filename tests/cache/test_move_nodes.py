"""What leaves the tree for one row is what only that row needs: all others find what they found before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.move_nodes import Requester
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import assert_exact, joined, keys_of, make_tree, rows_of, store
from tests.integrity import check_integrity
from tests.laws import num_examples

type Conversation = tuple[int, list[int]]
"""Whose it is, and its tokens."""

conversations = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=14)), max_size=8)


def sequence_of(ids: list[int]) -> TokenSequence:
    return TokenSequence(tuple(ids))


def depth(tree: PrefixTree, tokens: TokenSequence) -> int:
    """How much of a conversation a next turn could start from."""
    return tree.known_depth(TokenSequence((*tokens.ids, 99)))


@pytest.mark.parametrize("needs_checkpoints", [False, True])
@settings(max_examples=num_examples(60), deadline=None)
@given(kept=conversations, ids=st.lists(st.integers(0, 1), min_size=2, max_size=16), most=st.integers(0, 16))
def test_nobody_else_loses_anything(
    kept: list[Conversation], ids: list[int], most: int, needs_checkpoints: bool
) -> None:
    """Rows that are taken are the prompt's own, what stays is at most what may, and once they are back all is as it
    was; only older answers of the same owner may be gone."""
    tree = make_tree(needs_checkpoints=needs_checkpoints)
    for owner, each in kept:
        tokens = sequence_of(each)
        store(tree, tokens, sorted({max(1, len(each) // 2), len(each)}), owner=str(owner), user=str(owner))
    tokens, requester = sequence_of(ids), Requester("0", "0")
    others = [sequence_of(each) for owner, each in kept if owner != 0]
    before = [depth(tree, each) for each in others]
    match = tree.lookup(tokens)
    if not tree.mover.nodes(match, requester, lambda num_tokens: num_tokens <= most):
        return
    lease = tree.acquire(match, owner="0", user="0")
    extracted = tree.mover.extract(match, lease, tree.mover.nodes(match, requester, lambda num: num <= most, lease))
    assert joined(extracted.pieces).keys == keys_of(tokens)[: match.num_usable_tokens]
    assert lease.num_tokens == extracted.start <= most
    assert [depth(tree, each) for each in others] == before
    check_integrity(tree)
    for boundary in extracted.boundaries:
        state = boundary.state
        assert state is not None
        tree.extend(lease, tokens, boundary.offset, rows_of(tokens), lambda state=state: state, boundary.kind)  # type: ignore[misc]
    tree.extend(lease, tokens, match.num_usable_tokens, rows_of(tokens))
    tree.release(lease)
    check_integrity(tree)
    again = tree.lookup(tokens)
    assert again.num_usable_tokens == match.num_usable_tokens
    assert_exact(again, tokens)


def test_what_somebody_stands_on_or_used_stays() -> None:
    """A live row, another user, another owner's answer behind it: each of them is enough."""
    tokens = sequence_of([*range(20)])
    longer = sequence_of([*range(20), 50])
    for owner, user, keep in (("a", "a", True), ("a", "b", False), ("b", "a", False)):
        tree = make_tree()
        store(tree, tokens, [10], owner="a", user="a")
        assert tree.mover.nodes(tree.lookup(longer), Requester("a", "a"), lambda _: True)
        store(tree, sequence_of([*range(20), 60]), [10, 21], owner=owner, user=user, keep=keep)
        assert not tree.mover.nodes(tree.lookup(longer), Requester("a", "a"), lambda num: num < 10)


def test_the_end_of_system_and_tools_stays_where_it_may() -> None:
    """Other conversations begin with it."""
    tree = make_tree()
    store(tree, sequence_of([*range(20)]), [8, 20], owner="a", user="a", kinds={8: "system"})
    longer = tree.lookup(sequence_of([*range(20), 50]))
    requester = Requester("a", "a")
    assert tree.mover.nodes(longer, requester, lambda num: num <= 8)[-1].start == 8
    assert tree.mover.nodes(longer, requester, lambda num: num < 8)[-1].start == 0


def test_moved_rows_are_no_evicted_ones() -> None:
    """`num_evicted_tokens` asks for a larger budget."""
    tree = make_tree()
    store(tree, sequence_of([*range(20)]), owner="a", user="a")
    match = tree.lookup(sequence_of([*range(20), 50]))
    lease = tree.acquire(match, owner="a", user="a")
    tree.mover.extract(match, lease, tree.mover.nodes(match, Requester("a", "a"), lambda _: True, lease))
    stats = tree.stats()
    assert (stats.num_evicted_tokens, stats.num_stored_tokens, stats.ram_bytes) == (0, 0, 0)
