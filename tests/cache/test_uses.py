"""A use is noted where a row stood, and goes to what that stood on when it leaves."""

from dataclasses import replace

import pytest

from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import ROOMY, ROW_BYTES, Clock, keys_of, make_tree, rows_of, store
from tests.integrity import check_integrity

SYSTEM = tuple(range(10))
ONE, OTHER = TokenSequence((*SYSTEM, *range(20, 40))), TokenSequence((*SYSTEM, *range(50, 70)))


def matched(tree: PrefixTree, tokens: TokenSequence) -> int:
    return tree.lookup(tokens).num_matched_tokens


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_whose_end_left_keeps_what_it_stood_on(needs_checkpoints: bool) -> None:
    """The end of a's conversation leaves RAM and b is forgotten: a used the system prompt too, so that stays."""
    clock = Clock()
    limits = replace(ROOMY, max_bytes=10**4)
    tree = make_tree(limits, clock=clock, needs_checkpoints=needs_checkpoints)
    store(tree, ONE, user="a")
    clock.now += 100
    store(tree, OTHER, user="b")
    tree.evict(limits.max_bytes - tree.num_ram_bytes + ROW_BYTES)
    assert (matched(tree, ONE), matched(tree, OTHER)) == (len(SYSTEM), len(OTHER))
    tree.forget(lambda user: user == "b")
    assert matched(tree, OTHER) == tree.stats().num_stored_tokens == len(SYSTEM)
    tree.forget(lambda user: user == "a")
    assert tree.num_ram_bytes == 0


def test_what_a_row_stood_on_was_used_as_long_as_the_row_ran() -> None:
    """Its answer is taken back after a minute: what it began with is as young as that."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, ttl_seconds=100.0), clock=clock)
    store(tree, ONE)
    longer = TokenSequence((*ONE.ids, *range(80, 95)))
    lease = tree.acquire(tree.lookup(longer))
    clock.now += 60
    tree.extend(lease, longer, len(longer), rows_of(longer))
    tree.retract(lease, len(ONE))
    clock.now += 60
    tree.evict()
    assert tree.lookup(longer).num_matched_tokens == len(ONE)
    clock.now += 60
    tree.evict()
    assert tree.num_ram_bytes == 0


def test_a_row_that_computes_other_tokens_moves_its_prompts_place_no_further() -> None:
    """Only as far as it computes what the prompt has is the prompt found from there."""
    tree = make_tree()
    lease = tree.acquire(tree.lookup(ONE))
    other = TokenSequence((*ONE.ids[:15], *range(70, 90)))
    for end in (12, 25, 35):
        tree.extend(lease, other, end, rows_of(other))
    assert keys_of(other)[:15] == keys_of(ONE)[:15]
    assert tree.lookup(ONE).num_matched_tokens == 15
    check_integrity(tree)
