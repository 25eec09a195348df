"""Two servers on one folder: neither loses what the other said to be written."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.cache import disk_store
from kvserve.cache.disk_store import FolderStore
from tests.cache.disks import MODEL, OTHER, ROOMY, WAIT_SECONDS, Disk
from tests.laws import num_examples

LONG = list(range(100, 140))


def look(disk: Disk) -> None:
    """The folder is reconciled once."""
    assert disk.tier._order(disk.tier.worker.account.reconcile, WAIT_SECONDS)


def rows(folder: Path) -> dict[str, float]:
    """Name -> when it was used."""
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as db:
        return dict(db.execute("SELECT name, used_at FROM blobs"))


@contextmanager
def before(
    monkeypatch: pytest.MonkeyPatch, of: Disk, method: str, happens: Callable[[], object], after: bool = False
) -> Iterator[None]:
    """Something happens once before (or after) a store does what it is asked next."""
    real, todo = getattr(FolderStore, method), [happens]

    def done(self: FolderStore, *arguments: object) -> object:
        found = real(self, *arguments) if after else None
        if self is of.store and todo:
            todo.pop()()
        return found if after else real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, method, done)
        yield
    assert not todo


def test_a_row_that_is_put_while_a_neighbour_looks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour has listed the files already when this one's file and row come."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        look(one)
        with before(monkeypatch, one, "beside_bytes", lambda: other.say(LONG)):
            look(one)
        assert len(rows(tmp_path)) == 1, "its row says when it was used, and who did"
        assert other.recall(LONG)[0] == LONG


def test_a_row_is_put_down_once_its_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed in between has said nothing that is not so."""
    seen = list[dict[str, float]]()
    with Disk(tmp_path) as one:
        look(one)
        with before(monkeypatch, one, "write", lambda: seen.append(rows(tmp_path)), after=True):
            one.say(LONG)
    assert seen == [{}] and len(rows(tmp_path)) == 1


def test_the_folder_of_a_model_that_has_nothing_yet_stays_writable(tmp_path: Path) -> None:
    """Another server removes empty folders of other models; whoever writes makes its own again."""
    with Disk(tmp_path) as one, Disk(tmp_path, model=OTHER) as other:
        look(other)
        one.say(LONG)
        assert one.recall(LONG)[0] == LONG and one.faults == {}
        for path in one.files():
            path.unlink()
        look(other)
        one.tier.flush(WAIT_SECONDS)
        assert set(one.faults) <= {"missing"}


def test_a_file_that_is_being_written_is_nobodys_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clocks say: a neighbour's sweep leaves it alone while its writer is there."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        look(one)
        look(other)
        monkeypatch.setattr(disk_store, "ABANDONED_SECONDS", -1.0)
        real = os.fsync

        def slow(descriptor: int) -> None:
            if threading.current_thread() is one.tier._thread:
                other.store.sweep()
            real(descriptor)

        monkeypatch.setattr(os, "fsync", slow)
        one.say(LONG)
        assert one.recall(LONG)[0] == LONG and one.faults == {}
        (one.files()[0].parent / "dead.part").write_bytes(b"half")
        other.store.sweep()
        assert not list(tmp_path.rglob("*.part")), "of one that died it goes"


def test_what_left_for_a_neighbours_cap_is_known_to_have_left(tmp_path: Path) -> None:
    """Else RAM would let go of it, as the disk has it."""
    with Disk(tmp_path) as one:
        one.say(LONG)
        [step] = one.found(LONG).steps
        size = one.tier.stats().total_bytes
        with Disk(tmp_path, replace(ROOMY, max_bytes=size + size // 2)) as other:
            other.say([7, 8, 9])
            assert other.recall(LONG)[0] == []
        look(one)
        assert step.segment.is_forgotten and one.found(LONG).depth == 0
        one.say(LONG)
        assert one.recall(LONG)[0] == LONG


def test_what_a_neighbour_just_wrote_on_does_not_leave_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beginning is the oldest there is until the very moment that a neighbour's file stands on it: it goes, and the
    neighbour knows that its own leads nowhere, or both stay."""
    with Disk(tmp_path) as one:
        one.say(LONG)
        size = one.tier.stats().total_bytes
        longer = [*LONG, 1, 2, 3]
        with Disk(tmp_path, replace(ROOMY, max_bytes=size + size // 2)) as other:
            with before(monkeypatch, one, "write", lambda: other.say([7, 8, 9]), after=True):
                one.say(longer)
            assert one.found(longer).written().depth == len(one.recall(longer)[0])
    with Disk(tmp_path) as third:
        assert third.recall(longer)[0] in (longer, [])


def test_a_file_that_a_neighbour_wrote_anew_does_not_leave_for_its_old_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob's row is old, its file was gone and is written again: who lets the old one leave lets the writer know."""
    with Disk(tmp_path) as one:
        one.say(LONG)
        size = one.tier.stats().total_bytes
        for path in one.files():
            path.unlink()
        assert one.recall(LONG)[0] == []
        with (
            Disk(tmp_path, replace(ROOMY, max_bytes=size + size // 2)) as other,
            before(monkeypatch, one, "write", lambda: other.say([7, 8, 9]), after=True),
        ):
            one.say(LONG)
        assert one.found(LONG).written().depth == len(one.recall(LONG)[0])


def test_what_a_neighbour_stands_on_stays_when_its_writer_takes_it_back(tmp_path: Path) -> None:
    """An answer that is retracted serves only its own path, as far as this server knows."""
    answered, gone_on = [*LONG, 1, 2, 3], [*LONG, 1, 2, 3, 4, 5]
    with Disk(tmp_path) as one:
        one.say(LONG)
        one.say(answered)
        with Disk(tmp_path) as other:
            other.say(gone_on)
            run, chain = one.named(answered)
            one.tier.discard(one.tier.index.exclusive(run, chain, len(LONG)))
            assert one.tier.flush(WAIT_SECONDS)
            assert other.recall(gone_on)[0] == gone_on
    with Disk(tmp_path) as third:
        assert third.recall(gone_on)[0] == gone_on


def test_the_same_tokens_in_other_pieces_carry_what_stands_on_them(tmp_path: Path) -> None:
    """Each server wrote the same beginning in pieces of its own, and an end of its own: the next one has both."""
    ends = [*LONG, 1, 1, 1], [*LONG, 2, 2, 2], [*LONG[:30], 3, 3]
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG, states=(40,))
        other.say(LONG[:20])
        other.say(LONG[:34], states=(34,))
        other.say([*LONG, 8])
        one.say(ends[0], states=(43,))
        other.say(ends[1], states=(43,))
        one.say(ends[2])
        for each in (one, other):
            look(each)
            for ids in ends:
                assert each.recall(ids)[0] == ids
    with Disk(tmp_path) as third:
        assert third.recall(ends[0]) == (ends[0], [34, 40, 43])
        assert third.recall(ends[1]) == (ends[1], [34, 40, 43])
        assert third.recall(ends[2])[0] == ends[2]
        assert third.faults == {}


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
said = st.tuples(st.integers(0, 1), prompts, st.booleans(), st.booleans())


@settings(max_examples=num_examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(events=st.lists(said, min_size=1, max_size=10))
def test_whatever_two_servers_write_the_next_one_has_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, list[int], bool, bool]]
) -> None:
    """Random prompts from few tokens, so that pieces overlap in every way; now and then one looks at the folder."""
    folder = tmp_path_factory.mktemp("kv")
    with Disk(folder) as one, Disk(folder) as other:
        for number, ids, looks, is_based in events:
            each = (one, other)[number]
            each.say(ids, states=(len(ids),), is_based=is_based)
            if looks:
                look(each)
    with Disk(folder) as third:
        for _, ids, _, _ in events:
            rows, states = third.recall(ids)
            assert rows == ids and len(ids) in states
        assert third.faults == {}


def test_a_volume_without_locks_is_used_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network shares: for one server all is well there."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        disk.store.sweep()
        assert disk.recall(LONG)[0] == LONG
        assert disk.faults == {"unlocked": 1} and "two servers" in disk.lines[0]


def test_books_that_are_made_anew_under_a_server_list_the_files_of_all_models_again(tmp_path: Path) -> None:
    """What is listed nowhere never leaves, nor with the one whose words it has."""
    with Disk(tmp_path, model=OTHER) as other:
        other.say(LONG)
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    with Disk(tmp_path) as one:
        look(one)
        assert len(rows(tmp_path)) == 1
        with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
            db.execute("DROP TABLE blobs")
        look(one)  # notices it
        look(one)
        assert len(rows(tmp_path)) == 1
        assert one.tier.forget_of_others(lambda user: True).is_done and one.files() == []


@pytest.mark.parametrize("happens", ["opening", "writing"])
def test_a_neighbour_that_sweeps_at_that_moment_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    """It removes the folder, which is empty, again and again before anything is in it: two ranks that start at once met
    so, one of them had no disk from there on, and nothing was found behind the next start."""
    folder, neighbour, times = tmp_path / OTHER, FolderStore(tmp_path, MODEL), 3
    real = Path.mkdir

    def swept(self: Path, *arguments: int, **named: bool) -> None:
        nonlocal times
        real(self, *arguments, **named)
        if self == folder and times and (happens == "opening" or has_opened):
            times -= 1
            neighbour.sweep()
            assert not folder.exists()

    has_opened = False
    monkeypatch.setattr(Path, "mkdir", swept)
    with Disk(tmp_path, model=OTHER) as disk:
        has_opened = True
        neighbour.sweep()
        disk.say(LONG)
        assert disk.recall(LONG)[0] == LONG and disk.faults == {}
    assert not times


def test_a_folder_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    """A file of its name: no try makes it a folder."""
    (tmp_path / OTHER).write_text("a file")
    with pytest.raises(OSError, match=OTHER):
        Disk(tmp_path, model=OTHER)
