"""The work of the disk thread on the blobs of one model: reads and verifies, writes within the bounds, commits to the
catalog. It knows no queue; only the disk thread calls it, any thread may read its figures.
"""

import contextlib
import errno
import hashlib
import time
from collections import deque
from collections.abc import Buffer, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from kvserve.cache.disk_account import DiskAccount
from kvserve.cache.disk_age import seconds_since_boot
from kvserve.cache.disk_blob import (
    DIGEST_BYTES,
    Blob,
    BlobHead,
    BlobName,
    DamagedBlob,
    num_bytes_of,
    pack_blob,
    unpack_blob,
)
from kvserve.cache.disk_catalog import Catalog
from kvserve.cache.disk_records import DiskLimits, DiskStats, Entry, Faults, Write
from kvserve.cache.disk_scratch import BlobStore
from kvserve.cache.disk_trie import BlobTrie

READ_RATE = "read bytes"
RATE_WEIGHT = 0.3
DAY_SECONDS = 86400.0
NUM_DAY_PARTS = 96
"""A day is counted in quarters of an hour."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

type Written = Literal["written", "refused", "no room", "failed"]
"""What became of a blob: it is on disk; it is not wanted any more, or over the cap; the volume has no room now; the
write failed, and may succeed later."""


class WriteVolume:
    """Bytes written, in all and in the last day: disks wear with each. One thread adds, any thread may read."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: deque[tuple[int, int]] = deque(maxlen=NUM_DAY_PARTS + 1)

    def add(self, num_bytes: int) -> None:
        """Add what was written now."""
        self.num_bytes += num_bytes
        part = _part_now()
        before = self._parts.pop()[1] if self._parts and self._parts[-1][0] == part else 0
        self._parts.append((part, before + num_bytes))

    def last_day_bytes(self) -> int:
        """Bytes written in the last 24 hours, to a quarter of an hour."""
        first = _part_now() - NUM_DAY_PARTS
        return sum(num_bytes for part, num_bytes in tuple(self._parts) if part > first)


def _part_now() -> int:
    return int(seconds_since_boot() / DAY_SECONDS * NUM_DAY_PARTS)


class DiskWorker:
    """Touches the files; `on_written` hears of each blob that is there now. `prefill_rate` are tokens per second that
    the engine measured; the catalog keeps it for the next run."""

    def __init__(self, store: BlobStore, index: BlobTrie, limits: DiskLimits, faults: Faults) -> None:
        """Finds what is there. Raises OSError where the folder cannot be used."""
        self.store = store
        self._index = index
        self._limits = limits
        self._faults = faults
        self._hashing = ThreadPoolExecutor(1, "kvserve-disk-hash")
        self.account = DiskAccount(store, index, limits, faults)
        self.account.open()
        self._hashing.submit(bool)  # starts its thread, or fails now: a waiting piece would keep a whole blob in RAM
        self._look_for_locks()
        self._has_written = False
        self.num_written = self.num_read = self.num_read_bytes = 0
        self.write_volume = WriteVolume()
        self.num_refused = 0
        self.read_rate = self.account.catalog.ask(Catalog.rate, READ_RATE)
        self.on_written: Callable[[Entry], None] = lambda _: None
        self._prefill_name = f"prefill tokens {index.model}"
        self.prefill_rate = self.account.catalog.ask(Catalog.rate, self._prefill_name)

    def _look_for_locks(self) -> None:
        with contextlib.suppress(OSError):  # nothing is written there
            if not self.store.has_locks():
                self._faults.add("unlocked", self.store.place)

    def read(self, entry: Entry) -> Blob | None:
        """A verified blob. A damaged one is deleted: it would never be of use."""
        started = time.perf_counter()
        try:
            blob, num_bytes = self._verified(entry.name)
        except DamagedBlob as error:
            self._faults.add("damaged", f"{entry.name}: {error}")
        except FileNotFoundError:
            if not entry.is_forgotten:  # else it was evicted meanwhile
                self._faults.add("missing", entry.name)
        except OSError as error:
            self._faults.add("unreadable", error)
            self._index.forget_entry(entry)
            return None
        else:
            self.num_read += 1
            self.num_read_bytes += num_bytes
            self._note_rate(num_bytes, time.perf_counter() - started)
            return blob
        self._give_up(entry)
        return None

    def _verified(self, name: BlobName) -> tuple[Blob, int]:
        """A blob and the bytes of its file: each piece is hashed while the next one is read. Raises OSError or
        DamagedBlob."""
        digest, is_in_pieces = hashlib.sha256(), False

        def arrived(data: memoryview, start: int, end: int) -> None:
            nonlocal is_in_pieces
            is_in_pieces |= end - start < len(data)
            if is_in_pieces:  # a single piece is hashed where it is read: there is nothing to read meanwhile
                self._hashing.submit(digest.update, data[start : min(end, len(data) - DIGEST_BYTES)])

        data = self.store.read(name, arrived)
        of_pieces = self._hashing.submit(digest.digest).result() if is_in_pieces else None
        return unpack_blob(data, name, of_pieces), len(data)

    def _give_up(self, entry: Entry) -> None:
        """Delete a blob that could not be read, unless another server has written it anew meanwhile."""
        try:
            with self.store.locked():
                if not self._is_sound(entry.name):
                    self.account.discard(entry)
        except OSError as error:
            self._faults.add("unwritable", error)
            self._index.forget_entry(entry)

    def _is_sound(self, name: BlobName) -> bool:
        try:
            self._verified(name)
        except (DamagedBlob, OSError):
            return False
        return True

    def measure(self, entry: Entry) -> None:
        """Measure how fast this disk reads now; the blob is dropped."""
        started = time.perf_counter()
        try:
            _, num_bytes = self._verified(entry.name)
        except (DamagedBlob, OSError):
            return  # the next `read` reports it
        self._note_rate(num_bytes, time.perf_counter() - started)

    def _note_rate(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / max(seconds, 1e-6)
        self.read_rate = rate if self.read_rate is None else self.read_rate + RATE_WEIGHT * (rate - self.read_rate)

    def write(self, write: Write) -> Written:
        """Write a blob that is still wanted."""
        if write.entry.is_forgotten:
            return "refused"
        try:
            return self._write(write)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._faults.add("full", error)
                return "no room"
            self._faults.add("unwritable", error)
            return "failed"

    def _write(self, write: Write) -> Written:
        """Raises OSError."""
        parts: list[Buffer] = pack_blob(write.entry.head, write.note, write.tensors)
        num_bytes = sum(map(num_bytes_of, parts))
        num_free_bytes = self.store.free_bytes()
        if num_free_bytes - num_bytes < self._limits.min_free_bytes:
            self._faults.add("full", f"{num_free_bytes / 2**30:.1f} GiB are free")
            return "no room"
        above = self._index.ancestors(write.entry)
        if not self.account.make_room(num_bytes, above):
            self.num_refused += 1
            return "refused"
        self.store.write(write.entry.name, parts)
        self._has_written = True
        self.num_written += 1
        self.write_volume.add(num_bytes)
        if not self.account.wrote(write.entry.head, num_bytes, above):
            return "failed"
        self._faults.is_over("full", "The disk has room again: KV is written.")
        if not self._index.confirm(write.entry, num_bytes) and not self._index.is_known(write.entry.name):
            self.account.take_back(write.entry.name)
        self.on_written(write.entry)
        return "written"

    def bring(self, head: BlobHead, data: Buffer, beside: Collection[BlobName]) -> bool:
        """Put a verified blob that another server wrote among ours, where it is found as if that one shared the folder;
        whether it is there. It takes no room from those `beside` it."""
        if self._index.head_of(head.name) is not None:
            return True
        num_bytes = num_bytes_of(data)
        try:
            has_room = self.store.free_bytes() - num_bytes >= self._limits.min_free_bytes
            if not has_room or not self.account.make_room(num_bytes, beside):
                return False
            self.store.write(head.name, [data])
            self._has_written = True
            self.write_volume.add(num_bytes)
            if not self.account.wrote(head, num_bytes, ()):
                return False
        except OSError as error:
            self._faults.add("unwritable", error)
            return False
        self._index.adopt(head, num_bytes)
        return True

    def has_room(self) -> bool:
        """Whether a volume that was full has room again, and some to spare."""
        try:
            return self.store.free_bytes() > self._limits.min_free_bytes + self._limits.min_free_bytes // 8
        except OSError as error:
            self._faults.add("unreadable", error)
            return False

    def commit(self, used: Iterable[BlobName]) -> bool:
        """Write uses, new blobs and measured rates into the catalog. False where it cannot be used now."""
        self.account.used(used)
        is_listed = self.account.commit()
        self._sync()
        for name, rate in ((READ_RATE, self.read_rate), (self._prefill_name, self.prefill_rate)):
            if rate is not None:
                self.account.catalog.do(Catalog.set_rate, name, rate)
        return is_listed

    def _sync(self) -> None:
        if not self._has_written:
            return
        self._has_written = False
        try:
            self.store.sync()
        except OSError as error:
            self._faults.add("unwritable", error)

    def stats(self, num_refused: int, num_queued_bytes: int, *, is_full: bool) -> DiskStats:
        """What is on disk and was done, with what the queue in front of it refused and holds."""
        return DiskStats(
            place=self.store.place,
            num_bytes=self._index.num_bytes(),
            total_bytes=self.account.total_bytes,
            max_bytes=self.account.max_bytes,
            num_segments=self._index.num_of("segment"),
            num_checkpoints=self._index.num_of("checkpoint"),
            num_written=self.num_written,
            num_written_bytes=self.write_volume.num_bytes,
            last_day_written_bytes=self.write_volume.last_day_bytes(),
            num_read=self.num_read,
            num_read_bytes=self.num_read_bytes,
            num_refused=num_refused + self.num_refused,
            num_evicted=self.account.num_evicted,
            num_queued_bytes=num_queued_bytes,
            is_full=is_full,
            read_bytes_per_second=self.read_rate,
            faults=self._faults.counts(),
        )

    def close(self) -> None:
        """Commit what is left. Nothing may be called afterwards."""
        self._hashing.shutdown()
        self.account.close()
        self.store.close()
