"""What a server finds, or leaves behind, in a folder that others write in: places, locks, words of who is forgotten."""

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.cache import disk_store, disk_tier
from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_store import LOCK_NAME, FolderStore
from tests.cache.disks import WAIT_SECONDS, Disk
from tests.cache.test_disk_neighbours import LONG, before, look

LONGER, LONGEST = [*LONG, 1, 2, 3], [*LONG, 1, 2, 3, 4, 5]


def make_old(folder: Path, condition: str) -> None:
    """Nobody has used these blobs for very long, as far as the catalog know."""
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        assert db.execute(f"UPDATE blobs SET used_at = 1.0 WHERE {condition}").rowcount


def use(disk: Disk, ids: Sequence[int], user: str) -> None:
    """Somebody has used all of it, and that is put down."""
    disk.tier.index.use(*disk.named(ids), {user: len(ids)})
    assert disk.tier.flush(WAIT_SECONDS)


def forget(disk: Disk, user: str) -> None:
    """This server is told that somebody is to be forgotten, and says that it is done."""
    assert disk.tier.forget(user.__eq__, WAIT_SECONDS).is_done


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another server was stopped while it had the folder's lock."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_state_leaves_with_the_neighbours_piece_that_it_stands_on(tmp_path: Path) -> None:
    """The piece serves nobody here, as its tokens are known from another one; the state stands on it all the same."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG, states=(40,))
        other.say(LONG[:20], states=(20,))
        look(one)
        assert one.recall(LONG) == (LONG, [20, 40])
        make_old(tmp_path, "start = 0 AND length(tokens) = 80")
        look(one)
        assert one.recall(LONG) == (LONG, [40]) and one.faults == {}


def test_a_state_leaves_its_place_after_what_it_stands_on(tmp_path: Path) -> None:
    """A file is gone, the state's own a little later: the tokens are there from another piece."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG[:20])
        other.say(LONG)
        [piece] = [step.segment.name for step in other.found(LONG).steps]
        other.say(LONG, states=(10,))
        [state] = [step.checkpoint.name for step in other.found(LONG).steps if step.checkpoint is not None]
        look(one)
        assert one.recall(LONG) == (LONG, [10])
        for name, states in ((piece, [10]), (state, [])):
            next(path for path in one.files() if path.stem == name).unlink()
            look(one)
            assert one.recall(LONG[:20]) == (LONG[:20], states)


def test_who_dies_while_blobs_leave_leaves_none_without_what_it_stands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a neighbour goes on writing on what no start finds a place for."""
    real, gone = FolderStore.delete, list[BlobName]()
    with Disk(tmp_path) as other:
        other.say(LONG)
        other.say(LONGER)
        with Disk(tmp_path) as dying:
            look(dying)
            make_old(tmp_path, "start = 0")

            def delete(store: FolderStore, model: str, name: BlobName) -> bool:
                gone.append(name)
                return len(gone) == 1 and real(store, model, name)

            with monkeypatch.context() as patch:
                patch.setattr(FolderStore, "delete", delete)
                look(dying)
            assert len(gone) == 2
        other.say(LONGEST)
        num_written = other.found(LONGEST).written().depth
    with Disk(tmp_path) as third:
        assert len(third.recall(LONGEST)[0]) >= num_written


def test_what_is_forgotten_while_it_is_written_stays_where_a_neighbour_stands_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were taken back a moment later."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        look(one)
        other.say(LONG)
        other.say(LONGER)
        with before(
            monkeypatch, one, "write", lambda: one.tier.discard(one.tier.index.exclusive(*one.named(LONG))), after=True
        ):
            one.say(LONG)
        assert one.tier.flush(WAIT_SECONDS)
        assert other.recall(LONGER)[0] == LONGER
    with Disk(tmp_path) as third:
        assert third.recall(LONGER)[0] == LONGER


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_neighbour_that_stands_still_with_the_lock_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once: what is there is read, what is new is written later."""
    monkeypatch.setattr(disk_store, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(disk_store, "HELD_SECONDS", 0.0)
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.0)
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        with held(tmp_path):
            disk.say(LONGER, flush=False)
            assert disk.tier.flush(60), "the disk's thread hangs"
            assert disk.recall(LONGER)[0] == LONG
            assert set(disk.faults) == {"unwritable"} and "held by another server" in disk.lines[0]
            with Disk(tmp_path) as third:
                assert third.recall(LONG)[0] == LONG
        assert disk.tier.take_lost()
        disk.say(LONGER)
        assert disk.recall(LONGER)[0] == LONGER


def test_where_a_lock_must_fit_how_a_file_was_opened_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses to share what cannot be read, and to have alone what cannot be written (fs/nfs/nfs4proc.c)."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        needed = os.O_RDONLY if operation & fcntl.LOCK_SH else os.O_WRONLY
        if mode not in (needed, os.O_RDWR):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(disk_store, "ABANDONED_SECONDS", -1.0)
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        assert disk.recall(LONG)[0] == LONG and disk.faults == {}
        (disk.files()[0].parent / "dead.part").write_bytes(b"half")
        disk.store.sweep()
        assert not list(tmp_path.rglob("*.part"))


# --- who is forgotten -------------------------------------------------------------------------------------------------


def test_who_is_forgotten_leaves_no_second_state_of_a_neighbour(tmp_path: Path) -> None:
    """Both servers have the same place of a conversation: the state of one finds no place in the other's index."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG, states=(40,))
        use(one, LONG, "gone")
        other.say(LONG[:20])
        other.say(LONG, states=(40,))
        use(other, LONG, "gone")
        forget(one, "gone")
        assert one.files() == []


def test_a_second_state_that_somebody_else_used_stays(tmp_path: Path) -> None:
    """The catalog say who used it."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG, states=(40,))
        use(one, LONG, "gone")
        other.say(LONG[:20])
        other.say(LONG, states=(40,))
        use(other, LONG, "gone")
        for each in (one, other):
            use(each, LONG, "stays")
        forget(one, "gone")
        assert other.recall(LONG) == (LONG, [40])


def test_who_is_forgotten_leaves_nothing_that_lost_what_it_stood_on(tmp_path: Path) -> None:
    """It is of no use, and has their words all the same."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        [first] = disk.files()
        disk.say(LONGER)
        use(disk, LONGER, "gone")
        first.unlink()
        look(disk)
        forget(disk, "gone")
        assert disk.files() == []
        with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
            assert db.execute("SELECT name FROM blobs UNION SELECT user FROM users").fetchall() == []
