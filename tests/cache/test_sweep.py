"""What leaves and what stays, limit by limit."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from kvserve.cache import kept_path
from kvserve.cache import tree as tree_module
from kvserve.cache.kept_path import EvictedNodes
from kvserve.cache.node import Node
from kvserve.cache.records import Payload
from kvserve.cache.tree import PrefixTree
from kvserve.cache.trie import Trie
from kvserve.core import TokenSequence
from tests.cache.payloads import (
    ROOMY,
    ROW_BYTES,
    STATE_BYTES,
    Clock,
    Rows,
    WholeState,
    assert_exact,
    cut_rows,
    joined,
    make_tree,
    store,
)
from tests.integrity import check_integrity


def tokens(*ids: int) -> TokenSequence:
    return TokenSequence(ids)


def conversation(number: int, length: int = 10) -> TokenSequence:
    return tokens(*range(5), *range(100 * number + 100, 100 * number + 100 + length))


def depth(tree: PrefixTree, prompt: TokenSequence) -> int:
    return tree.lookup(TokenSequence((*prompt.ids, 7777))).num_usable_tokens


def test_nothing_leaves_within_the_limits() -> None:
    """No limit reached: an eviction is a look around."""
    tree = make_tree()
    store(tree, conversation(1))
    eviction = tree.evict()
    assert (eviction.num_freed_bytes, eviction.is_within_limits, tree.stats().num_evicted_tokens) == (0, True, 0)


def test_bytes_leave_from_the_leaves() -> None:
    """The least recently used branch leaves down to the shared prefix, which stays."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 30), clock=clock)
    for number in range(3):
        store(tree, conversation(number))
        clock.now += 100
    eviction = tree.evict()
    assert eviction.num_freed_bytes == ROW_BYTES * 10
    assert tree.stats().num_evicted_tokens == 10
    assert [depth(tree, conversation(number)) for number in range(3)] == [5, 15, 15]
    check_integrity(tree)


def test_live_rows_count_in_the_budget() -> None:
    """What running rows hold is not there for the cache; needed room is made."""
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 30))
    store(tree, conversation(0))
    tree.account_live(ROW_BYTES * 14)
    assert tree.evict().num_freed_bytes == 0
    assert tree.evict(num_needed_bytes=ROW_BYTES * 2).num_freed_bytes > 0
    tree.account_live(ROW_BYTES * 31)
    eviction = tree.evict()
    assert tree.stats().ram_bytes == 0 and not eviction.is_within_limits


def test_nothing_leaves_that_a_live_row_stands_on() -> None:
    """A path under a lease stays whatever the budget; it leaves when the row has left."""
    tree = make_tree(replace(ROOMY, max_bytes=1))
    lease = store(tree, conversation(0), keep=True)
    assert not tree.evict().is_within_limits
    assert depth(tree, conversation(0)) == 15
    tree.release(lease)
    assert tree.evict().is_within_limits
    assert tree.stats().num_nodes == 0


def test_what_remains_of_a_record_is_cut_to_size() -> None:
    """A split record whose lower half left does not keep its bytes alive."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 26), clock=clock)
    store(tree, tokens(*range(20)))
    clock.now += 500
    store(tree, tokens(*range(12), *range(50, 60)))
    assert tree.stats().ram_bytes == ROW_BYTES * 30
    tree.evict()
    assert tree.stats().ram_bytes == ROW_BYTES * 22
    assert_exact(tree.lookup(tokens(*range(12), 99)), tokens(*range(12), 99))
    check_integrity(tree)


# --- entries ----------------------------------------------------------------------------------------------------------


def test_entries_are_not_counted_while_there_is_room() -> None:
    """Forks of one session and requests of many others stay, whatever their number, as long as their bytes fit."""
    tree = make_tree(replace(ROOMY, max_entries=3, max_entries_per_owner=2))
    for number in range(6):
        store(tree, conversation(number), owner="forks")
    for number in range(6, 36):
        store(tree, conversation(number), owner=f"side {number}")
    tree.evict()
    assert tree.stats().num_entries == 36
    assert {depth(tree, conversation(number)) for number in range(36)} == {15}


def test_over_the_budget_an_owner_keeps_its_newest_entries() -> None:
    """What an owner has more than its number leaves before others' older entries, with what only it needs, and no more
    of it than the bytes ask for."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 55, max_entries_per_owner=2), clock=clock)
    store(tree, conversation(9), owner="other")
    for number in range(4):
        clock.now += 100
        store(tree, conversation(number), owner="mine")
    tree.evict()
    assert [depth(tree, conversation(number)) for number in (9, 0, 1, 2, 3)] == [15] * 5
    tree.evict(num_needed_bytes=ROW_BYTES)
    assert [depth(tree, conversation(number)) for number in (9, 0, 1, 2, 3)] == [15, 5, 15, 15, 15]
    tree.evict(num_needed_bytes=ROW_BYTES * 11)
    assert [depth(tree, conversation(number)) for number in (9, 0, 1, 2, 3)] == [15, 5, 5, 15, 15]
    tree.evict(num_needed_bytes=ROW_BYTES * 21)  # none is over its number any more: the oldest of all leaves
    assert [depth(tree, conversation(number)) for number in (9, 0, 1, 2, 3)] == [5, 5, 5, 15, 15]


def test_a_conversation_that_goes_on_is_one_entry() -> None:
    """An end that is continued is a mere prefix: a hundred turns do not push anything out."""
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 102, max_entries_per_owner=1, max_entries=2))
    store(tree, tokens(900, 901), owner="other")
    for length in range(10, 110, 10):
        store(tree, tokens(*range(length)), owner="mine")
        tree.evict()
    assert tree.stats().num_entries == 2
    assert depth(tree, tokens(*range(100))) == 100


def test_over_the_budget_the_least_valuable_entries_of_all_owners_leave() -> None:
    """The global number counts sequence ends, not tokens: those over it leave before any checkpoint, leaf by leaf."""
    clock = Clock()
    budget = ROW_BYTES * 45 + STATE_BYTES * 8
    tree = make_tree(replace(ROOMY, max_bytes=budget, max_entries=3), needs_checkpoints=True, clock=clock)
    for number in range(4):
        clock.now += 100
        store(tree, conversation(number), (8, 15))
    assert tree.stats().ram_bytes == budget
    tree.evict(num_needed_bytes=1)
    assert [depth(tree, conversation(number)) for number in range(4)] == [8, 15, 15, 15]
    tree.evict(num_needed_bytes=ROW_BYTES * 7 + STATE_BYTES + 1)
    assert tree.stats().num_entries == 3
    assert [depth(tree, conversation(number)) for number in range(4)] == [0, 15, 15, 15]


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_an_entry_over_its_number_leaves_no_more_than_bytes_ask(needs_checkpoints: bool) -> None:
    """One byte is one leaf of a long entry, not all of it; what is left is still over the number: after a row has ended
    too it leaves before what others used longer ago, down to the end of system and tools."""
    clock, limits = Clock(), replace(ROOMY, max_bytes=10**5, max_entries_per_owner=1)
    tree = make_tree(limits, needs_checkpoints=needs_checkpoints, clock=clock)
    old, long = tokens(*range(5000, 5010)), tokens(*range(200))
    store(tree, old, owner="other")
    clock.now += 1000
    store(tree, long, range(2, 201, 2), kinds={2: "system"}, owner="mine")
    clock.now += 1
    store(tree, tokens(*range(7000, 7002)), owner="mine")
    for left in range(1, 4):
        tree.evict(limits.max_bytes - tree.num_ram_bytes + 1)
        assert (depth(tree, long), depth(tree, old)) == (200 - 2 * left, 10)
        store(tree, tokens(8000 + left), owner=f"side {left}")
    while depth(tree, long) > 2:
        assert depth(tree, old) == 10
        tree.evict(limits.max_bytes - tree.num_ram_bytes + 1)
    tree.evict(limits.max_bytes - tree.num_ram_bytes + 1)
    assert (depth(tree, long), depth(tree, old)) == (2, 0)
    check_integrity(tree)


def test_entries_over_their_number_leave_before_checkpoints_are_thinned() -> None:
    """What a client left behind by editing its history has states that count as the newest of their branches: they must
    not cost the branch that goes on its own."""
    clock = Clock()
    limits = replace(ROOMY, max_checkpoint_bytes=STATE_BYTES * 7, max_entries_per_owner=1)
    tree = make_tree(limits, needs_checkpoints=True, clock=clock)
    for number in range(3):
        clock.now += 10
        store(tree, conversation(number, 20), (10, 20, 25), owner="one")
    tree.evict()
    newest = max(tree.sequences(), key=lambda nodes: nodes[-1].last_used_at)
    assert [node.end for node in newest if node.checkpoint] == [10, 20, 25]
    assert tree.stats().num_checkpoints == 7
    assert [depth(tree, conversation(number, 20)) for number in range(3)] == [20, 20, 25]


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_a_conversation_that_waits_outlives_side_requests(needs_checkpoints: bool) -> None:
    """Eight minutes after its last turn 6,000 tokens are worth more than what was asked once, in 100, a moment ago; of
    side requests the last ones stay, and so does the system prompt that they share."""
    clock = Clock()
    limits = replace(ROOMY, max_bytes=ROW_BYTES * 7000 + STATE_BYTES * 8)
    tree = make_tree(limits, needs_checkpoints=needs_checkpoints, clock=clock)
    talk = tokens(*range(50_000, 56_000))
    for end in (2000, 4000, 6000):
        store(tree, tokens(*talk.ids[:end]), (end,), owner="agent")
        clock.now += 60
    clock.now += 480
    sides = [tokens(*range(200), *range(1000 * n + 1000, 1000 * n + 1100)) for n in range(60)]
    for number, side in enumerate(sides):
        store(tree, side, (200, 300), kinds={200: "system"}, owner=f"side {number}")
        tree.evict()
        clock.now += 1
    assert tree.stats().num_evicted_tokens > 0
    assert (depth(tree, talk), depth(tree, sides[0]), depth(tree, sides[-1])) == (6000, 200, 300)


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_what_may_leave_is_ranked_once_between_two_ends_of_rows(
    needs_checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stop of a row makes room in a full cache: the nodes are looked through once, not once per stop."""
    num_bytes = ROW_BYTES * 2000 + (STATE_BYTES * 50 if needs_checkpoints else 0)
    limits = replace(ROOMY, max_bytes=num_bytes, max_checkpoint_bytes=STATE_BYTES * 50)
    tree = make_tree(limits, needs_checkpoints=needs_checkpoints)
    for number in range(100):
        store(tree, tokens(*range(1000 * number, 1000 * number + 20)), (10, 20))
    tree.evict()
    looks: list[None] = []
    nodes = Trie.nodes
    monkeypatch.setattr(Trie, "nodes", lambda trie: looks.append(None) or nodes(trie))
    before = tree.stats()
    looks.clear()
    row = tokens(*range(500_000, 501_000))
    lease = tree.acquire(tree.lookup(row))
    for end in range(20, 1001, 20):
        tree.extend(lease, row, end, lambda s, e: Rows(row.ids[s:e]), lambda end=end: WholeState(row.ids[:end]))  # type: ignore[misc]
        tree.evict(num_needed_bytes=ROW_BYTES * 20)
    num_looks, after = len(looks), tree.stats()
    num_left = after.num_evicted_tokens - before.num_evicted_tokens
    num_states = after.num_evicted_checkpoints - before.num_evicted_checkpoints
    assert num_left >= 500 or num_states >= 40
    assert num_looks <= 3
    check_integrity(tree)


def test_an_entry_that_a_live_row_keeps_leaves_with_the_row() -> None:
    """What could not leave at one eviction leaves at the next one after the row ended, at the same moment."""
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 15, max_entries=1))
    store(tree, conversation(0))
    store(tree, conversation(1))
    leases = [tree.acquire(tree.lookup(conversation(number))) for number in (0, 1)]
    tree.evict()
    assert tree.stats().num_entries == 2
    tree.release(leases[0])
    tree.evict()
    assert tree.stats().num_entries == 1


def test_time_alone_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction is asked for many times a request: while no row ends and all fits, it looks at no node."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=100), clock=clock)
    store(tree, conversation(0))
    tree.evict()
    looks: list[None] = []
    nodes = Trie.nodes
    monkeypatch.setattr(Trie, "nodes", lambda trie: looks.append(None) or nodes(trie))
    for _ in range(10):
        tree.evict()
    assert not looks
    clock.now += 101
    tree.evict()
    assert looks and tree.stats().num_nodes == 0


def test_the_system_prompt_outlives_its_only_entry() -> None:
    """An entry leaves down to the end of system and tools, so that the next conversation starts there."""
    limits = replace(ROOMY, max_bytes=ROW_BYTES * 45 + STATE_BYTES * 3, max_entries=1)
    tree = make_tree(limits, needs_checkpoints=True)
    store(tree, conversation(0), (5, 15), kinds={5: "system"})
    store(tree, tokens(*range(900, 930)))
    tree.evict(num_needed_bytes=1)
    assert depth(tree, conversation(0)) == 5


# --- time -------------------------------------------------------------------------------------------------------------


def test_what_nobody_used_for_too_long_leaves() -> None:
    """The limit counts from the last use; a request's own limit wins over the general one; 0 means none."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=60), clock=clock)
    store(tree, conversation(0))
    own = tree.acquire(tree.lookup(conversation(1)), ttl_seconds=0)
    tree.extend(own, conversation(1), 15, lambda start, end: Rows(conversation(1).ids[start:end]))
    tree.mark_end(own)
    tree.release(own)
    clock.now += 50
    tree.acquire(tree.lookup(conversation(0)))
    clock.now += 50
    tree.evict()
    assert depth(tree, conversation(0)) == 15
    tree.release(next(iter(tree._leases)))
    clock.now += 50
    tree.evict()
    assert [depth(tree, conversation(number)) for number in (0, 1)] == [5, 15]


@pytest.mark.parametrize("limit", ["ttl_seconds", "owner_idle_seconds"])
def test_what_is_due_leaves_then_however_seldom_all_is_looked_at(limit: str) -> None:
    """The interval is for what nobody could foresee: the first moment at which something is too old is known."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, check_seconds=10**6, **{limit: 60}), clock=clock)
    for number in range(3):
        store(tree, conversation(number), owner=f"owner {number}")
        tree.evict()
        clock.now += 10
    for left in range(3):
        clock.now = 1000.0 + 10 * left + 60
        tree.evict()
        assert [depth(tree, conversation(number)) == 15 for number in range(3)] == [
            number >= left for number in range(3)
        ]
        clock.now += 1
        tree.evict()
        assert [depth(tree, conversation(number)) == 15 for number in range(3)] == [
            number > left for number in range(3)
        ]


def test_an_owner_that_went_away_leaves_whole() -> None:
    """All entries of an owner that was not seen for its idle limit leave, used by others' lookups or not."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, owner_idle_seconds=60), clock=clock)
    store(tree, conversation(0), owner="gone")
    store(tree, conversation(1), owner="here")
    clock.now += 61
    store(tree, conversation(2), owner="here")
    tree.evict()
    assert [depth(tree, conversation(number)) for number in range(3)] == [5, 15, 15]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_thinned_and_anchors_stay() -> None:
    """Under their budget the newest two, the last user message and the system prompt stay; rows stay all."""
    tree = make_tree(replace(ROOMY, max_checkpoint_bytes=STATE_BYTES * 5), needs_checkpoints=True)
    row = tokens(*range(100))
    store(tree, row, range(10, 101, 10), kinds={10: "system", 20: "user", 30: "user"})
    tree.evict()
    kept = {node.end for path in tree.sequences() for node in path if node.checkpoint}
    assert {10, 30, 90, 100} <= kept and len(kept) == 5
    assert tree.stats().num_evicted_checkpoints == 5
    assert tree.stats().num_stored_tokens == 100
    tree.evict()
    assert tree.stats().num_evicted_checkpoints == 5
    check_integrity(tree)


def test_even_anchors_leave_rather_than_break_the_budget() -> None:
    """A budget below what should stay is kept all the same."""
    tree = make_tree(replace(ROOMY, max_checkpoint_bytes=STATE_BYTES), needs_checkpoints=True)
    store(tree, tokens(*range(40)), (10, 20, 30, 40), kinds={10: "system"})
    tree.evict()
    assert tree.stats().checkpoint_bytes == STATE_BYTES


def test_thinning_spreads_what_it_keeps() -> None:
    """Dropping a checkpoint makes its neighbour dearer: what remains covers the whole length."""
    tree = make_tree(replace(ROOMY, max_checkpoint_bytes=STATE_BYTES * 7), needs_checkpoints=True)
    store(tree, tokens(*range(1000)), range(10, 1001, 10))
    tree.evict()
    kept = [0, *sorted(node.end for path in tree.sequences() for node in path if node.checkpoint)]
    assert max(end - start for start, end in pairwise(kept)) <= 400


def test_rows_behind_the_last_checkpoint_are_dead() -> None:
    """Where layers cannot be cut, rows that no checkpoint covers serve nobody and are the first to leave."""
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 20 + STATE_BYTES), needs_checkpoints=True)
    row = tokens(*range(20))
    lease = tree.acquire(tree.lookup(row))
    tree.extend(lease, row, 10, lambda s, e: Rows(row.ids[s:e]), lambda: WholeState(row.ids[:10]))
    tree.extend(lease, row, 20, lambda s, e: Rows(row.ids[s:e]))
    tree.release(lease)
    tree.evict(num_needed_bytes=1)
    assert tree.stats().num_stored_tokens == 10
    assert depth(tree, row) == 10


def test_where_a_conversation_goes_on_outlives_where_it_was() -> None:
    """Under pressure old places inside a branch leave before its end."""
    clock = Clock()
    budget = ROW_BYTES * 100 + STATE_BYTES * 6
    tree = make_tree(replace(ROOMY, max_bytes=budget), needs_checkpoints=True, clock=clock)
    for length in range(10, 101, 10):
        store(tree, tokens(*range(length)), (length,))
        clock.now += 5
        tree.evict()
    assert depth(tree, tokens(*range(100))) == 100
    assert tree.stats().ram_bytes <= budget


# --- lifetimes of their own -------------------------------------------------------------------------------------------


def store_for(tree: PrefixTree, prompt: TokenSequence, seconds: float | None, owner: str | None = None) -> None:
    """Store a row's tokens with a lifetime of its own."""
    lease = tree.acquire(tree.lookup(prompt), owner=owner, ttl_seconds=seconds)
    tree.extend(lease, prompt, len(prompt), lambda start, end: Rows(prompt.ids[start:end]))
    tree.mark_end(lease)
    tree.release(lease)


def test_a_lifetime_slides_and_overrides_the_general_limits() -> None:
    """A short one ends before the general limit, a long one outlives it and its owner; each use counts anew."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=60, owner_idle_seconds=50), clock=clock)
    store_for(tree, conversation(0), 20, "short")
    store_for(tree, conversation(1), 600, "long")
    store_for(tree, conversation(2), None, "none")
    clock.now += 19
    tree.release(tree.acquire(tree.lookup(conversation(0))))
    clock.now += 19
    tree.evict()
    assert [depth(tree, conversation(number)) for number in range(3)] == [15, 15, 15]
    clock.now += 21
    tree.evict()
    assert [depth(tree, conversation(number)) for number in range(3)] == [5, 15, 5]
    clock.now += 600
    tree.evict()
    assert tree.stats().num_nodes == 0


def test_what_a_short_entry_served_alone_leaves_with_it() -> None:
    """The earlier turns of a conversation have no other use; the end of the system prompt does."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=600), needs_checkpoints=True, clock=clock)
    store(tree, tokens(*range(30)), (5, 15, 30), kinds={5: "system"})
    longer = tokens(*range(40))
    lease = tree.acquire(tree.lookup(longer), ttl_seconds=20)
    tree.extend(lease, longer, 40, lambda s, e: Rows(longer.ids[s:e]), lambda: WholeState(longer.ids))
    tree.mark_end(lease)
    tree.release(lease)
    clock.now += 21
    tree.evict()
    assert depth(tree, longer) == 5


def test_pins_leave_last_and_never_break_the_budget() -> None:
    """Under pressure what nobody asked for leaves first, then the oldest pins; a lifetime that is over pins nothing."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 25), clock=clock)
    store_for(tree, conversation(0), 300)
    clock.now += 100
    store_for(tree, conversation(1), 300)
    clock.now += 100
    store(tree, conversation(2))
    tree.evict()
    assert [depth(tree, conversation(number)) for number in range(3)] == [15, 15, 5]
    tree.evict(num_needed_bytes=ROW_BYTES * 10)
    assert [depth(tree, conversation(number)) for number in range(2)] == [5, 15]
    tree.evict(num_needed_bytes=ROW_BYTES * 25)
    assert tree.stats().ram_bytes == 0


def test_pins_count_as_entries_and_leave_last() -> None:
    """What was asked to be kept counts in an owner's number, and what was not leaves instead; then pins leave too."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 35, max_entries_per_owner=1), clock=clock)
    store(tree, conversation(9), owner="other")
    store_for(tree, conversation(0), 300, "mine")
    clock.now += 100
    store_for(tree, conversation(1), None, "mine")
    tree.evict(num_needed_bytes=1)
    assert [depth(tree, conversation(number)) for number in (9, 0, 1)] == [15, 15, 5]
    tree.evict(num_needed_bytes=ROW_BYTES * 11)
    assert [depth(tree, conversation(number)) for number in (9, 0, 1)] == [5, 15, 5]
    tree.evict(num_needed_bytes=ROW_BYTES * 35)
    assert tree.stats().ram_bytes == 0


def test_the_short_class_is_kept_alive_while_its_owner_is_there() -> None:
    """Five-minute entries are used again every interval, until their owner is idle; other lifetimes just end."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, owner_idle_seconds=1_800, keep_alive_seconds=240), clock=clock)
    store_for(tree, conversation(0), 300, "agent")
    store_for(tree, conversation(1), 200, "agent")
    store_for(tree, conversation(2), 400, "agent")
    tree.evict()
    ended_at: dict[int, float] = {}
    started_at = clock.now
    while len(ended_at) < 3:
        clock.now += 30
        tree.evict()
        for number in range(3):
            if depth(tree, conversation(number)) < 15:
                ended_at.setdefault(number, clock.now - started_at)
    assert ended_at[1] == 210 and ended_at[2] == 420
    assert 1_800 < ended_at[0] <= 1_800 + 300 + 30


def test_nobodys_entry_is_kept_alive_for_as_long_as_an_owners() -> None:
    """Where requests name no session, the last row that ended there stands for its owner: it is not pinned for ever."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, owner_idle_seconds=1_800, keep_alive_seconds=240), clock=clock)
    lasted: list[int] = []
    for asked_again_after in (900, 10_000):
        store_for(tree, conversation(0), 300)  # it counts from here
        asked_at = clock.now
        while depth(tree, conversation(0)) == 15 and clock.now < asked_at + asked_again_after:
            clock.now += 30
            tree.evict()
        lasted.append(int(clock.now - asked_at))
    assert lasted[0] == 900
    assert 1_800 < lasted[1] <= 1_800 + 300 + 30


def test_without_keep_alive_the_short_class_ends() -> None:
    """The negative control of the test above."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, owner_idle_seconds=1_800), clock=clock)
    store_for(tree, conversation(0), 300, "agent")
    clock.now += 301
    tree.evict()
    assert tree.stats().num_nodes == 0


@pytest.mark.parametrize("num_left_tokens", [0, 14])
def test_a_record_that_leaves_piece_by_piece_is_cut_once(num_left_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many nodes stand in one joined record, because states stand inside it: whatever leaves of it is one copy of what
    remains, none where nothing does."""
    tree = make_tree(needs_checkpoints=True)
    prompt = tokens(*range(100))
    store(tree, prompt, range(2, 101, 2))
    while (run := tree.plan_coalesce()) is not None:
        tree.replace(run, joined(run.pieces))
    assert (tree.stats().num_nodes, tree.stats().num_segments) == (50, 1)
    cuts: list[tuple[int, int]] = []

    def cut(payload: Payload, start: int, end: int) -> Payload:
        cuts.append((start, end))
        return cut_rows(payload, start, end)

    monkeypatch.setattr(tree._store, "_cut_payload", cut)
    tree.acquire(tree.lookup(tokens(*range(num_left_tokens + 1))))  # what a live row stands on stays
    tree.evict(num_needed_bytes=ROOMY.max_bytes)
    assert cuts == ([(0, num_left_tokens)] if num_left_tokens else [])
    assert tree.stats().num_stored_tokens == num_left_tokens
    assert_exact(tree.lookup(prompt), prompt)
    check_integrity(tree)


# --- what another tier has --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Copied:
    """A record in another tier."""

    is_written: bool = True
    is_forgotten: bool = False


def long_tree(num_nodes: int, clock: Clock) -> tuple[PrefixTree, list[EvictedNodes]]:
    """A conversation of so many nodes, each with a state, and what left it so far."""
    tree = make_tree(replace(ROOMY, max_bytes=1), needs_checkpoints=True, clock=clock)
    left: list[EvictedNodes] = []
    tree.before_eviction(left.append)
    prompt = tokens(*range(3 * num_nodes))
    store(tree, prompt, range(3, 3 * num_nodes + 1, 3))
    return tree, left


@pytest.mark.parametrize("num_nodes", [50, 400])
def test_what_leaves_tells_its_copies_and_no_path_is_built(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting a conversation whose every record is in another tier looks at each node once or twice, however long the
    path to it is."""
    tree, left = long_tree(num_nodes, Clock())
    num_built = num_visited = 0
    real_kept, real_path = kept_path.kept_path, Node.path

    def counted_kept(*arguments: Any) -> Any:
        nonlocal num_built
        num_built += 1
        return real_kept(*arguments)

    def counted_path(self: Node) -> list[Node]:
        nonlocal num_visited
        nodes = real_path(self)
        num_visited += len(nodes)
        return nodes

    copy = Copied()
    for nodes in tree.sequences():
        for node in nodes:
            node.copies.rows, node.copies.state = (copy,), copy
    monkeypatch.setattr(tree_module, "kept_path", counted_kept)
    monkeypatch.setattr(Node, "path", counted_path)
    tree.evict()
    assert tree.stats().num_nodes == 0 and left
    assert all(leaving.is_copied and not leaving.unwritten() for leaving in left)
    assert num_built == 0 and num_visited + sum(len(leaving.nodes) for leaving in left) <= 2 * num_nodes
    left[-1].path()  # the counter counts
    assert num_built == 1


@pytest.mark.parametrize(
    ("copy", "is_copied", "num_unwritten"),
    [(Copied(), True, 0), (Copied(is_written=False), True, 1), (Copied(is_forgotten=True), False, 0), (None, False, 0)],
)
def test_a_record_that_is_not_in_the_other_tier_is_told(
    copy: Copied | None, is_copied: bool, num_unwritten: int
) -> None:
    """Of all that leaves one state is on its way, forgotten or was never put: exactly that is not passed over, and the
    path that whoever writes it needs is there while it is told."""
    tree, left = long_tree(20, Clock())
    [nodes] = tree.sequences()
    for node in nodes:
        node.copies.rows, node.copies.state = (Copied(),), Copied()
    nodes[11].copies.state = copy
    told: list[tuple[int, bool, int]] = []

    def tell(leaving: EvictedNodes) -> None:
        if not leaving.is_copied or leaving.unwritten():
            told.append((leaving.path().run.end, leaving.is_copied, len(leaving.unwritten())))

    tree._sweep.before_eviction = tell
    tree.evict()
    assert not left and tree.stats().num_nodes == 0
    assert set(told) == (set() if is_copied and not num_unwritten else {(36, is_copied, num_unwritten)})


@pytest.mark.parametrize("num_copied", [0, 7, 8])
def test_joined_records_are_in_the_other_tier_if_all_of_them_were(num_copied: int) -> None:
    """Eight records become one: its copies are theirs, or none, whatever single ones had."""
    tree, copies = make_tree(), [Copied() for _ in range(8)]
    for end in range(3, 25, 3):
        store(tree, tokens(*range(end)))
    [nodes] = tree.sequences()
    for node, copy in list(zip(nodes, copies, strict=True))[:num_copied]:
        node.copies.rows = (copy,)
    run = tree.plan_coalesce()
    assert run is not None
    tree.replace(run, joined(run.pieces))
    [[node]] = tree.sequences()
    assert node.copies.rows == (tuple(copies) if num_copied == 8 else ())


def test_a_cut_that_fails_is_made_by_the_next_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three records a row stands on the beginning; memory is short while the first one is cut."""
    num_faults = 1

    def cut(payload: Payload, start: int, end: int) -> Payload:
        nonlocal num_faults
        if num_faults:
            num_faults -= 1
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return cut_rows(payload, start, end)

    monkeypatch.setattr("tests.cache.payloads.cut_rows", cut)
    tree = make_tree()
    for number in range(3):
        row = tokens(*range(1000 * number + 1, 1000 * number + 41))
        store(tree, row)
        tree.acquire(tree.lookup(tokens(*row.ids[:10], 7, 7)))
    with pytest.raises(RuntimeError, match="allocate"):
        tree.evict(10**12)
    tree.evict(10**12)
    check_integrity(tree)
    assert tree.num_ram_bytes == 3 * 10 * ROW_BYTES
