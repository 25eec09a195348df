"""What a row adds goes to the disk from the last place that the disk has: as much and as right as if the whole path was
looked through, and without a look at it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobName
from kvserve.cache.records import Limits
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine import disk_writing
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.snapshot import KvSlice, StateSnapshot, merged
from tests.cache.disks import HASHER, WAIT_SECONDS, Disk, named
from tests.cache.visits import counting
from tests.laws import IS_FULL, num_examples

ROOMY = Limits(max_bytes=10**12, max_checkpoint_bytes=10**12, max_entries=10**6, max_entries_per_owner=10**6)
STOP_TOKENS = 6
FEW, MANY, MAX_NODES = 40, 400 if IS_FULL else 160, 80
"""Stops of a prompt, and how many looks at nodes of tree and disk are enough, however many there were."""


@dataclass
class Kept:
    """A tree with a disk behind it. A row of KV is its token. `is_whole`: all of a path is looked through each time."""

    disk: Disk
    needs_checkpoints: bool
    is_whole: bool = False

    def __post_init__(self) -> None:
        self.tree = PrefixTree(
            HASHER,
            ROOMY,
            needs_checkpoints=self.needs_checkpoints,
            cut_payload=lambda payload, start, end: merged([(payload, start, end)]),  # type: ignore[list-item]
        )
        self.cache = DiskCache(
            self.disk.tier,
            self.tree,
            needs_checkpoints=self.needs_checkpoints,
            is_ram_lent=False,
            make_room=lambda _num_bytes: None,
            make_some_room=lambda _num_bytes: True,
        )

    def say(self, ids: Sequence[int], num_stops: int, user: str) -> None:
        """A row from its lookup to its end."""
        tokens = TokenSequence((*ids, 99))
        lease = self.tree.acquire(self.tree.lookup(tokens), user=user)
        for stop in range(1, num_stops + 1):
            self.stop(lease, tokens, max(lease.num_tokens, len(ids) * stop // num_stops))
        self.tree.mark_end(lease)
        self.tree.release(lease)

    def stop(self, lease, tokens: TokenSequence, end: int) -> None:  # type: ignore[no-untyped-def]
        """The row is kept up to here."""
        state = StateSnapshot((), 8)
        extension = self.tree.extend(lease, tokens, end, lambda a, b: rows(tokens.ids[a:b]), lambda: state, "message")
        is_new = extension.num_new_tokens or extension.has_new_checkpoint
        if not self.is_whole and is_new:
            self.cache.writing.save_end(lease, extension.start)
        elif not self.is_whole:
            self.cache.writing.note_users(lease)
        elif (path := self.tree.kept(lease)) is not None and is_new:
            self.cache.writing.save(path, extension.start)
        elif path is not None:
            self.disk.tier.note_users(path)

    def coalesce(self) -> None:
        while (run := self.tree.plan_coalesce(16)) is not None:
            self.tree.replace(run, merged([(each.payload, each.first_row, each.end_row) for each in run.pieces]))  # type: ignore[misc]

    def known(self) -> dict[BlobName, dict[str, int]]:
        """Every blob, whose name says what it stands on and which tokens it has, and who used it."""
        assert self.disk.tier.flush(WAIT_SECONDS)
        return {name: entry.users for name, entry in self.disk.tier.index._by_name.items()}

    def lose(self, number: int) -> None:
        """A blob turns out to be gone, with what stands on it."""
        names = sorted(self.known())
        if names:
            self.disk.tier.index.forget(names[number % len(names)])


def rows(ids: Sequence[int]) -> KvSlice:
    array = mx.array(ids, mx.int32).reshape(1, 1, -1, 1)
    return KvSlice(((array,),), len(ids), array.nbytes)


@contextmanager
def kept(*, needs_checkpoints: bool, is_whole: bool = False) -> Iterator[Kept]:
    with TemporaryDirectory() as folder, Disk(Path(folder), is_scratch=True) as disk:
        yield Kept(disk, needs_checkpoints, is_whole)


said = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 4), st.sampled_from("ab"))
happened = st.lists(st.one_of(said, st.integers(0, 50), st.just("joined")), min_size=1, max_size=12)
PASSED_BEFORE: list[object] = [([1, 1], 1, "b"), ([1, 1, 0], 1, "a"), ([1], 1, "a"), ([1, 1, 0], 1, "a")]
"""The state behind one token is written for a, at a place that b passed before."""


@pytest.mark.parametrize(("needs_checkpoints", "stride_tokens"), [(False, 1), (True, 1), (True, 5)])
@given(events=happened)
@example(events=PASSED_BEFORE)
@settings(max_examples=num_examples(25), deadline=None)
def test_the_disk_knows_what_it_would_know_of_whole_paths(
    needs_checkpoints: bool, stride_tokens: int, events: list[object]
) -> None:
    """The same blobs at the same places, used by the same users, whatever was said, joined in RAM and lost on disk, and
    where not every state is worth writing."""
    with (
        pytest.MonkeyPatch.context() as patch,
        kept(needs_checkpoints=needs_checkpoints) as ends,
        kept(needs_checkpoints=needs_checkpoints, is_whole=True) as whole,
    ):
        patch.setattr(disk_writing, "STRIDE_TOKENS", stride_tokens)
        for event in events:
            for each in (ends, whole):
                if isinstance(event, tuple):
                    each.say(*event)
                elif isinstance(event, int):
                    each.lose(event)
                else:
                    each.coalesce()
            assert ends.known() == whole.known()
        for event in events:
            if isinstance(event, tuple):
                run, chain = named(event[0])
                assert_rows(ends, event[0], ends.disk.tier.index.find(run, chain).depth)


def assert_rows(each: Kept, ids: Sequence[int], depth: int) -> None:
    """What comes back of a prompt are its own rows."""
    for step in each.disk.tier.index.find(*named(ids)).steps:
        blob = each.disk.read(step.segment)
        assert blob is not None
        first = blob.head.tokens.start
        part = bytes(blob.tensors[0].data)[(step.start - first) * 4 : (step.end - first) * 4]
        assert list(memoryview(part).cast("i")) == list(ids[step.start : min(step.end, depth)])


@pytest.mark.parametrize(("needs_checkpoints", "num_stops"), [(False, FEW), (False, MANY), (True, FEW), (True, MANY)])
def test_a_stop_with_a_disk_looks_at_what_is_new(
    monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_stops: int
) -> None:
    """The first one of a row tells all blobs that it stands on who used them; later ones only what is new."""
    ids = tuple(range(num_stops * STOP_TOKENS))
    with kept(needs_checkpoints=needs_checkpoints) as each:
        each.say(ids, num_stops, "a")
        tokens = TokenSequence((*ids, *range(10**6, 10**6 + 10 * STOP_TOKENS)))
        lease = each.tree.acquire(each.tree.lookup(tokens), user="a")
        each.stop(lease, tokens, lease.num_tokens + STOP_TOKENS)
        visits = counting(monkeypatch)
        for _ in range(5):
            seen = visits.of(lambda: each.stop(lease, tokens, lease.num_tokens + STOP_TOKENS))
            assert seen.num_nodes <= MAX_NODES and seen.num_tokens <= 8 * STOP_TOKENS, seen
        each.tree.release(lease)


@pytest.mark.parametrize(("needs_checkpoints", "num_stops"), [(False, FEW), (False, MANY), (True, FEW), (True, MANY)])
def test_a_hold_looks_beyond_what_ram_has(
    monkeypatch: pytest.MonkeyPatch, needs_checkpoints: bool, num_stops: int
) -> None:
    """What RAM has of a prompt was compared when it was looked up; on disk the look begins there."""
    ids = tuple(range(num_stops * STOP_TOKENS))
    with kept(needs_checkpoints=needs_checkpoints) as each:
        each.say(ids, num_stops, "a")
        assert each.disk.tier.flush(WAIT_SECONDS)
        tokens = TokenSequence((*ids, 10**6, 10**6 + 1))
        each.tree.lookup(tokens)
        visits = counting(monkeypatch)
        seen = visits.of(lambda: each.cache.let_go(each.cache.pin(tokens, owner="a")))
        assert seen.num_nodes <= MAX_NODES and seen.num_tokens <= STOP_TOKENS, seen


def test_what_the_disk_lost_above_a_row_is_written_again() -> None:
    """A row goes on while what it stands on vanishes from the disk: its next stop puts all of it there."""
    with kept(needs_checkpoints=True) as each:
        ids = list(range(30))
        tokens = TokenSequence((*ids, 99))
        lease = each.tree.acquire(each.tree.lookup(tokens), user="a")
        for end in (10, 20):
            each.stop(lease, tokens, end)
        first = each.disk.tier.index.find(*named(ids)).steps[0].segment
        each.disk.tier.index.forget(first.name)
        assert each.disk.tier.index.find(*named(ids)).depth == 0
        each.stop(lease, tokens, 30)
        found = each.disk.tier.index.find(*named(ids))
        assert found.depth == 30 and all(step.segment.users == {"a": step.end} for step in found.steps)
        each.tree.release(lease)
