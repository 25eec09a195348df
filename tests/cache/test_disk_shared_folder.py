"""What a server finds, or leaves behind, in a folder that others write in: places, locks, words of who is forgotten."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.cache import disk_store, disk_tier
from kvserve.cache.disk_store import LOCK_NAME
from tests.cache.disks import Disk
from tests.cache.test_disk_neighbours import LONG, look

LONGER = [*LONG, 1, 2, 3]


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
            assert disk.tier.flush(10.0), "the disk's thread hangs"
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
