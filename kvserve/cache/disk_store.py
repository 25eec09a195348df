"""Files of blobs: a private folder per model, complete files only, written under another name and renamed.

It knows names and bytes, not what is in them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Buffer, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvserve.cache.disk_blob import BlobHead, BlobName, num_bytes_of, read_head
from kvserve.cache.disk_catalog import Catalog
from kvserve.core.file_lock import try_lock, wait_for_lock

FOLDER_NAME, FILE_NAME = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{40}\.safetensors")
"""The names of our files below the root. Nothing else is ever touched: the root may hold model weights too."""

SUFFIX = ".safetensors"
INDEX_NAME = "index.sqlite"
LOCK_NAME = "kv.lock"
SCRATCH_SUFFIX = ".part"
ABANDONED_SECONDS = 600.0
"""A half-written file this old is abandoned, unless a process has it locked."""

LOCK_SECONDS = 2.0
"""How long to wait for another server's lock. It holds the lock for a moment, unless it was stopped just then."""

HELD_SECONDS = 30.0
"""After such a wait failed, the lock is only tried for so long: the one disk thread reads for all requests."""

FIRST_READ_BYTES = 65536

FOLDER_TRIES = 20
"""So often a folder is made that others remove because it is empty: each of them does so once in half a minute."""

NUM_PIECES = 8
MIN_PIECE_BYTES = 2**20
"""A blob is read in so many pieces, or fewer larger ones: the interpreter's lock is handed over for each."""

type Arrived = Callable[[memoryview, int, int], object]
"""Called for each piece of a blob as it is read: the whole blob's bytes, and which of them are new."""


class ForeignFolder(OSError):
    """The folder belongs to another user."""


class FolderHeld(OSError):
    """Another server has held the lock for longer than it needs: it was stopped meanwhile, or hangs."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file: its model, name, size, and when it was written (seconds since the epoch)."""

    model: str
    name: BlobName
    num_bytes: int
    written_at: float


def ignored(data: memoryview, start: int, end: int) -> None:
    """Ignore the pieces: the caller uses the whole blob."""


class FolderStore:
    """Blobs under `root/<model>/<name>.safetensors`. One instance writes for one model and may delete any."""

    def __init__(self, root: Path, model: str, beside: Sequence[str] = ()) -> None:
        """Creates the folders, readable by their owner alone. `model` has 32 hexadecimal digits. `beside`: patterns of
        other files below the root that take room from the blobs.

        Raises OSError where that cannot be.
        """
        self._root = root
        self._model = model
        self._beside = beside
        self._num_written = 0
        self._has_lock = False
        self._patient_from = 0.0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(root)
        self._in_folder(self._owned)

    def _in_folder[T](self, work: Callable[[Path], T]) -> T:
        """Do this in our folder, which another server may remove at any moment as long as it is empty. Raises
        OSError."""
        folder, num_left = self._root / self._model, FOLDER_TRIES
        while True:
            num_left -= 1
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                return work(folder)
            except (FileNotFoundError, FileExistsError):  # the second is what `mkdir` says of a folder that is gone
                if not num_left or (folder.exists() and not folder.is_dir()):
                    raise

    @staticmethod
    def _owned(folder: Path) -> None:
        check_owner(folder)
        if stat.S_IMODE(folder.stat().st_mode) != 0o700:  # a read-only volume refuses even the same mode
            folder.chmod(0o700)

    @property
    def place(self) -> str:
        """Where blobs are, for a person."""
        return str(self._root)

    def open_catalog(self) -> Catalog:
        """The catalog of all models. Raises sqlite3.Error or OSError."""
        return Catalog(self._root / INDEX_NAME)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, under which servers write rows and delete files; re-entrant. It ends with the
        process, and does nothing on a volume without locks. Raises OSError, also where another server keeps it."""
        if self._has_lock:
            yield
            return
        with _opened(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT) as descriptor:
            self._take(descriptor)
            self._has_lock = True
            try:
                yield
            finally:
                self._has_lock = False

    def _take(self, descriptor: int) -> None:
        seconds = LOCK_SECONDS if time.monotonic() >= self._patient_from else 0.0
        if not wait_for_lock(descriptor, fcntl.LOCK_EX, seconds):
            self._patient_from = time.monotonic() + HELD_SECONDS
            raise FolderHeld(f"{self._root} is held by another server")
        self._patient_from = 0.0

    def free_bytes(self) -> int:
        """Free space of the volume."""
        return shutil.disk_usage(self._root).free

    def beside_bytes(self) -> int:
        """Bytes of the other files that count."""
        total = 0
        for path in (path for pattern in self._beside for path in self._root.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def write(self, name: BlobName, parts: Sequence[Buffer]) -> int:
        """Write a file, sync it, then rename it to its name; returns its bytes. Raises OSError."""
        self._num_written += 1
        scratch = self._root / self._model / f"{name}.{os.getpid()}.{self._num_written}{SCRATCH_SUFFIX}"
        # A network share allows a shared lock only on a file that is open for reading.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            with _closing(self._in_folder(lambda _: os.open(scratch, flags, 0o600))) as descriptor:
                try_lock(descriptor, fcntl.LOCK_SH)  # until it has its name: see `sweep`
                for part in parts:
                    write_all(descriptor, part)
                os.fsync(descriptor)
                os.replace(scratch, self._path(self._model, name))
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        return sum(map(num_bytes_of, parts))

    def sync(self) -> None:
        """Sync the folder, so that the names of the files are on the disk too. Raises OSError."""
        with (
            contextlib.suppress(FileNotFoundError),  # it was empty and is removed
            _opened(self._root / self._model, os.O_RDONLY) as descriptor,
        ):
            os.fsync(descriptor)

    def read(self, name: BlobName, arrived: Arrived = ignored) -> bytearray:
        """A whole file of this model. Raises OSError."""
        with _opened(self._path(self._model, name), os.O_RDONLY) as descriptor:
            return read_pieces(descriptor, 0, os.fstat(descriptor).st_size, arrived)

    def slices(self, name: BlobName, slice_bytes: int) -> Iterator[bytes]:
        """A whole file of this model, so many bytes at a time. Raises OSError."""
        with _opened(self._path(self._model, name), os.O_RDONLY) as descriptor:
            while data := os.read(descriptor, slice_bytes):
                yield data

    def num_bytes(self, name: BlobName) -> int:
        """The size of a file of this model. Raises OSError."""
        return self._path(self._model, name).stat().st_size

    def read_head(self, file: StoredFile) -> BlobHead:
        """A file's head, without its payload. Raises OSError or DamagedBlob."""
        with self._path(file.model, file.name).open("rb") as opened:
            beginning = opened.read(FIRST_READ_BYTES)
            while isinstance(head := read_head(beginning, file.name), int):
                more = opened.read(head - len(beginning))
                if not more:
                    raise OSError(f"{file.name} is cut off")
                beginning += more
        return head

    def has(self, model: str, name: BlobName) -> bool:
        """Whether a file is there now. Raises OSError."""
        return self._path(model, name).exists()

    def delete(self, model: str, name: BlobName) -> bool:
        """Delete a file of any model, and its folder with the last one. False if it was gone. Raises OSError."""
        path = self._path(model, name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        if model != self._model:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        return True

    def files(self) -> Iterator[StoredFile]:
        """Every complete file of every model, but those that another server deletes meanwhile. Raises OSError."""
        for path in self._blob_paths():
            try:
                found = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield StoredFile(path.parent.name, BlobName(path.stem), found.st_size, found.st_mtime)

    def _blob_paths(self) -> Iterator[Path]:
        for folder in self._folders():
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                continue
            yield from (folder / name for name in names if FILE_NAME.fullmatch(name))

    def sweep(self) -> None:
        """Remove abandoned half-written files, and empty folders of other models."""
        for folder in self._folders():
            for path in folder.glob(f"*{SCRATCH_SUFFIX}"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > ABANDONED_SECONDS and not _is_held(path):
                        path.unlink()
            if folder.name != self._model:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def has_locks(self) -> bool:
        """Whether two servers may share this folder. Raises OSError."""
        with _opened(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT) as descriptor:
            return try_lock(descriptor, fcntl.LOCK_SH) is not None

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _folders(self) -> list[Path]:
        found = (folder for folder in self._root.iterdir() if FOLDER_NAME.fullmatch(folder.name))
        return [folder for folder in found if folder.is_dir() and not folder.is_symlink()]

    def _path(self, model: str, name: BlobName) -> Path:
        return self._root / model / f"{name}{SUFFIX}"


def check_owner(folder: Path) -> None:
    """Refuse another user's folder. Raises OSError."""
    if folder.stat().st_uid != os.getuid():
        raise ForeignFolder(f"{folder} belongs to another user")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of a file; a new one is readable by its owner alone. Raises OSError."""
    with _closing(os.open(path, flags, 0o600)) as descriptor:
        yield descriptor


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    """Whether another process writes a file. Raises OSError."""
    with _opened(path, os.O_RDWR) as descriptor:  # and an exclusive lock only on one that is open for writing
        return try_lock(descriptor, fcntl.LOCK_EX) is False


def read_pieces(descriptor: int, offset: int, num_bytes: int, arrived: Arrived) -> bytearray:
    """Read bytes of a file from an offset on, in pieces, and call `arrived` for each. Raises OSError where it ends."""
    data = bytearray(num_bytes)
    view, start = memoryview(data), 0
    piece_bytes = max(MIN_PIECE_BYTES, num_bytes // NUM_PIECES)
    while start < num_bytes:
        end = start + os.preadv(descriptor, [view[start : start + piece_bytes]], offset + start)
        if end == start:
            raise OSError("a blob is cut off")
        arrived(view, start, end)
        start = end
    return data


def write_all(descriptor: int, part: Buffer) -> None:
    """Write bytes at a file's position. Raises OSError."""
    view = memoryview(part).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
