"""What the disk thread does with one blob: it is read and hashed at once. How much it has written of late."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvserve.cache import disk_store, disk_worker
from kvserve.cache.disk_blob import NO_PARENT, BlobHead, Tensor, pack_blob
from kvserve.cache.disk_records import Entry, Faults
from kvserve.cache.disk_scratch import BlobStore, ScratchStore
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.disk_worker import DiskWorker, WriteVolume
from kvserve.cache.records import RecordId
from tests.cache.disks import HASHER, MODEL, ROOMY, WAIT_SECONDS, Disk, named

DATA = bytes(range(256)) * 16
NO_SECONDS = 0.01
"""For somebody who cannot come."""


class Meeting:
    """Whoever hashes the first piece of a blob and whoever reads its second wait for one another."""

    def __init__(self, patch: pytest.MonkeyPatch, wait_seconds: float) -> None:
        self._barrier, self._wait_seconds = threading.Barrier(2), wait_seconds
        self._num_hashed, self._num_read = 0, 0
        self._real_read = disk_store.os.preadv
        patch.setattr(disk_worker, "hashlib", SimpleNamespace(sha256=self._sum))
        patch.setattr(disk_store.os, "preadv", self._read)
        patch.setattr(disk_store, "MIN_PIECE_BYTES", 1)

    def _sum(self) -> SimpleNamespace:
        digest = hashlib.sha256()

        def update(piece: memoryview) -> None:
            self._num_hashed += 1
            if self._num_hashed == 1:
                self._barrier.wait(self._wait_seconds)
            digest.update(piece)

        return SimpleNamespace(update=update, digest=digest.digest)

    def _read(self, *arguments: object) -> int:
        self._num_read += 1
        if self._num_read == 2:
            self._barrier.wait(self._wait_seconds)
        return self._real_read(*arguments)  # type: ignore[arg-type]


class OneAfterTheOther:
    """Does what it is given on the spot."""

    def submit(self, call: Callable[..., object], *arguments: object) -> Future[object]:
        done = Future[object]()
        done.set_result(call(*arguments))
        return done

    def shutdown(self) -> None:
        pass


def worker_with_a_blob(store: BlobStore) -> tuple[DiskWorker, Entry]:
    head = BlobHead(MODEL, "segment", NO_PARENT, named(range(8))[0], "stride")
    worker = DiskWorker(store, BlobTrie(HASHER, MODEL), ROOMY, Faults(lambda line: None))
    store.write(head.name, pack_blob(head, "rows", [Tensor("U8", (len(DATA),), DATA)]))
    return worker, Entry(RecordId(1), head)


@pytest.mark.parametrize("kind", [FolderStore, ScratchStore])
def test_a_piece_is_read_while_the_one_before_is_hashed(
    kind: type[FolderStore] | type[ScratchStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is asked for before the first is hashed; what comes of it is the blob that was written."""
    worker, entry = worker_with_a_blob(kind(tmp_path, MODEL))
    with monkeypatch.context() as patch:
        Meeting(patch, WAIT_SECONDS)
        blob = worker.read(entry)
    assert blob is not None and bytes(blob.tensors[0].data) == DATA
    worker.close()


def test_hashing_in_between_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where each piece is hashed before the next one is read, they do not meet."""
    worker, entry = worker_with_a_blob(FolderStore(tmp_path, MODEL))
    monkeypatch.setattr(worker, "_hashing", OneAfterTheOther())
    Meeting(monkeypatch, NO_SECONDS)
    with pytest.raises(threading.BrokenBarrierError):
        worker.read(entry)


def test_a_blob_of_one_piece_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read while it is hashed; a thread that computes would keep the other one for milliseconds."""
    worker, entry = worker_with_a_blob(FolderStore(tmp_path, MODEL))
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_hashing", None)
        blob = worker.read(entry)
    assert blob is not None and bytes(blob.tensors[0].data) == DATA
    worker.close()


def test_a_damaged_piece_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is in: also the last one, of which a part is the checksum itself."""
    monkeypatch.setattr(disk_store, "MIN_PIECE_BYTES", 1)
    store = FolderStore(tmp_path, MODEL)
    worker, entry = worker_with_a_blob(store)
    [path] = tmp_path.rglob("*.safetensors")
    sound = path.read_bytes()
    for place in range(0, len(sound), len(sound) // 40):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert worker.read(entry) is None
    path.write_bytes(sound)
    assert worker.read(entry) is not None
    worker.close()


def test_the_thread_that_hashes_is_there_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that later gives no more threads gives back the KV that it has."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(disk_store, "MIN_PIECE_BYTES", 1)
    with Disk(tmp_path) as disk:
        disk.say(range(8))
        monkeypatch.setattr(threading.Thread, "start", refused)
        assert disk.recall(range(8))[0] == list(range(8)) and disk.faults == {}


@pytest.mark.parametrize("error", [MemoryError, ArithmeticError])
def test_a_blob_whose_reading_raises_anything_is_not_asked_for_again(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that waits for it would plan to read it once more, for ever."""

    def fail(*_: object) -> None:
        raise error

    with Disk(tmp_path) as disk:
        disk.say(range(8))
        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "read", fail)
            assert disk.recall(range(8))[0] == []
        assert disk.found(range(8)).depth == 0
        assert disk.tier._order(disk.tier._reconcile, WAIT_SECONDS)
        assert disk.recall(range(8))[0] == list(range(8)), "its file is found again"


def test_a_day_later_it_is_no_longer_of_the_last_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes leave the figure a day after they were written, to a quarter of an hour, and stay in the sum."""
    now = 10 * disk_worker.DAY_SECONDS
    monkeypatch.setattr(disk_worker, "seconds_since_boot", lambda: now)
    volume = WriteVolume()
    seen = []
    for hours, num_bytes in ((0, 100), (1, 10), (22.5, 1), (0.5, 0), (0.5, 0), (0.5, 0), (30, 0)):
        now += hours * 3600
        if num_bytes:
            volume.add(num_bytes)
        seen.append(volume.last_day_bytes())
    assert seen == [100, 110, 111, 11, 11, 1, 0] and volume.num_bytes == 111


def test_however_long_a_server_runs_it_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte a minute for a week."""
    now = 0.0
    monkeypatch.setattr(disk_worker, "seconds_since_boot", lambda: now)
    volume = WriteVolume()
    for _ in range(7 * 24 * 60):
        volume.add(1)
        now += 60
    assert volume.num_bytes == 7 * 24 * 60 and 24 * 60 - 15 <= volume.last_day_bytes() <= 24 * 60
    assert len(volume._parts) <= disk_worker.NUM_DAY_PARTS + 1
