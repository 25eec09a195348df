"""What a run of an eviction does at most where it is asked for a piece: nodes that leave, and nodes that are ranked."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvserve.cache import sweep
from kvserve.cache.eviction_order import EvictionOrder
from kvserve.cache.node import Node
from kvserve.cache.sweep import RANKED_PER_PIECE
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import ROOMY, ROW_BYTES, Clock, make_tree, store
from tests.integrity import check_integrity

MAX_PIECES = 4
NUM_ROWS, NUM_STOPS = 12, 10
LIMITS = replace(ROOMY, ttl_seconds=1000.0, owner_idle_seconds=500.0, check_seconds=1.0)


def filled(*, needs_checkpoints: bool, has_owners: bool = False, is_ranked: bool = True) -> tuple[PrefixTree, Clock]:
    """A dozen conversations of ten stops, each stop a node with its own record and its state."""
    clock = Clock()
    tree = make_tree(LIMITS, needs_checkpoints=needs_checkpoints, clock=clock)
    for number in range(NUM_ROWS):
        ids = tuple(range(1000 * number, 1000 * number + 4 * NUM_STOPS))
        ends = range(4, len(ids) + 1, 4)
        store(tree, TokenSequence((*ids, 10**6)), ends, owner=f"owner {number}" if has_owners else None)
        clock.now += 0.01
    if is_ranked:
        clock.now += 2
        tree.evict()
    assert tree.stats().num_nodes == NUM_ROWS * NUM_STOPS
    return tree, clock


def pieces(tree: PrefixTree, num_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """One run after the other, until there is nothing more to do: how many nodes and states each evicts."""
    is_over = False
    while not is_over:
        before, is_over = tree.stats(), tree.evict(num_bytes, MAX_PIECES).is_over
        after = tree.stats()
        num_states = after.num_evicted_checkpoints - before.num_evicted_checkpoints
        yield before.num_nodes - after.num_nodes, num_states
        check_integrity(tree)


def everything(tree: PrefixTree, clock: Clock) -> int:
    """Room is needed for as much as there may be."""
    return LIMITS.max_bytes


def too_old(tree: PrefixTree, clock: Clock) -> int:
    """Nobody has asked for anything for longer than it may stay."""
    clock.now += LIMITS.ttl_seconds + 1
    return 0


def of_nobody(tree: PrefixTree, clock: Clock) -> int:
    """The owners have not been seen for longer than what is theirs may stay."""
    clock.now += LIMITS.owner_idle_seconds + 1
    return 0


@pytest.mark.parametrize("needs_checkpoints", [False, True])
@pytest.mark.parametrize("because", [everything, too_old, of_nobody])
def test_a_piece_lets_few_leave_however_many_must(
    needs_checkpoints: bool, because: Callable[[PrefixTree, Clock], int]
) -> None:
    """A hundred and twenty nodes, of which none may stay: a stream that runs gets its step between any two pieces."""
    tree, clock = filled(needs_checkpoints=needs_checkpoints, has_owners=because is of_nobody)
    num_bytes = because(tree, clock)
    left = [num_nodes + num_states for num_nodes, num_states in pieces(tree, num_bytes)]
    assert tree.num_ram_bytes == 0
    assert max(left) <= 2 * (MAX_PIECES + 1), left  # with a node goes its state, and with a state the rows behind it


@pytest.mark.parametrize("because", [everything, too_old, of_nobody])
def test_large_ones_leave_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, because: Callable[[PrefixTree, Clock], int]
) -> None:
    """To give back the memory of a state takes time too."""
    monkeypatch.setattr(sweep, "BYTES_PER_PIECE", 1)
    tree, clock = filled(needs_checkpoints=True, has_owners=because is of_nobody)
    num_bytes = because(tree, clock)
    left = [num_states for _, num_states in pieces(tree, num_bytes)]
    assert tree.num_ram_bytes == 0 and max(left) == 1, left


def test_too_many_states_leave_in_pieces_too() -> None:
    """Where states alone are over their bound."""
    tree, _clock = filled(needs_checkpoints=True)
    tree._sweep._limits = replace(LIMITS, max_checkpoint_bytes=1)
    left = [num_states for _, num_states in pieces(tree)]
    assert tree.stats().num_checkpoints == 0 and max(left) <= MAX_PIECES, left


def test_rows_that_serve_nobody_leave_to_the_last_of_them() -> None:
    """Behind the last state of a branch rows are of no use. A piece that ends among them is gone on with, though bytes
    are not short any more."""
    tree, ids = make_tree(LIMITS, needs_checkpoints=True), tuple(range(4 * NUM_STOPS))
    store(tree, TokenSequence((*ids, 10**6)), range(4, len(ids) + 1, 4))
    for node in tree.sequences()[0][:-1]:
        tree._store.drop_checkpoint(node)
    first = tree.evict(LIMITS.max_bytes - tree.num_ram_bytes + 1, 2 * MAX_PIECES)
    num_left = NUM_STOPS - tree.stats().num_nodes
    assert 1 < num_left < NUM_STOPS and first.is_within_limits and not first.is_over
    assert sum(num_nodes for num_nodes, _ in pieces(tree)) == NUM_STOPS - num_left
    assert tree.num_ram_bytes == 0


def test_what_comes_back_into_use_between_two_pieces_stays() -> None:
    """An entry whose owner has gone leaves from its end. Where the owner comes back meanwhile the rest is kept."""
    tree, clock = filled(needs_checkpoints=True, has_owners=True)
    of_nobody(tree, clock)
    ids = tuple(range(4 * NUM_STOPS))
    depth = len(ids)
    for _ in pieces(tree):
        found = tree.peek(TokenSequence((*ids, 10**6))).num_usable_tokens
        if 0 < found < depth:
            tree.release(tree.acquire(tree.lookup(TokenSequence((*ids, 10**6))), owner="owner 0"))
            break
    for _ in pieces(tree):
        pass
    assert 0 < tree.peek(TokenSequence((*ids, 10**6))).num_usable_tokens == found
    assert tree.stats().num_stored_tokens == found


def test_a_lifetime_that_is_over_is_over_for_all_of_an_entry() -> None:
    """Also where all are looked at anew before the last of it has left."""
    clock = Clock()
    tree, ids = make_tree(LIMITS, needs_checkpoints=True, clock=clock), tuple(range(4 * NUM_STOPS))
    store(tree, TokenSequence((*ids, 10**6)), range(4, len(ids) + 1, 4), ttl_seconds=60.0)
    tree.evict()
    clock.now += 61
    assert not tree.evict(0, MAX_PIECES).is_over and tree.num_ram_bytes > 0
    clock.now += 2 * LIMITS.check_seconds
    for _ in pieces(tree):
        pass
    assert tree.num_ram_bytes == 0


def test_what_ended_between_two_pieces_is_its_own_entry() -> None:
    """Of an entry over its number the rows that serve nobody leave; meanwhile another row comes as far and ends
    there."""
    clock, ids = Clock(), tuple(range(4 * NUM_STOPS))
    tree = make_tree(replace(LIMITS, max_entries_per_owner=1), needs_checkpoints=True, clock=clock)
    store(tree, TokenSequence((*ids, 10**6)), range(4, len(ids) + 1, 4), owner="one")
    for node in tree.sequences()[0][:-1]:
        tree._store.drop_checkpoint(node)
    clock.now += 1
    store(tree, TokenSequence((*range(5000, 5040), 10**6)), range(4, 41, 4), owner="one")
    clock.now += 1
    first = tree.evict(LIMITS.max_bytes - tree.num_ram_bytes + 1, 2 * MAX_PIECES)
    (last,) = (path[-1] for path in tree.sequences() if path[0].tokens.ids[0] == 0)
    assert not first.is_over and 4 < last.end < len(ids)
    store(tree, TokenSequence((*ids[: last.end], 10**6)), (last.end,), owner="another")
    for _ in pieces(tree):
        pass
    assert last.sequence_end is not None and last.sequence_end.owner == "another"


@pytest.mark.parametrize("num_bytes", [0, LIMITS.max_bytes])
def test_a_tree_that_was_filled_at_once_is_ranked_in_pieces(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Whether bytes are short or not; what leaves then is what would leave after all were ranked."""
    tree, clock = filled(needs_checkpoints=True, is_ranked=False)
    clock.now += 2
    num_ranked, rank = 0, EvictionOrder._rank

    def counted(order: EvictionOrder, node: Node) -> None:
        nonlocal num_ranked
        num_ranked += 1
        rank(order, node)

    monkeypatch.setattr(EvictionOrder, "_rank", counted)
    seen: list[int] = []
    for _, num_states in pieces(tree, num_bytes):
        seen.append(num_ranked)
        num_ranked = 0
        if num_states:
            break
    assert sum(seen) >= NUM_ROWS * NUM_STOPS
    assert max(seen) <= 2 * MAX_PIECES * RANKED_PER_PIECE, seen


def test_a_record_of_which_many_nodes_leave_is_copied_once() -> None:
    """Pieces do not cut what the next one cuts again: a record is cut to size when enough has left."""
    copies: list[int] = []
    tree = make_tree(LIMITS)
    cut = tree._store._cut_payload
    tree._store._cut_payload = lambda *asked: copies.append(asked[2] - asked[1]) or cut(*asked)  # type: ignore[func-returns-value]
    ids = tuple(range(400))
    store(tree, TokenSequence((*ids, 10**6)), (400,))
    for place in range(10, 400, 10):  # rows that part from it cut its node, never its record
        store(tree, TokenSequence((*ids[:place], 10**6 + place)), (place + 1,))
    num_over = tree.num_ram_bytes - ROW_BYTES * 100
    for _ in pieces(tree, LIMITS.max_bytes - tree.num_ram_bytes + num_over):
        pass
    assert 0 < tree.num_ram_bytes <= ROW_BYTES * 100 and len(copies) <= 2, copies
