"""The order in which leaves are evicted: by their last use, each once, and no node that has children."""

from kvserve.sessions.seen import PathNode
from kvserve.sessions.turn_state import LeafOrder, NodeState
from tests.integrity import leaves
from tests.sessions.samples import user


def node(letter: str) -> PathNode:
    return PathNode(None, letter.encode(), user(letter), None, 0)


def test_the_longest_unused_leaf_goes_first() -> None:
    """A use moves a leaf to the end; what has children, or is gone, is passed over."""
    kept = {node(letter): NodeState(number, 1, 0) for number, letter in enumerate("abcde")}
    first, second, third, parent, gone = kept
    order = LeafOrder(kept)
    for seen in (first, gone, parent, second, third, first):
        order.touch(seen)
    kept[parent].num_children = 1
    del kept[gone]
    assert leaves(order) == {first, second, third}
    assert [order.pop() for _ in range(3)] == [second, third, first]


def test_stale_entries_are_dropped_in_time() -> None:
    """However often one leaf is used, the order stays as large as what is kept."""
    kept = {node(letter): NodeState(number, 1, 0) for number, letter in enumerate("ab")}
    first, second = kept
    order = LeafOrder(kept)
    order.touch(second)
    for _ in range(1_000):
        order.touch(first)
    assert len(order._heap) < 100
    assert [order.pop(), order.pop()] == [second, first]
