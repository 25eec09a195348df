"""Blobs in one scratch file without a name, and their index in RAM: gone with the process, however it ends.

    | blob | free | blob | blob |          what leaves makes room inside; a free tail is cut off

It has the contracts of `FolderStore` and `Catalog`. One thread at a time.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Buffer, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvserve.cache.disk_age import Tick
from kvserve.cache.disk_blob import BlobHead, BlobName, num_bytes_of
from kvserve.cache.disk_catalog import Listed, Victim
from kvserve.cache.disk_store import Arrived, StoredFile, check_owner, ignored, read_pieces


class ScratchStore:
    """Blobs of one model in a file that has no name in `folder` any more."""

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

    @property
    def file_bytes(self) -> int:
        """Length of the file, free parts included."""
        return self._end

    def open_books(self) -> "MemoryBooks":
        return MemoryBooks()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else has this file."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """Free space of the volume."""
        return shutil.disk_usage(self._folder).free

    def beside_bytes(self) -> int:
        """There is no other file."""
        return 0

    def write(self, name: BlobName, parts: Sequence[Buffer]) -> int:
        """Write a blob where there is room, else at the end. Raises OSError; nothing is held then."""
        num_bytes = sum(map(num_bytes_of, parts))
        offset = self._allocate(num_bytes)
        try:
            position = offset
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    num_written = os.pwrite(self._file.fileno(), view, position)
                    view, position = view[num_written:], position + num_written
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
        """Nothing is ever found that was not written by this process."""
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
        """Nothing has to outlive the process."""

    def sweep(self) -> None:
        """Nobody else can leave anything here."""

    def has_locks(self) -> bool:
        """Nobody shares this file."""
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


class MemoryBooks:
    """What `Catalog` is for files, for blobs that do not outlive the process."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._blobs: dict[tuple[str, BlobName], Listed] = {}
        self._rates: dict[str, float] = {}
        self._users: dict[tuple[str, BlobName, str], int] = {}

    def listed(self, model: str) -> Iterator[Listed | BlobName]:
        own = (blob for blob in self._blobs.values() if blob.head.model == model)
        return iter(sorted(own, key=lambda blob: blob.head.tokens.start))

    def names(self) -> set[tuple[str, BlobName]]:
        return set(self._blobs)

    def unused_since(self, moment: float) -> list[Victim]:
        return [_victim(blob) for blob in self._blobs.values() if blob.used_at < moment]

    def least_recent(self, limit: int) -> list[Victim]:
        def rank(blob: Listed) -> tuple[float, int, str, str]:
            return blob.used_at, -blob.head.tokens.start, blob.head.kind, blob.head.name

        return [_victim(blob) for blob in sorted(self._blobs.values(), key=rank)[:limit]]

    def used_at(self, victim: Victim) -> float | None:
        blob = self._blobs.get((victim.model, victim.name))
        return blob.used_at if blob is not None else None

    def with_descendants(self, victim: Victim) -> list[Victim]:
        found = [victim]
        for above in found:  # grows while it is walked over
            blobs = self._blobs.values()
            standing = (_victim(each) for each in blobs if above.name in (each.head.parent, each.head.base))
            found += [each for each in standing if each not in found]
        return found

    def clock(self) -> Tick | None:
        """Nobody was here before."""
        return None

    def rate(self, name: str) -> float | None:
        return self._rates.get(name)

    def users(self, model: str) -> Iterator[tuple[BlobName, str, int]]:
        return ((name, user, depth) for (of, name, user), depth in list(self._users.items()) if of == model)

    def put_users(self, model: str, depths: Mapping[tuple[BlobName, str], int | None]) -> None:
        for (name, user), depth in depths.items():
            self._users.pop((model, name, user), None)
            if depth is not None:
                self._users[model, name, user] = depth

    def forget_users(self, model: str, users: Collection[str]) -> None:
        self._users = {key: depth for key, depth in self._users.items() if key[0] != model or key[2] not in users}

    def put(self, blobs: Iterable[Listed]) -> None:
        for blob in blobs:
            key = (blob.head.model, blob.head.name)
            used_at = max(blob.used_at, self._blobs[key].used_at) if key in self._blobs else blob.used_at
            self._blobs[key] = Listed(blob.head, blob.num_bytes, used_at)

    def touch(self, model: str, used_at: dict[BlobName, float]) -> None:
        for name, moment in used_at.items():
            if (blob := self._blobs.get((model, name))) is not None:
                self._blobs[model, name] = Listed(blob.head, blob.num_bytes, moment)

    def drop(self, blobs: Collection[tuple[str, BlobName]]) -> None:
        for key in blobs:
            self._blobs.pop(key, None)
        gone = set(blobs)
        self._users = {key: depth for key, depth in self._users.items() if key[:2] not in gone}

    def set_rate(self, name: str, per_second: float) -> None:
        self._rates[name] = per_second

    def set_clock(self, tick: Tick) -> None:
        """Nobody comes after."""

    def reset(self) -> None:
        self._blobs.clear()
        self._users.clear()

    def close(self) -> None:
        self._blobs.clear()


def _victim(blob: Listed) -> Victim:
    return Victim(blob.head.model, blob.head.name, blob.num_bytes, blob.used_at)
