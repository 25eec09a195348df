"""The tree's contract, case by case; `test_tree_machine.py` has the any-order law."""

import random
import time
from dataclasses import replace

import pytest

from kvserve.cache import trie as trie_module
from kvserve.cache.block_hash import sha256
from kvserve.cache.records import Limits
from kvserve.cache.token_run import common_end
from kvserve.core import TokenSequence
from tests.cache.payloads import (
    ROOMY,
    ROW_BYTES,
    STATE_BYTES,
    Atom,
    Clock,
    Rows,
    WholeState,
    assert_exact,
    flatten,
    keys_of,
    make_tree,
    rows_of,
    short_digest,
    store,
)
from tests.integrity import check_integrity


def tokens(*ids: int) -> TokenSequence:
    return TokenSequence(ids)


def test_an_empty_tree_knows_nothing() -> None:
    """A first prompt matches nothing and restores nothing."""
    match = make_tree().lookup(tokens(1, 2, 3))
    assert (match.num_matched_tokens, match.num_usable_tokens, match.pieces, match.state) == (0, 0, (), None)
    assert match.cause == "nothing"


def test_an_empty_prompt_is_no_special_case() -> None:
    """No tokens: nothing is usable, a row can still stand on nothing."""
    tree = make_tree()
    lease = tree.acquire(tree.lookup(tokens()))
    tree.mark_end(lease)
    tree.release(lease)
    check_integrity(tree)


@pytest.mark.parametrize("use_index", [True, False])
def test_where_all_can_be_cut_any_offset_is_usable(use_index: bool) -> None:
    """A divergence in the middle of a block and of a segment is found to the token."""
    tree = make_tree(use_index=use_index)
    store(tree, tokens(*range(20)))
    prompt = tokens(*range(11), 99, 98)
    match = tree.lookup(prompt)
    assert (match.num_matched_tokens, match.num_usable_tokens, match.cause) == (11, 11, "diverged")
    assert_exact(match, prompt)


def test_the_last_token_is_always_computed() -> None:
    """A repeated prompt restores all but its last token."""
    tree = make_tree()
    store(tree, tokens(*range(20)))
    match = tree.lookup(tokens(*range(20)))
    assert (match.num_matched_tokens, match.num_usable_tokens, match.cause) == (20, 19, "whole")


def test_what_merely_goes_on_has_ended() -> None:
    """A next turn appends to what is stored: that is no divergence."""
    tree = make_tree()
    store(tree, tokens(*range(8)))
    assert tree.lookup(tokens(*range(12))).cause == "ended"


def test_without_cuts_the_deepest_checkpoint_serves() -> None:
    """What matches beyond the last checkpoint is computed again, and the match says how much that is."""
    tree = make_tree(needs_checkpoints=True)
    store(tree, tokens(*range(20)), (6, 13, 20))
    prompt = tokens(*range(17), 99)
    match = tree.lookup(prompt)
    assert (match.num_matched_tokens, match.num_usable_tokens, match.cause) == (17, 13, "no_checkpoint")
    assert match.num_trim_missed_tokens == 4
    assert_exact(match, prompt)


def test_a_short_entry_never_shadows_a_long_one() -> None:
    """Whatever came last, the deepest usable place wins."""
    tree = make_tree(needs_checkpoints=True)
    store(tree, tokens(*range(30)), (10, 30))
    store(tree, tokens(*range(5)), (5,))
    store(tree, tokens(*range(10), 77), (11,))
    assert tree.lookup(tokens(*range(40))).num_usable_tokens == 30


def test_what_is_shared_is_stored_once() -> None:
    """Ten conversations on one system prompt hold its bytes once and their own tails."""
    tree = make_tree()
    system = tuple(range(400))
    for number in range(10):
        store(tree, tokens(*system, *range(1000 * number + 1000, 1000 * number + 1010)))
    assert tree.stats().num_stored_tokens == 400 + 10 * 10
    assert tree.stats().ram_bytes == 4 * (400 + 10 * 10)
    check_integrity(tree)


def test_two_rows_that_computed_the_same_store_it_once() -> None:
    """A row that comes second is asked only for what is new; an equal checkpoint is not taken again."""
    tree = make_tree(needs_checkpoints=True)
    one, other = tokens(*range(12)), tokens(*range(8), 90, 91)
    leases = [tree.acquire(tree.lookup(one)), tree.acquire(tree.lookup(other))]
    tree.extend(leases[0], one, 12, rows_of(one), lambda: WholeState(one.ids))
    asked: list[tuple[int, int]] = []

    def take(start: int, end: int) -> Rows:
        asked.append((start, end))
        return Rows(other.ids[start:end])

    extension = tree.extend(leases[1], other, 10, take, lambda: WholeState(other.ids))
    assert asked == [(8, 10)] and (extension.first_new, extension.num_new_tokens) == (8, 2)
    again = tree.acquire(tree.lookup(tokens(*range(12), 5)))
    assert tree.extend(again, tokens(*range(12), 5), 12, take, lambda: WholeState(())).has_new_checkpoint is False
    check_integrity(tree)


def test_a_checkpoint_can_be_added_inside_what_is_stored() -> None:
    """The divergence point that a later prompt discovers gets its state without storing a row twice."""
    tree = make_tree(needs_checkpoints=True)
    store(tree, tokens(*range(20)), (20,))
    other = tokens(*range(9), 50, 51)
    store(tree, other, (9, 11))
    assert tree.stats().num_stored_tokens == 22
    match = tree.lookup(tokens(*range(9), 60))
    assert match.num_usable_tokens == 9
    assert_exact(match, tokens(*range(9), 60))


@pytest.mark.parametrize("leaves_by", ["eviction", "deletion"])
def test_the_end_of_system_and_tools_stays_one_whoever_else_stops_there(leaves_by: str) -> None:
    """A client that left just there takes nothing away: the prompt outlives the only conversation that stands on it."""
    clock = Clock()
    tree = make_tree(replace(ROOMY, max_bytes=ROW_BYTES * 39, max_entries_per_owner=1), clock=clock)
    row, system = tokens(*range(20)), tokens(*range(8))
    store(tree, row, (8, 20), kinds={8: "system"}, owner="one")
    store(tree, system, kinds={8: "answer"})
    if leaves_by == "eviction":
        clock.now += 1
        store(tree, tokens(*range(100, 120)), owner="one")
        tree.evict()
    else:
        tree.discard(row, lambda owner: owner == "one")
    assert tree.known_depth(row) == 8


def test_images_are_told_apart_by_their_content() -> None:
    """Two images of one size have equal ids and share nothing from their first token on."""
    tree = make_tree()
    cat: list[Atom] = [1, 2, "cat", 3, 4]
    dog: list[Atom] = [1, 2, "dog", 3, 4]
    assert flatten(cat).ids == flatten(dog).ids
    store(tree, flatten(cat))
    assert tree.lookup(flatten(dog)).num_matched_tokens == 2
    assert tree.lookup(flatten(cat)).num_usable_tokens == 6


def test_no_row_starts_inside_an_image() -> None:
    """A prompt that ends with an image retreats to before it rather than to its last token but one."""
    tree = make_tree()
    store(tree, flatten([1, 2, "cat", 3]))
    match = tree.lookup(flatten([1, 2, "cat"]))
    assert (match.num_matched_tokens, match.num_usable_tokens, match.cause) == (5, 2, "inside_image")
    assert tree.stats().num_image_retreats == 1


def test_partitions_share_nothing() -> None:
    """What one tenant stored is unknown to another."""
    tree = make_tree()
    store(tree, tokens(*range(20)))
    assert tree.lookup(tokens(*range(20)), partition="tenant").num_matched_tokens == 0
    lease = tree.acquire(tree.lookup(tokens(*range(20)), partition="tenant"))
    tree.extend(lease, tokens(*range(20)), 20, rows_of(tokens(*range(20))))
    check_integrity(tree)
    assert tree.stats().num_stored_tokens == 40


def test_an_old_match_is_refused() -> None:
    """A match from before a change cannot be acquired: its nodes may be gone."""
    tree = make_tree()
    match = tree.lookup(tokens(1, 2, 3))
    store(tree, tokens(1, 2, 3))
    with pytest.raises(ValueError, match="look up again"):
        tree.acquire(match)


@pytest.mark.parametrize("end", [2, 9])
def test_a_row_extends_forward_and_within_its_tokens(end: int) -> None:
    """Neither back behind the lease nor beyond the row's tokens."""
    tree = make_tree()
    store(tree, tokens(*range(6)))
    row = tokens(*range(8))
    lease = tree.acquire(tree.lookup(row))
    with pytest.raises(ValueError, match="cannot be extended"):
        tree.extend(lease, row, end, rows_of(row))


def test_a_lease_keeps_its_place_when_others_split_it() -> None:
    """Rows that stand inside one node still stand on their own tokens after it was split between them."""
    tree = make_tree()
    long = tokens(*range(30))
    store(tree, long)
    leases = [tree.acquire(tree.lookup(tokens(*range(at), 99))) for at in (5, 12, 20)]
    store(tree, tokens(*range(12), 70, 71))
    check_integrity(tree)
    assert [lease.num_tokens for lease in leases] == [5, 12, 20]
    row = tokens(*range(20), 80)
    tree.extend(leases[2], row, 21, rows_of(row))
    check_integrity(tree)
    assert_exact(tree.lookup(tokens(*range(20), 80, 81)), tokens(*range(20), 80, 81))


@pytest.mark.parametrize("fails", ["rows", "state"])
def test_a_stop_that_cannot_be_kept_costs_no_later_one(fails: str) -> None:
    """Memory runs out while rows or a state are copied: the lease stays whole, and the next stop keeps all of it."""

    def out_of_memory(*_: int) -> Rows:
        raise MemoryError

    tree = make_tree(needs_checkpoints=True)
    store(tree, tokens(*range(10), 50, 51), (10, 12))
    row = tokens(*range(10), *range(20, 40))
    lease = tree.acquire(tree.lookup(row))
    take_rows = out_of_memory if fails == "rows" else rows_of(row)
    with pytest.raises(MemoryError):
        tree.extend(lease, row, 23, take_rows, out_of_memory)  # type: ignore[arg-type]
    check_integrity(tree)
    tree.extend(lease, row, 30, rows_of(row), lambda: WholeState(keys_of(row)))
    check_integrity(tree)
    longer = tokens(*row.ids, 60)
    match = tree.lookup(longer)
    assert match.num_usable_tokens == 30
    assert_exact(match, longer)


def test_after_clear_a_live_row_goes_on_alone() -> None:
    """Emptying the cache detaches live rows: what they add is not kept, nothing fails."""
    tree = make_tree(needs_checkpoints=True)
    row = tokens(*range(9))
    lease = store(tree, row, (4,), keep=True)
    tree.clear()
    assert tree.stats().ram_bytes == 0
    extension = tree.extend(lease, row, 9, rows_of(row), lambda: WholeState(()))
    assert (extension.num_new_tokens, extension.has_new_checkpoint) == (0, False)
    tree.mark_end(lease)
    tree.release(lease)
    check_integrity(tree)
    assert tree.lookup(row).num_matched_tokens == 0


def test_models_without_cuttable_layers_keep_checkpoints_only() -> None:
    """Rows without a payload are remembered by their tokens, and a checkpoint alone restores."""
    tree = make_tree(needs_checkpoints=True)
    row = tokens(*range(10))
    lease = tree.acquire(tree.lookup(row))
    tree.extend(lease, row, 10, lambda _start, _end: None, lambda: WholeState(row.ids))
    match = tree.lookup(tokens(*range(11)))
    assert match.num_usable_tokens == 10 and match.state is not None
    assert [piece.payload for piece in match.pieces] == [None]
    assert tree.stats().ram_bytes == STATE_BYTES
    check_integrity(tree)


def test_a_conversation_is_not_hashed_anew_with_every_turn() -> None:
    """A block is hashed when it is looked up first and when it is kept, however often a prompt repeats it."""
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return sha256(data)

    tree = make_tree(digest=counting)
    for length in range(50, 1000, 50):
        prompt, whole = tokens(*range(length)), tokens(*range(length + 30))
        tree.release(tree.acquire(tree.lookup(prompt)))
        lease = tree.acquire(tree.lookup(prompt))
        for end in (length - 1, length + 30):
            tree.extend(lease, whole, end, rows_of(whole))
        tree.release(lease)
    blocks = [data for data in hashed if len(data) > 32]
    assert len(blocks) <= 2 * 980 // 4


# --- a hash is a hint -------------------------------------------------------------------------------------------------


def colliding_prompts(num: int, length: int) -> list[TokenSequence]:
    rng = random.Random(7)
    return [TokenSequence(tuple(rng.randrange(3) for _ in range(length))) for _ in range(num)]


def count_wrong_matches(num: int = 120) -> int:
    """Prompts for which a tree with colliding hashes finds more or other tokens than are there."""
    tree, stored, num_wrong = make_tree(digest=short_digest), [], 0
    for prompt in colliding_prompts(num, 24):
        depth = max((common_prefix(prompt.ids, other.ids) for other in stored), default=0)
        match = tree.lookup(prompt)
        rows = [key for piece in match.pieces for key in piece.payload.keys[piece.first_row : piece.end_row]]  # type: ignore[union-attr]
        num_wrong += match.num_matched_tokens != depth or tuple(rows) != keys_of(prompt)[: match.num_usable_tokens]
        lease = tree.acquire(match)
        if match.num_matched_tokens == depth:
            tree.extend(lease, prompt, len(prompt), rows_of(prompt))
            stored.append(prompt)
        tree.release(lease)
    assert tree._trie.num_collisions > 0
    return num_wrong


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_a_collision_never_gives_a_wrong_match() -> None:
    """With one byte of hash almost every lookup meets a foreign block; the tokens decide."""
    assert count_wrong_matches() == 0


def test_negative_control_without_verification_matches_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts on a tree that believes its hashes: wrong matches, so the test above can fail."""
    monkeypatch.setattr(trie_module.Trie, "_is_prefix", lambda *_arguments: True)
    assert count_wrong_matches() > 0


def test_negative_control_images_without_digests_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of ids alone takes one image for the other."""

    def ids_only(one: object, other: object, start: int, limit: int) -> int:
        stripped = [type(run)(run.start, run.ids) for run in (one, other)]  # type: ignore[attr-defined, call-arg]
        return common_end(*stripped, start, limit)  # type: ignore[arg-type]

    monkeypatch.setattr(trie_module, "common_end", ids_only)
    tree = make_tree(use_index=False)
    store(tree, flatten([1, 2, "cat", 3, 4]))
    assert tree.lookup(flatten([1, 2, "dog", 3, 4])).num_matched_tokens == 7


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_bookkeeping_of_a_long_prompt_takes_milliseconds(needs_checkpoints: bool) -> None:
    """Lookup, insert and eviction of 100,000 known tokens take a few ms of a processor."""
    rng = random.Random(1)
    prompt = TokenSequence(tuple(rng.randrange(150_000) for _ in range(100_000)))
    tree = make_tree(needs_checkpoints=needs_checkpoints, block_size=16)
    empty = Rows(())
    lease = tree.acquire(tree.lookup(prompt))
    for end in range(200, 100_001, 200):
        tree.extend(lease, prompt, end, lambda _start, _end: empty, lambda: WholeState(()))
    tree.release(lease)
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        lease = tree.acquire(tree.lookup(prompt))
        tree.extend(lease, prompt, 100_000, lambda _start, _end: empty, lambda: WholeState(()))
        tree.mark_end(lease)
        tree.release(lease)
        tree.evict()
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.08


def test_limits_without_room_are_refused() -> None:
    """A budget of 0 bytes is a mistake, not an empty cache."""
    with pytest.raises(ValueError, match="max_bytes"):
        Limits(max_bytes=0, max_checkpoint_bytes=1, max_entries=1, max_entries_per_owner=1)
