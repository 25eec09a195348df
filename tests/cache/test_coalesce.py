"""Joining small records: fewer pieces, the same rows, and every anchor still a place to start from."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from kvserve.cache.coalesce import CoalesceRun
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import ROOMY, ROW_BYTES, Clock, Key, Rows, assert_exact, make_tree, rows_of, store
from tests.integrity import check_integrity


def tokens(*ids: int) -> TokenSequence:
    return TokenSequence(ids)


def joined(run: CoalesceRun) -> Rows:
    keys: list[Key] = []
    for piece in run.pieces:
        assert isinstance(piece.payload, Rows)
        keys += piece.payload.keys[piece.first_row : piece.end_row]
    return Rows(tuple(keys))


def coalesce(tree: PrefixTree, max_tokens: int) -> Iterator[CoalesceRun]:
    while (run := tree.plan_coalesce(max_tokens)) is not None:
        tree.replace(run, joined(run))
        check_integrity(tree)
        yield run


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_many_short_turns_become_few_records(needs_checkpoints: bool) -> None:
    """500 turns restore from a few pieces of at most the size asked for; no row changes."""
    tree = make_tree(needs_checkpoints=needs_checkpoints)
    row = tokens(*range(5000))
    store(tree, row, range(10, 5001, 10))
    before = tree.stats()
    runs = list(coalesce(tree, 512))
    stats = tree.stats()
    assert all(run.num_tokens <= 512 for run in runs)
    assert before.num_segments == 500 and stats.num_segments <= 20
    assert (stats.ram_bytes, stats.num_checkpoints) == (before.ram_bytes, before.num_checkpoints)
    assert stats.num_nodes == (500 if needs_checkpoints else stats.num_segments)
    for length in (7, 256, 1234, 5000):
        prompt = tokens(*range(length), 9999)
        match = tree.lookup(prompt)
        assert match.num_usable_tokens == (length // 10 * 10 if needs_checkpoints else length)
        assert len(match.pieces) <= stats.num_segments, "each record is one piece, however many states stand inside"
        assert_exact(match, prompt)


def test_a_growing_conversation_is_copied_a_few_times_only() -> None:
    """Coalescing after every turn stays linear in what is stored."""
    tree = make_tree()
    num_copied = 0
    for length in range(10, 3001, 10):
        store(tree, tokens(*range(length)))
        num_copied += sum(run.num_tokens for run in coalesce(tree, 256))
    assert num_copied <= 3 * 3000
    assert tree.stats().num_segments <= 3000 // 128 + 8


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_what_turns_left_behind_does_not_keep_a_conversation_in_pieces(needs_checkpoints: bool) -> None:
    """Each turn left the end of its answer at a place of its own: the conversation still becomes a few records."""
    tree = make_tree(needs_checkpoints=needs_checkpoints)
    for end in range(10, 2001, 10):
        store(tree, tokens(*range(end), 10_000 + end), (end, end + 1))
    assert tree.stats().num_entries == 200
    before = tree.stats().ram_bytes
    list(coalesce(tree, 512))
    prompt = tokens(*range(2000), 9999)
    match = tree.lookup(prompt)
    assert match.num_usable_tokens == 2000 and len(match.pieces) <= 2000 // 256
    assert_exact(match, prompt)
    assert (tree.stats().ram_bytes, tree.stats().num_entries) == (before, 200)
    for end in (10, 990, 2000):  # who goes on from a stub finds it, too
        prompt = tokens(*range(end), 10_000 + end, 9999)
        match = tree.lookup(prompt)
        assert match.num_usable_tokens == end + 1
        assert_exact(match, prompt)


def test_branch_points_are_left_alone() -> None:
    """Where two branches go on no record spans the place, so that a branch can leave without copying the trunk."""
    tree = make_tree()
    trunk = tuple(range(40))
    store(tree, tokens(*trunk), range(2, 41, 2))
    store(tree, tokens(*trunk[:20], *range(100, 140)), range(22, 61, 2))
    list(coalesce(tree, 40))
    for path in tree.sequences():
        for upper, lower in pairwise(path):
            assert len(upper.children) == 1 or upper.segment is not lower.segment
    assert tree.stats().ram_bytes == ROW_BYTES * 80
    assert tree.stats().num_segments == 3


def test_a_record_that_lost_its_first_rows_is_cut_to_the_rest() -> None:
    """The upper half of a split record joins its parents; the lower half keeps its own rows, not the first ones."""
    tree = make_tree()
    trunk = tuple(range(40))
    store(tree, tokens(*trunk), (10, 40))
    other = tokens(*trunk[:20], *range(100, 105))
    store(tree, other)
    runs = list(coalesce(tree, 32))
    assert any(run.pieces[0].start == 0 and run.pieces[-1].end == 20 for run in runs)
    assert tree.stats().ram_bytes == ROW_BYTES * 45
    for prompt in (tokens(*trunk, 99), tokens(*other.ids, 99)):
        assert tree.lookup(prompt).num_usable_tokens == len(prompt) - 1
        assert_exact(tree.lookup(prompt), prompt)


def test_a_record_that_lost_its_middle_is_cut_to_what_is_left() -> None:
    """The end of it, which goes its own way, and its beginning, from which others went, keep their own rows only."""
    tree = make_tree()
    first, second, third = (1, 1, 0, 0, 0), (1, 1, 0, 0, 1, 0), (1, 0, 0)
    for ids in (first, second, third):
        store(tree, tokens(*ids))
        list(coalesce(tree, 8))
    check_integrity(tree)
    assert tree.stats().ram_bytes == ROW_BYTES * (5 + 2 + 2)
    for ids in (first, second, third):
        match = tree.lookup(tokens(*ids, 99))
        assert match.num_usable_tokens == len(ids)
        assert_exact(match, tokens(*ids, 99))


def test_what_is_joined_is_still_the_entry_that_it_was() -> None:
    """A conversation counts as one after its records became one, and keeps the lifetime that its client asked for."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=60), clock=clock)
    row = tokens(*range(100))
    lease = tree.acquire(tree.lookup(row), owner="agent", ttl_seconds=600)
    for end in range(10, 101, 10):
        tree.extend(lease, row, end, rows_of(row))
    tree.mark_end(lease)
    tree.release(lease)
    list(coalesce(tree, 128))
    assert (tree.stats().num_nodes, tree.stats().num_entries) == (1, 1)
    clock.now += 599
    tree.evict()
    assert tree.lookup(tokens(*range(100), 9999)).num_usable_tokens == 100


def test_live_rows_keep_their_places() -> None:
    """A row that stands in the middle of what is joined still extends from there."""
    tree = make_tree()
    row = tokens(*range(100))
    store(tree, row, range(10, 101, 10))
    branch = tokens(*range(50), 700, 701)
    lease = tree.acquire(tree.lookup(branch))
    list(coalesce(tree, 128))
    tree.extend(lease, branch, 52, lambda start, end: Rows(branch.ids[start:end]))
    check_integrity(tree)
    assert_exact(tree.lookup(tokens(*branch.ids, 1)), tokens(*branch.ids, 1))


def test_an_old_plan_is_refused() -> None:
    """What was planned before something left must not be put back."""
    tree = make_tree()
    store(tree, tokens(*range(100)), range(10, 101, 10))
    run = tree.plan_coalesce(128)
    assert run is not None
    tree.replace(run, joined(run))
    with pytest.raises(ValueError, match="plan again"):
        tree.replace(run, joined(run))


def test_a_tidy_tree_has_nothing_to_join() -> None:
    """No plan for whole records, however many there are."""
    tree = make_tree()
    store(tree, tokens(*range(100)), (50, 100))
    assert tree.plan_coalesce(64) is None


def test_a_prompt_is_not_found_where_others_tokens_stand_since() -> None:
    """Its place was cut off by a branch and left; the rest was joined with the branch, and is as long as it was."""
    tree = make_tree()
    asked, branch = tokens(*range(8), 100, 101), tokens(*range(8), 200, 201)
    store(tree, asked)
    prompt = tokens(*asked.ids, 999)
    assert tree.lookup(prompt).num_usable_tokens == 10
    store(tree, branch)
    (leaf,) = [node for node in tree._trie.nodes() if node.start == 8 and node.tokens.key_at(8) == asked.ids[8]]
    tree._trie.detach(leaf)
    assert list(coalesce(tree, 20))
    match = tree.lookup(prompt)
    assert match.num_usable_tokens == 8
    assert_exact(match, prompt)
