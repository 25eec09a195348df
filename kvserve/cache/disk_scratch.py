"""Blobs in one scratch file without a name, with a catalog in RAM: gone with the process, however it ends.

    | blob | free | blob | blob |          a deleted blob's room is used again; a free tail is cut off

It has the contract of `FolderStore`. One thread at a time.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Buffer, Iterator, Sequence
from pathlib import Path

from kvserve.cache.disk_blob import BlobHead, BlobName, num_bytes_of
from kvserve.cache.disk_catalog import Catalog
from kvserve.cache.disk_store import Arrived, FolderStore, StoredFile, check_owner, ignored, read_pieces, write_all


class ScratchStore:
    """Blobs of one model in an unlinked file of `folder`."""

    def __init__(self, folder: Path, model: str) -> None:
        """Raises OSError where no file can be made there."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        self._folder = folder
        self._model = model
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as the store
        self._places: dict[BlobName, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = []
        self._end = 0

    @property
    def place(self) -> str:
        """Where blobs are, for a person."""
        return f"a scratch file in {self._folder} that vanishes at exit"

    def open_catalog(self) -> Catalog:
        """A catalog in RAM."""
        return Catalog(None)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """No lock is needed: no other server has this file."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """Free space of the volume."""
        return shutil.disk_usage(self._folder).free

    def beside_bytes(self) -> int:
        """There is no other file."""
        return 0

    def write(self, name: BlobName, parts: Sequence[Buffer]) -> int:
        """Write a blob where there is room, else at the end. Raises OSError, with nothing changed."""
        num_bytes = sum(map(num_bytes_of, parts))
        offset = self._allocate(num_bytes)
        try:
            self._file.seek(offset)
            for part in parts:
                write_all(self._file.fileno(), part)
        except OSError:
            self._release(offset, num_bytes)
            raise
        self._places[name] = (offset, num_bytes)
        return num_bytes

    def read(self, name: BlobName, arrived: Arrived = ignored) -> bytearray:
        """A whole blob. Raises OSError."""
        if name not in self._places:
            raise FileNotFoundError(name)
        return read_pieces(self._file.fileno(), *self._places[name], arrived)

    def read_head(self, file: StoredFile) -> BlobHead:
        """Raises FileNotFoundError: every blob here was written by this process and has a row."""
        raise FileNotFoundError(file.name)

    def has(self, model: str, name: BlobName) -> bool:
        """Whether a blob is held."""
        return name in self._places

    def delete(self, model: str, name: BlobName) -> bool:
        """Give a blob's room back. False if it was gone."""
        place = self._places.pop(name, None)
        if place is not None:
            self._release(*place)
        return place is not None

    def files(self) -> Iterator[StoredFile]:
        """Every blob that is held."""
        return (StoredFile(self._model, name, size, time.time()) for name, (_, size) in list(self._places.items()))

    def sync(self) -> None:
        """Do nothing: no blob outlives the process."""

    def sweep(self) -> None:
        """Do nothing: no other process writes here."""

    def has_locks(self) -> bool:
        """True: no other server shares this file."""
        return True

    def close(self) -> None:
        self._file.close()

    def _allocate(self, num_bytes: int) -> int:
        for number, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                rest = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                self._free[number : number + 1] = rest
                return offset
        self._end += num_bytes
        return self._end - num_bytes

    def _release(self, offset: int, num_bytes: int) -> None:
        """Free a place, join it with free neighbours, cut a free tail off."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, num_bytes)]):
            if merged and sum(merged[-1]) == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        if merged and sum(merged[-1]) == self._end:
            self._end = merged.pop()[0]
            os.ftruncate(self._file.fileno(), self._end)
        self._free = merged


type BlobStore = FolderStore | ScratchStore
"""Where blobs are. Any of its methods may raise OSError."""
