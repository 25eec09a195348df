"""An operation looks at what is new to the tree, however much is there: counted, not timed."""

from collections.abc import Callable

import pytest

from kvserve.cache import eviction_rank
from kvserve.cache.node import Lease
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import ROOMY, WholeState, keys_of, make_tree, rows_of, store
from tests.cache.visits import Visits, counting

STOP_TOKENS = 6
FEW, MANY = 40, 400
"""Nodes on the path of one prompt; a quarter as many conversations leave it on the way."""

MAX_NODES = 40
"""So many looks are enough for whatever is asked here, of a path of any length."""

MAX_EVICTING_NODES = 100
"""And for what leaves: the few places that are ranked again look a little around themselves."""

SIZES = [(needs_checkpoints, num_nodes) for needs_checkpoints in (False, True) for num_nodes in (FEW, MANY)]


def grown(num_nodes: int, *, needs_checkpoints: bool) -> tuple[PrefixTree, tuple[int, ...]]:
    """A tree with a prompt that stopped so often, and its ids."""
    tree, ids = make_tree(needs_checkpoints=needs_checkpoints), tuple(range(num_nodes * STOP_TOKENS))
    store(tree, TokenSequence(ids), range(STOP_TOKENS, len(ids) + 1, STOP_TOKENS), user="a")
    for number in range(num_nodes // 4):
        store(tree, TokenSequence((*ids[: number * STOP_TOKENS], *range(10**6, 10**6 + 20))), user=f"b {number}")
    return tree, ids


def row(tree: PrefixTree, ids: tuple[int, ...], num_more: int) -> tuple[Lease, TokenSequence]:
    """A live row behind all that is there."""
    tokens = TokenSequence((*ids, *range(10**7, 10**7 + num_more)))
    return tree.acquire(tree.lookup(tokens), user="a"), tokens


def stop(tree: PrefixTree, lease: Lease, tokens: TokenSequence) -> None:
    """The row has computed on, and another tier asks what it lacks."""
    start, end = lease.num_tokens, lease.num_tokens + STOP_TOKENS
    tree.extend(lease, tokens, end, rows_of(tokens), lambda: WholeState(keys_of(tokens)[:end]))
    for part in path.parts if (path := tree.kept_end(lease, start)) is not None else ():
        part.copies.rows = (Written(),)


class Written:
    """A copy that is there."""

    is_written, is_forgotten = True, False


def assert_small(visits: Visits, num_tokens: int) -> None:
    assert visits.num_nodes <= MAX_NODES and visits.num_tokens <= num_tokens, visits


@pytest.mark.parametrize(("needs_checkpoints", "num_nodes"), SIZES)
def test_a_stop_looks_at_what_is_new(monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_nodes: int) -> None:
    """The first one of a row takes to the other tier what that lacks, each later one its own tokens only."""
    tree, ids = grown(num_nodes, needs_checkpoints=needs_checkpoints)
    lease, tokens = row(tree, ids, 10 * STOP_TOKENS)
    stop(tree, lease, tokens)
    visits = counting(monkeypatch)
    for _ in range(5):
        assert_small(visits.of(lambda: stop(tree, lease, tokens)), 2 * STOP_TOKENS)


@pytest.mark.parametrize(("needs_checkpoints", "num_nodes"), SIZES)
def test_a_prompt_is_compared_once(monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_nodes: int) -> None:
    """It is looked up several times, by whoever waits, holds and enters: the first time every token is compared."""
    tree, ids = grown(num_nodes, needs_checkpoints=needs_checkpoints)
    tree.forget_names()
    tokens = TokenSequence((*ids, 10**7, 10**7 + 1))
    visits = counting(monkeypatch)
    assert visits.of(lambda: tree.lookup(tokens)).num_tokens >= len(ids)
    assert_small(visits.of(lambda: tree.lookup(tokens)), 0)
    assert_small(visits.of(lambda: tree.known_depth(tokens)), 0)
    assert_small(visits.of(lambda: tree.release(tree.acquire(tree.lookup(tokens), user="a"))), 0)


@pytest.mark.parametrize(("needs_checkpoints", "num_nodes"), SIZES)
def test_the_next_turn_is_compared_from_the_last_one_on(
    monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_nodes: int
) -> None:
    """With the last prompt it is compared as one run of tokens, with the tree where that prompt ended."""
    tree, ids = grown(num_nodes, needs_checkpoints=needs_checkpoints)
    lease, tokens = row(tree, ids, 3 * STOP_TOKENS)
    for _ in range(3):
        stop(tree, lease, tokens)
    tree.release(lease)
    turn = TokenSequence((*tokens.ids, *range(10**8, 10**8 + 5)))
    visits, num_known = counting(monkeypatch), len(tokens)
    found = visits.of(lambda: tree.lookup(turn))
    assert found.num_nodes <= MAX_NODES
    assert found.num_tokens <= 2 * len(turn)  # as one run; a second time at most with another prompt that is remembered
    assert tree.lookup(turn).num_matched_tokens == num_known


@pytest.mark.parametrize(("needs_checkpoints", "num_nodes"), SIZES)
def test_after_a_row_has_ended_what_it_left_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_nodes: int
) -> None:
    """Where bytes are not short nothing else could have become too old, or anybody's, at that moment."""
    tree, ids = grown(num_nodes, needs_checkpoints=needs_checkpoints)
    tree.evict()
    lease, tokens = row(tree, ids, 3 * STOP_TOKENS)
    for _ in range(3):
        stop(tree, lease, tokens)
    tree.evict()
    tree.mark_end(lease)
    tree.release(lease)
    assert_small(counting(monkeypatch).of(tree.evict), 0)


@pytest.mark.parametrize(("needs_checkpoints", "num_nodes"), SIZES)
def test_what_leaves_is_found_without_a_look_at_what_stays(
    monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_nodes: int
) -> None:
    """In a full cache each stop of a row lets a leaf or a state leave, and so does what comes after its end."""
    monkeypatch.setattr(eviction_rank, "BRIEF_TOKENS", 2 * STOP_TOKENS)  # as many stops as are usual within 512 tokens
    tree, ids = grown(num_nodes, needs_checkpoints=needs_checkpoints)
    tree.evict(ROOMY.max_bytes - tree.num_ram_bytes + 1)
    visits = counting(monkeypatch)
    for turn in range(3):
        lease, tokens = row(tree, (*ids[: 5 * STOP_TOKENS], turn), 3 * STOP_TOKENS)
        for _ in range(3):
            stop(tree, lease, tokens)
            before = tree.num_ram_bytes
            found = visits.of(lambda: tree.evict(ROOMY.max_bytes - tree.num_ram_bytes + 1))
            assert tree.num_ram_bytes < before and found.num_nodes <= MAX_EVICTING_NODES, found
        tree.mark_end(lease)
        tree.release(lease)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree, ids: tree.forget(lambda user: user == "a"),
        lambda tree, ids: tree.clear(),
        lambda tree, ids: tree.evict(10**12 - 100),
        lambda tree, ids: store(tree, TokenSequence((*ids[:9], 10**6)), user="c"),
        lambda tree, ids: tree.discard(TokenSequence(ids), lambda owner: True),
    ],
    ids=["forget", "clear", "evict", "split", "discard"],
)
@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_what_changed_since_a_lookup_is_seen_by_the_next(
    change: Callable[[PrefixTree, tuple[int, ...]], object], needs_checkpoints: bool
) -> None:
    """Where a prompt was found before may have left, or have been cut: what is found is what is there."""
    tree, ids = grown(FEW, needs_checkpoints=needs_checkpoints)
    tokens = TokenSequence((*ids, 10**7, 10**7 + 1))
    assert tree.lookup(tokens).num_matched_tokens == len(ids)
    change(tree, ids)
    again = tree.lookup(tokens)
    tree.forget_names()
    fresh = tree.lookup(tokens)
    assert (again.node, again.num_matched_tokens) == (fresh.node, fresh.num_matched_tokens)
    assert again.num_usable_tokens == fresh.num_usable_tokens
