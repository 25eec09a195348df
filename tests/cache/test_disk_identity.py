"""A blob that is forgotten and wanted again has the same name: what is done to the first one never meets the second."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.cache.disk_records import Entry
from kvserve.cache.disk_store import FolderStore
from tests.cache.disks import WAIT_SECONDS, Disk, named, names_of

LONG = list(range(100, 140))


@contextmanager
def held(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int = 1
) -> Iterator[tuple[threading.Event, Callable[[], None]]]:
    """The so-manieth call of a store's method by the disk thread stands still, before it does anything, from the
    event on until it is let go."""
    is_there, may_go, real, calls = threading.Event(), threading.Event(), getattr(FolderStore, method), []

    def stands(self: FolderStore, *arguments: object) -> object:
        if threading.current_thread().name == "kvserve-disk":
            calls.append(method)
            if len(calls) == number:
                is_there.set()
                assert may_go.wait(WAIT_SECONDS)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, method, stands)
        try:
            yield is_there, may_go.set
        finally:
            may_go.set()


def entry_of(disk: Disk, ids: list[int]) -> Entry:
    return disk.tier.index.find(*named(ids)).steps[-1].segment


def test_what_is_put_again_while_its_first_write_runs_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten while the file is being written, and wanted again: it is there, now and after a restart."""
    with Disk(tmp_path) as disk:
        with held(monkeypatch, "write") as (is_writing, let_go):
            disk.say(LONG, flush=False)
            assert is_writing.wait(WAIT_SECONDS)
            disk.tier.discard(names_of(disk.tier.index.find(*named(LONG))))
            assert disk.say(LONG, flush=False)
            second = entry_of(disk, LONG)
            let_go()
            assert disk.tier.flush(WAIT_SECONDS)
        assert second.is_written and not second.is_forgotten
        assert disk.recall(LONG)[0] == LONG
    with Disk(tmp_path) as disk:
        assert disk.recall(LONG)[0] == LONG


def test_what_is_put_again_while_the_first_is_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file is found while its blob is already another one that waits to be written: that one is written."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        first = entry_of(disk, LONG)
        [path] = disk.files()
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with held(monkeypatch, "read") as (is_reading, let_go):
            disk.tier.load([first])
            assert is_reading.wait(WAIT_SECONDS)
            disk.tier.index.forget(first.name)
            assert disk.say(LONG, flush=False)
            second = entry_of(disk, LONG)
            let_go()
            assert disk.tier.flush(WAIT_SECONDS)
        assert second.is_written and not second.is_forgotten
        assert disk.recall(LONG)[0] == LONG


@pytest.mark.parametrize("trouble", [FileNotFoundError, PermissionError])
def test_what_is_put_again_while_the_first_cannot_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: type[OSError]
) -> None:
    """The same where the file is gone, or cannot be opened."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        first = entry_of(disk, LONG)

        def fail(self: FolderStore, name: str, *_: object) -> bytearray:
            raise trouble(name)

        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "read", fail)
            with held(monkeypatch, "read") as (is_reading, let_go):
                disk.tier.load([first])
                assert is_reading.wait(WAIT_SECONDS)
                disk.tier.index.forget(first.name)
                assert disk.say(LONG, flush=False)
                second = entry_of(disk, LONG)
                let_go()
                assert disk.tier.flush(WAIT_SECONDS)
        assert second.is_written and not second.is_forgotten
        assert disk.recall(LONG)[0] == LONG


def test_what_is_put_again_while_the_folder_is_looked_through_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reconciliation saw a row without a file; by the time that it acts the blob is wanted again."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        [path] = disk.files()
        os.unlink(path)
        with held(monkeypatch, "beside_bytes") as (is_looking, let_go):  # behind the list of files
            disk.tier._reconcile_at = 0.0
            with disk.tier._wake:
                disk.tier._wake.notify_all()
            assert is_looking.wait(WAIT_SECONDS)
            disk.tier.index.forget(entry_of(disk, LONG).name)
            assert disk.say(LONG, flush=False)
            second = entry_of(disk, LONG)
            let_go()
            assert disk.tier.flush(WAIT_SECONDS)
        assert second.is_written and not second.is_forgotten
        assert disk.recall(LONG)[0] == LONG
    with Disk(tmp_path) as disk:
        assert disk.recall(LONG)[0] == LONG


def test_of_a_write_that_fails_the_second_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write fails when its blob is forgotten and wanted again: the second is written."""
    real, calls = FolderStore.write, list[object]()

    def write(self: FolderStore, name: object, parts: object) -> int:
        calls.append(name)
        if len(calls) == 1:
            raise OSError("no")
        return real(self, name, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(FolderStore, "write", write)
    with Disk(tmp_path) as disk:
        with held(monkeypatch, "free_bytes", 1) as (is_writing, let_go):
            disk.say(LONG, flush=False)
            assert is_writing.wait(WAIT_SECONDS)
            disk.tier.discard(names_of(disk.tier.index.find(*named(LONG))))
            assert disk.say(LONG, flush=False)
            let_go()
            assert disk.tier.flush(WAIT_SECONDS)
        assert disk.recall(LONG)[0] == LONG
