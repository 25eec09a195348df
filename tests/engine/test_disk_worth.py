"""Of the states that a prefill keeps the disk gets those that requests come back to, and a few between."""

import pytest

from kvserve.cache.records import BoundaryKind
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine import disk_writing
from kvserve.engine.disk_writing import STRIDE_TOKENS, is_worth_writing
from kvserve.engine.snapshot import StateSnapshot
from tests.cache.disks import WAIT_SECONDS
from tests.engine.test_disk_writing import Kept, kept, rows

IDS = tuple(range(60))


def say(each: Kept, *stops: tuple[int, BoundaryKind]) -> None:
    """A row that keeps a state at each of these."""
    tokens = TokenSequence((*IDS, 99))
    lease = each.tree.acquire(each.tree.lookup(tokens), user="a")
    for end, kind in stops:
        start = lease.num_tokens
        each.tree.extend(lease, tokens, end, lambda a, b: rows(tokens.ids[a:b]), lambda: StateSnapshot((), 8), kind)
        each.cache.writing.save_end(lease, start)
    each.tree.mark_end(lease)
    each.tree.release(lease)


def on_disk(each: Kept) -> list[int]:
    """Where the disk has states."""
    assert each.disk.tier.flush(WAIT_SECONDS)
    return [step.end for step in each.disk.found(IDS).written().steps if step.checkpoint is not None]


def in_ram(tree: PrefixTree) -> list[int]:
    return sorted(node.end for path in tree.sequences() for node in path if node.checkpoint is not None)


def test_a_tool_turn_writes_one_state() -> None:
    """RAM has one at each end; the disk gets those of the system prompt, of the user's words and of the answers."""
    with kept(needs_checkpoints=True) as each:
        say(
            each,
            (10, "system"),
            (20, "user"),
            (24, "tail"),
            (30, "answer"),
            (32, "message"),
            (40, "tail"),
            (50, "answer"),
        )
        assert in_ram(each.tree) == [10, 20, 24, 30, 32, 40, 50]
        assert on_disk(each) == [10, 20, 30, 50]


def test_a_long_way_without_such_an_end_has_a_state_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far apart as the stride asks."""
    monkeypatch.setattr(disk_writing, "STRIDE_TOKENS", 20)
    with kept(needs_checkpoints=True) as each:
        say(each, *((end, "message") for end in range(5, 60, 5)))
        assert on_disk(each) == [20, 40]


def test_a_long_prompt_has_a_state_at_each_of_its_strides() -> None:
    """A server that is killed in the middle goes on from the last one."""
    with kept(needs_checkpoints=True) as each:
        say(each, (10, "system"), (25, "stride"), (40, "stride"))
        assert on_disk(each) == [10, 25, 40]


def test_where_a_path_ends_at_a_shutdown_its_state_is_written() -> None:
    """Of a row that was ended in its prompt: the next run goes on from there."""
    with kept(needs_checkpoints=True) as each:
        say(each, (10, "system"), (24, "message"), (40, "message"))
        assert on_disk(each) == [10]
        each.cache.writing.save_kept(is_end=True)
        assert on_disk(each) == [10, 40]


def test_what_the_disk_is_not_to_have_leaves_ram_unasked() -> None:
    """No path is built for it, and nothing waits."""
    with kept(needs_checkpoints=True) as each:
        say(each, (10, "system"), (24, "message"), (30, "answer"))
        assert each.cache.writing.num_unwritten_bytes() == each.disk.tier.stats().num_queued_bytes
        states = [node.copies.state for path in each.tree.sequences() for node in path]
        assert [state is disk_writing.UNWANTED for state in states] == [False, True, False]


@pytest.mark.parametrize("kind", ["tail", "message", "image", "divergence"])
def test_other_kinds_wait_for_the_stride(kind: BoundaryKind) -> None:
    """One token makes the difference."""
    assert not is_worth_writing(kind, STRIDE_TOKENS - 1, is_end=False)
    assert is_worth_writing(kind, STRIDE_TOKENS, is_end=False) and is_worth_writing(kind, 1, is_end=True)


def test_however_many_messages_there_are_the_stride_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tool loop whose answers come back in other words: a message here is as short as a token."""
    monkeypatch.setattr(disk_writing, "STRIDE_TOKENS", 20)
    with kept(needs_checkpoints=True) as each:
        say(each, *((end, "message") for end in range(1, 60)))
        assert on_disk(each) == [20, 40]
