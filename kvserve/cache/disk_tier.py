"""KV on disk: one thread writes behind and reads ahead, so that the engine thread never waits for a file.

    engine thread                                    disk thread
    find(prefix) -> steps                            reads before writes, in the order of the calls
    load(entries) -> Load; take() what is there      reads, verifies
    put(entry, note, tensors)                        hashes, writes, renames, then confirms
    flush, clear, close                              commits, reconciles every half minute

Payloads are opaque. Every failure is a miss, counted in `faults`; no method raises for a fault of the disk.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvserve.cache.disk_blob import Blob, BlobName, Tensor, num_bytes_of
from kvserve.cache.disk_queue import STUCK_SECONDS, ReadAhead, WriteQueue
from kvserve.cache.disk_records import DiskLimits, DiskStats, Entry, Faults, Load, Removal, Write
from kvserve.cache.disk_scratch import BlobStore
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.disk_worker import DiskWorker, Written
from kvserve.cache.forget_users import IsForgotten
from kvserve.cache.kept_path import KeptPath
from kvserve.cache.records import Copy

RETRY_SECONDS = 30.0
"""A failed write is tried again so much later."""

FULL_CHECK_SECONDS = 5.0
RECONCILE_SECONDS = 30.0
MEASURE_SECONDS = 30.0
COMMIT_SECONDS = 0.5
"""A written blob is in the catalog after this time at most; a crash before that costs a look at its header."""


class DiskTier:
    """The blobs of one model on disk. Methods belong to the engine thread unless they say otherwise."""

    def __init__(self, store: BlobStore, index: BlobTrie, limits: DiskLimits, faults: Faults) -> None:
        """Finds what is there; starts the thread. Raises OSError where the folder cannot be used."""
        self.index = index
        self.faults = faults
        self.worker = DiskWorker(store, index, limits, faults)
        self._wake = threading.Condition()
        self._loads: deque[Load] = deque()
        self._writes = WriteQueue(limits.max_queued_bytes)
        self._ahead = ReadAhead(limits.max_read_ahead_bytes)
        self._orders: deque[Callable[[], None]] = deque()
        self._soon: deque[Callable[[], None]] = deque()
        self._restored: list[tuple[Sequence[Copy], int]] = []
        self._is_closing = False
        self._is_full = False
        self._has_lost = False
        self._has_news = True
        self._has_arrived = False
        self._measure_at = 0.0
        self._commit_at = self._reconcile_at = self._full_check_at = self._retry_at = 0.0
        self._num_refused = 0
        self._thread = threading.Thread(target=self._run, name="kvserve-disk", daemon=True)
        self._thread.start()

    # --- writing behind -----------------------------------------------------------------------------------------------

    def can_take(self, num_bytes: int, until: float = 0.0) -> bool:
        """Whether a payload of this size may be put; waits for a full queue until `until` (`time.monotonic`). The
        caller puts a refused one again later: see `take_lost`."""
        with self._wake:
            while not (self._is_full or self._is_closing):
                if self._writes.has_room(num_bytes):
                    return True
                if (seconds := until - time.monotonic()) <= 0:
                    break
                self._wake.wait(seconds)
            self._num_refused += 1
            self._has_lost = True
        return False

    def put(self, entry: Entry, note: str, tensors: Sequence[Tensor], *, is_own: bool = False) -> None:
        """Write a blob that the index knows. Its bytes must not change until then; `is_own`: RAM has them only here."""
        num_bytes = sum(num_bytes_of(tensor.data) for tensor in tensors)
        with self._wake:
            self._writes.put(Write(entry, note, tuple(tensors), num_bytes), is_own=is_own)
            self._wake.notify_all()

    def evicted_from_ram(self, copies: Iterable[Copy]) -> None:
        """Note that the records of these copies were evicted: only the queue has their bytes until they are written."""
        with self._wake:
            self._writes.evicted_from_ram({copy for copy in copies if isinstance(copy, Entry)})

    def moving_bytes(self) -> tuple[int, int]:
        """Bytes that are only in the queue of writes, and bytes that were read and not taken. From any thread."""
        return self._writes.num_own_bytes, self._ahead.num_bytes

    def await_written(self, entries: Sequence[Copy], until: float) -> bool:
        """Wait until all of these are written or forgotten, at most until `until`. Whether they are."""
        with self._wake:
            while any(not (entry.is_written or entry.is_forgotten) for entry in entries):
                if self._is_closing or (seconds := until - time.monotonic()) <= 0:
                    return False
                self._wake.wait(seconds)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether no write waits, none was refused, and the volume has room."""
        with self._wake:
            return not (self._writes.num_bytes or self._writes or self._has_lost or self._is_full)

    @property
    def is_writing(self) -> bool:
        """Whether a write waits or is in progress."""
        with self._wake:
            return bool(self._writes.num_bytes or self._writes)

    @property
    def is_full(self) -> bool:
        """Whether the volume has no room; then every write is refused."""
        return self._is_full

    @property
    def is_behind(self) -> bool:
        """Whether a write was refused because the queue is full."""
        with self._wake:
            return self._has_lost and not self._is_full and bool(self._writes.num_bytes)

    @property
    def has_lost(self) -> bool:
        """Whether a write was refused since the last `take_lost`."""
        with self._wake:
            return self._has_lost

    def take_lost(self) -> bool:
        """Whether a write was refused and there is room now: then the caller puts all again."""
        with self._wake:
            is_ready = not (self._is_full or self._writes) and time.monotonic() >= self._retry_at
            has_lost = self._has_lost and is_ready
            self._has_lost &= not has_lost
        return has_lost

    # --- reading ------------------------------------------------------------------------------------------------------

    def load(self, entries: Sequence[Entry]) -> Load:
        """Begin to read blobs, in this order."""
        load = Load(tuple(entries), is_read=not entries)
        with self._wake:
            self._loads.extend([load] if entries else [])
            self._wake.notify_all()
        return load

    def take(self, load: Load) -> list[Blob | None]:
        """The next blob that has been read, if one has."""
        with self._wake:
            ready = self._ahead.taken(load)
            self._has_arrived = False
            self._wake.notify_all()
        return ready

    def is_over(self, load: Load) -> bool:
        """Whether nothing more will come and all was taken."""
        with self._wake:
            return (load.is_read or load.is_cancelled) and not load.ready

    def cancel(self, load: Load) -> None:
        """Drop a load."""
        with self._wake:
            self._ahead.cancelled(load)
            self._has_arrived = False
            self._wake.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until the disk has done something, at most so long. From any thread."""
        with self._wake:
            if not self._has_arrived:
                self._wake.wait(seconds)

    def soon(self, job: Callable[[], None]) -> None:
        """Have the disk thread do this before waiting writes, and whoever waits look again. From any thread."""
        with self._wake:
            self._soon.append(job)
            self._wake.notify_all()

    def measure(self, entry: Entry) -> None:
        """Measure the read rate again, after all waiting work and not too often: an old rate may wrongly speak against
        reading."""
        now = time.monotonic()
        with self._wake:
            if now >= self._measure_at:
                self._measure_at = now + MEASURE_SECONDS
                self._orders.append(partial(self.worker.measure, entry))
                self._wake.notify_all()

    def note_restored(self, rows: Sequence[Copy], end: int) -> None:
        """Note that a request starts from `end` tokens, the last of which are in one of these: the path is used now."""
        with self._wake:
            self._restored.append((rows, end))
            self._has_news = True

    def note_users(self, path: KeptPath) -> None:
        """Note the users of this path as users of its blobs."""
        if self.index.use(path.run, path.chain, path.users, path.above, path.num_told_tokens):
            with self._wake:
                self._has_news = True

    @property
    def read_rate(self) -> float | None:
        """Bytes per second, checksum included; None as long as nothing was ever read on this disk."""
        return self.worker.read_rate

    # --- all of it ----------------------------------------------------------------------------------------------------

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was put is on disk and in the catalog. False after the timeout. From any thread."""
        return self._order(self._commit, timeout_seconds)

    def clear(self, timeout_seconds: float = 10.0) -> bool:
        """Delete everything of this model, and drop waiting writes."""
        with self._wake:
            self._writes.clear()
            for load in self._loads:
                self._ahead.cancelled(load)
        self.index.clear()
        return self._order(self.worker.account.clear, timeout_seconds)

    def discard(self, names: Iterable[BlobName]) -> None:
        """Forget blobs and their descendants; the files are deleted later, after waiting writes."""
        gone = [each for name in names for each in self.index.mark_deleted(name)]
        with self._wake:
            self._orders.extend(partial(self._delete, name) for name in gone)
            self._wake.notify_all()

    def forget(self, is_forgotten: IsForgotten, timeout_seconds: float = 10.0) -> Removal:
        """Delete what only these users, or no known user, have used. The disk thread does it, so that it does not adopt
        the files again meanwhile."""
        return self._removed(lambda: self.worker.account.forget(is_forgotten), timeout_seconds)

    def forget_of_others(self, is_forgotten: IsForgotten, timeout_seconds: float = 10.0) -> Removal:
        """The same for all other models in this folder, after `forget`; reads all their rows. From any thread."""
        return self._removed(lambda: self.worker.account.forget_of_others(is_forgotten), timeout_seconds)

    def _removed(self, remove: Callable[[], Removal], timeout_seconds: float) -> Removal:
        done = list[Removal]()
        is_over = self._order(lambda: done.append(remove()), timeout_seconds)
        return done[0] if is_over and done else Removal(0, is_done=False)

    def close(self, timeout_seconds: float) -> bool:
        """Write what waits, then end the thread. False after the timeout: what was not written is lost. Written later
        it would come back to whoever is forgotten meanwhile, and its bytes are in the accounts of no engine."""
        is_flushed = self.flush(timeout_seconds)
        with self._wake:
            self._is_closing = True
            if not is_flushed:
                self._writes.clear()
            self._wake.notify_all()
        self._thread.join(5.0 if is_flushed else 0.1)
        return is_flushed

    def stats(self) -> DiskStats:
        """From any thread."""
        with self._wake:
            return self.worker.stats(self._num_refused, self._writes.num_bytes, is_full=self._is_full)

    def _order(self, order: Callable[[], object], timeout_seconds: float) -> bool:
        """Have the disk thread call `order` once no write waits, and wait for it."""
        is_done = threading.Event()

        def done() -> None:
            try:
                order()
            finally:
                is_done.set()

        with self._wake:
            if self._is_closing:
                return False
            self._orders.append(done)
            self._wake.notify_all()
        return is_done.wait(timeout_seconds)

    # --- the disk thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        job: Callable[[], None] | None = self._reconcile
        while job is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the thread must survive every fault of a disk
                self.faults.add("unwritable", f"{type(error).__name__}: {error}")
            job = self._next_job()
        self.worker.close()

    def _next_job(self) -> Callable[[], None] | None:
        """Reads before writes, writes before orders, then what is due by the clock; None at the end."""
        with self._wake:
            while True:
                if (load := self._next_load()) is not None:
                    return partial(self._read_next, load)
                if self._soon:
                    return partial(self._do_soon, self._soon.popleft())
                if self._writes:
                    return partial(self._write, self._writes.take())
                if self._orders:
                    return self._orders.popleft()
                if self._is_closing:
                    return None
                now = time.monotonic()
                if self._has_news and now >= self._commit_at:
                    return self._commit
                if self._is_full and now >= self._full_check_at:
                    return self._look_for_room
                if now >= self._reconcile_at:
                    return self._reconcile
                self._wake.wait(self._seconds_to_next(now))

    def _seconds_to_next(self, now: float) -> float:
        due = [self._reconcile_at]
        if self._has_news:
            due.append(self._commit_at)
        if self._is_full:
            due.append(self._full_check_at)
        if self._loads:
            due.append(now + STUCK_SECONDS)
        return max(0.01, min(due) - now)

    def _next_load(self) -> Load | None:
        """The first load that may continue: one that is far ahead does not hold up writes."""
        for load in [load for load in self._loads if load.is_cancelled or self._is_closing]:
            load.is_read = True
            self._loads.remove(load)
        return self._ahead.next_of(self._loads)

    def _read_next(self, load: Load) -> None:
        entry, blob, has_raised = load.entries[load.num_read], None, True
        try:
            blob = self.worker.read(entry)
            has_raised = False
        finally:
            if has_raised:  # else the waiting request would load it again and again
                self.index.forget_entry(entry)
            with self._wake:
                load.num_read += 1
                self._ahead.arrived(load, blob, entry.num_bytes)
                if blob is None or load.num_read == len(load.entries):
                    load.is_read = True
                    self._loads.remove(load)
                self._has_arrived = True
                self._wake.notify_all()

    def _write(self, write: Write) -> None:
        outcome: Written = "refused"
        try:
            outcome = self.worker.write(write)
        finally:
            if outcome != "written":
                self.index.forget_entry(write.entry)  # with its descendants
            with self._wake:
                self._note_outcome(outcome)
                self._writes.done(write)
                self._has_news = True
                self._wake.notify_all()

    def _do_soon(self, job: Callable[[], None]) -> None:
        job()
        with self._wake:
            self._wake.notify_all()

    def _note_outcome(self, outcome: Written) -> None:
        now = time.monotonic()
        if outcome == "no room":
            self._is_full = self._has_lost = True
            self._full_check_at = now + FULL_CHECK_SECONDS
        elif outcome == "failed":
            self._has_lost, self._retry_at = True, now + RETRY_SECONDS

    def _look_for_room(self) -> None:
        self._full_check_at = time.monotonic() + FULL_CHECK_SECONDS
        if self.worker.has_room():
            self._is_full = False
            self._reconcile_at = 0.0  # the cap may depend on what is free

    def _delete(self, name: BlobName) -> None:
        """Delete the file of a forgotten blob, unless it was put again."""
        if self.index.unmark_deleted(name):
            self.worker.account.take_back(name)

    def _commit(self) -> None:
        with self._wake:
            restored, self._restored = self._restored, []
            self._has_news = False
        used = [name for rows, end in restored for name in self.index.restored_names(rows, end)]
        if not (is_listed := self.worker.commit(used)):
            self._has_news = True
        self._commit_at = time.monotonic() + (COMMIT_SECONDS if is_listed else FULL_CHECK_SECONDS)

    def _reconcile(self) -> None:
        self.worker.account.reconcile()
        self._reconcile_at = time.monotonic() + RECONCILE_SECONDS
