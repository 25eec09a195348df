"""Finds out which model lies in a folder: remembered, or by reading all of its files once while it loads and serves.

    look      before anything is loaded: what is remembered, or so little that it is read at once
    begin     the load begins: the files as they are now, and a thread that reads them where nothing is remembered
    loaded    the weights are in memory: what they are, where that was known before
    confirm   the load is over: whether it can have read anything else than that
    known     both agree: callers that wait for the name are called

Until then, and where files changed meanwhile, the model has no name, and nothing is kept or found under one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvserve.engine.file_digest import DigestMemory, FilePiece, file_digest, hash_piece, pieces
from kvserve.engine.fingerprint import libraries_of, model_fingerprint
from kvserve.engine.model_files import FileStamps, differing, file_stamps, stamp_of

AT_ONCE_BYTES = 32 * 2**20
"""So little is read on the spot: a loader reads it in the next moment anyway."""

NUM_THREADS = max(1, min(4, (os.cpu_count() or 2) // 2))
"""Rows compute meanwhile."""

SETTLED_SECONDS = 2.0
"""A file that was changed so shortly ago may be changed once more within one tick of its file system's clock: what it
holds is not remembered."""

QUIET_SECONDS = 2.0
"""A reading that takes no longer is not reported."""

type DigestState = Literal["not needed", "reading", "known", "unknown"]


@dataclass(frozen=True, slots=True)
class DigestStatus:
    """For a person: how far the reading is. `reason` says why nothing of before can be found; "" once it can."""

    state: DigestState = "not needed"
    num_read_bytes: int = 0
    num_bytes: int = 0
    reason: str = ""


class _Stopped(Exception):
    """The reading was stopped."""


class ModelDigest:
    """Which model is in a folder, for one load of it. `look`, `begin`, `loaded` and `confirm` are called in this
    order, each on the thread that loads; the rest may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        memory: DigestMemory | None,
        report: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """Without a `memory` nothing outlives the process, and no name is needed. `report` hears of what went wrong,
        `note` how far the reading is."""
        self._folder = folder
        self._memory = memory
        self._report = report
        self._note = note
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: FileStamps = {}
        self._fingerprint: str | None = None
        self._is_confirmed = False
        self._why_unknown = ""
        self._waiting: list[tuple[Callable[[str], None], Callable[[], None]]] = []
        self._num_read_bytes = self._num_bytes = 0
        self._num_told_quarters = 0
        self._is_loaded = threading.Event()
        self._began_at = 0.0
        self.expected: FileStamps | None = None

    @property
    def status(self) -> DigestStatus:
        """How it stands."""
        with self._lock:
            return DigestStatus(self._state(), self._num_read_bytes, self._num_bytes, self._reason())

    def _state(self) -> DigestState:
        if self._memory is None:
            return "not needed"
        if self._why_unknown:
            return "unknown"
        return "known" if self._fingerprint is not None and self._is_confirmed else "reading"

    def _reason(self) -> str:
        return "its files are still being read" if self._state() == "reading" else self._why_unknown

    # --- before, at and after the load --------------------------------------------------------------------------------

    def look(self) -> str | None:
        """The model's fingerprint as its files are now, None where they would have to be read first."""
        if self._memory is None:
            return None
        self._files = file_stamps(self._folder)
        digests = self._remembered(self._files)
        missing = {path: stamp for path, stamp in self._files.items() if path not in digests}
        if sum(stamp.num_bytes for stamp in missing.values()) > AT_ONCE_BYTES:
            return None
        if missing:
            try:
                digests |= self._hashed(missing)
            except OSError:
                return None
            if differing(self._files, file_stamps(self._folder)) is not None:
                return None
        self._fingerprint = self._named(digests)
        return self._fingerprint

    def begin(self) -> None:
        """The load begins: `confirm` compares with the files as they are now. What must be read is read meanwhile."""
        files = file_stamps(self._folder)
        if self._fingerprint is None or differing(files, self._files) is not None:
            self._fingerprint, self._files = None, files
            self.look()
        if self.expected is not None and (changed := differing(self.expected, self._files)) is not None:
            self._give_up(f"{changed} changed after it was read")
        elif self._memory is not None and self._fingerprint is None:
            self._began_at = time.monotonic()
            self._thread = threading.Thread(target=self._read, name="kvserve-weights", daemon=True)
            self._thread.start()

    def loaded(self) -> str | None:
        """The fingerprint of what the load has read so far; None where it is not known yet, or a file changed
        meanwhile, which `confirm` tells."""
        if self._memory is None or differing(self._files, file_stamps(self._folder)) is not None:
            return None
        with self._lock:
            return self._fingerprint if not self._why_unknown else None

    def confirm(self) -> None:
        """The load is over: it has read the files that `begin` found, or what it has read is unknown."""
        self._is_loaded.set()
        if self._memory is None:
            return
        if (changed := differing(self._files, file_stamps(self._folder))) is not None:
            self._give_up(f"{changed} changed while the model was loaded")
        with self._lock:
            self._is_confirmed = True
        self._tell_if_known()

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """Read no further, and call no waiting caller. Idempotent."""
        self._stopping.set()
        self._is_loaded.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    # --- who waits for it ---------------------------------------------------------------------------------------------

    def when_known(self, act: Callable[[str], None], otherwise: Callable[[], None] = lambda: None) -> None:
        """Call `act` with the fingerprint of what was loaded once it is known, `otherwise` where it never will be: at
        once if that is so already, else on the thread that finds out."""
        with self._lock:
            self._waiting.append((act, otherwise))
        self._tell_if_known()

    def _tell_if_known(self) -> None:
        with self._lock:
            fingerprint, is_lost = self._fingerprint, bool(self._why_unknown)
            if self._stopping.is_set() or not (is_lost or (fingerprint is not None and self._is_confirmed)):
                return
            waiting, self._waiting = self._waiting, []
        for act, otherwise in waiting:
            if is_lost or fingerprint is None:
                otherwise()
            else:
                act(fingerprint)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            is_news = not self._why_unknown and self._memory is not None
            self._why_unknown = self._why_unknown or reason
        if is_news:
            self._report(f"Until {self._folder} is loaded again nothing of it is kept or found on disk: {reason}.")
        self._tell_if_known()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """The thread. It may take as long as the disk needs for all of the weights."""
        try:
            self._await_settled()
            fingerprint = self._read_all()
            self._is_loaded.wait()
            self._conclude(fingerprint)
        except _Stopped:
            return
        except OSError as error:
            self._give_up(f"it cannot be read: {error}")
        finally:
            if self._fingerprint is None and not self._stopping.is_set():
                self._give_up("its reading has ended")  # by a defect of ours; no caller waits for ever

    def _await_settled(self) -> None:
        """A model that was just written is read once the times of its files can be trusted."""
        newest = max((stamp.ctime_ns for stamp in self._files.values()), default=0) / 1e9
        if self._stopping.wait(min(SETTLED_SECONDS, max(0.0, newest + SETTLED_SECONDS - time.time()))):
            raise _Stopped

    def _read_all(self) -> str:
        digests = self._remembered(self._files)
        missing = {path: stamp for path, stamp in self._files.items() if path not in digests}
        self._num_bytes = sum(stamp.num_bytes for stamp in missing.values())
        return self._named(digests | self._hashed(missing, num_threads=NUM_THREADS))

    def _conclude(self, fingerprint: str) -> None:
        if self._stopping.is_set():
            raise _Stopped
        if (changed := differing(self._files, file_stamps(self._folder))) is not None:
            self._give_up(f"{changed} changed while it was read")
            return
        with self._lock:
            self._fingerprint = fingerprint
        if (seconds := time.monotonic() - self._began_at) > QUIET_SECONDS and not self._why_unknown:
            self._note(f"The weights are known after {seconds:.0f} s: KV and records are on disk from now on.")
        self._tell_if_known()

    def _remembered(self, files: FileStamps) -> dict[Path, bytes]:
        known = self._memory.find(files.values()) if self._memory is not None else {}
        return {path: known[stamp] for path, stamp in files.items() if stamp in known}

    def _hashed(self, files: FileStamps, *, num_threads: int = 0) -> dict[Path, bytes]:
        """The digests of these files, read on this thread where there are no others. A long one is remembered once it
        is read, so that a reading that is broken off continues there. Raises OSError, _Stopped."""
        started = time.time()
        jobs = {path: [*pieces(self._folder / path, stamp.num_bytes)] for path, stamp in files.items()}
        every = [piece for job in jobs.values() for piece in job]
        done = self._on_threads(every, num_threads) if num_threads else map(self._hash, every)
        digests: dict[Path, bytes] = {}
        short: dict[Path, bytes] = {}
        for path, job in jobs.items():
            digests[path] = file_digest(files[path].num_bytes, [next(done) for _ in job])
            if len(job) > 1:
                self._remember(files, {path: digests[path]}, started)
            else:
                short[path] = digests[path]
        self._remember(files, short, started)
        return digests

    def _on_threads(self, every: Sequence[FilePiece], num_threads: int) -> Iterator[bytes]:
        """The digests of pieces in their order. The threads are daemons, as an executor's are not: a disk that hangs
        keeps no process alive."""
        futures = [Future[bytes]() for _ in every]
        todo, taking, is_over = zip(every, futures, strict=True), threading.Lock(), threading.Event()

        def work() -> None:
            while not is_over.is_set():
                with taking:
                    piece, future = next(todo, (None, None))
                if piece is None or future is None:
                    return
                try:
                    future.set_result(self._hash(piece))
                except Exception as error:  # noqa: BLE001 - the thread that waits for the piece raises it
                    future.set_exception(error)

        threads = [threading.Thread(target=work, name="kvserve-weights", daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            yield from (future.result() for future in futures)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _hash(self, piece: FilePiece) -> bytes:
        return hash_piece(piece, self._note_read, spares_cache=self._is_loaded.is_set())

    def _remember(self, files: FileStamps, digests: Mapping[Path, bytes], started: float) -> None:
        """Note the digests of files that are what they were, and were so for long enough when they were read."""
        settled = (started - SETTLED_SECONDS) * 1e9
        noted = {
            files[path]: digest
            for path, digest in digests.items()
            if max(files[path].ctime_ns, files[path].mtime_ns) < settled
            and stamp_of(self._folder / path) == files[path]
        }
        if noted and self._memory is not None:
            self._memory.remember(noted)

    def _named(self, digests: Mapping[Path, bytes]) -> str:
        return model_fingerprint(digests, libraries_of(self._folder))

    def _note_read(self, num_bytes: int) -> None:
        """Count what was read, report it by quarters, and end where the reading was stopped. Raises _Stopped."""
        if self._stopping.is_set():
            raise _Stopped
        with self._lock:
            self._num_read_bytes += num_bytes
            num_read, num_all = self._num_read_bytes, self._num_bytes
            quarter = 4 * num_read // max(1, num_all)
            is_slow = self._thread is not None and time.monotonic() - self._began_at > QUIET_SECONDS
            is_news = is_slow and quarter > self._num_told_quarters and num_read < num_all
            if is_news:
                self._num_told_quarters = quarter
        if is_news:
            self._note(f"Reading the weights once to know them: {num_read / 1e9:.0f} of {num_all / 1e9:.0f} GB")
