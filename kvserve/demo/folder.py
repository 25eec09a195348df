"""A folder that is made here: complete under its name, or not there. It knows which files are its own and whether all
of them are there, nothing of what they say.

It is written under another name and renamed when it is finished, so a half-made one is never loaded. A marker in it
names its files with their sizes and what they were made from.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvserve.core.file_lock import try_lock
from kvserve.errors import ModelLoadError

MARKER_NAME = "kvserve-demo.json"
ABANDONED_AFTER_SECONDS = 3600
"""Where the volume has no locks: a living builder needs seconds, one that fetches minutes, never an hour."""


def make_folder(directory: Path, digest: str, write: Callable[[Path], None]) -> Path:
    """Make `directory` hold what `write` writes into the folder that it is given, and return it.

    A complete folder with the same digest is kept as it is, which takes about a millisecond; an older or damaged one of
    ours is replaced. Raises ModelLoadError where the folder holds something that was not made here.
    """
    directory = directory.absolute()
    if is_complete(directory, digest):
        return directory
    _refuse_foreign(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(directory) as building:
        write(building)
        _write_marker(building, digest)
        _put_in_place(building, directory, digest)
    return directory


def is_complete(directory: Path, digest: str) -> bool:
    """Whether the folder was made from this and all of its files are there."""
    marker = _read_marker(directory)
    if marker is None or marker.get("digest") != digest:
        return False
    sizes: dict[str, int] = marker["file_bytes"]
    present = {path.name: path.stat().st_size for path in directory.iterdir()}
    return all(present.get(name) == size for name, size in sizes.items())


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, for what is to have that name when it is finished; it goes with the block. Those
    of builders that were killed go first: a living one holds a lock on its own, which ends with its process."""
    for each in _unfinished_of(path):
        _remove_abandoned(each)
    building, descriptor = _held_folder(path)
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)
        os.close(descriptor)


def _held_folder(path: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock. Another builder that finds it before it is locked takes it
    for one that was left, and it goes: then there is another."""
    while True:
        building = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
        descriptor = _opened(building)
        if descriptor is None:
            continue
        if try_lock(descriptor, fcntl.LOCK_EX) is not False and _is_there(building, descriptor):
            return building, descriptor
        os.close(descriptor)


def _remove_abandoned(building: Path) -> None:
    """Remove a builder's folder unless it lives. The lock is held meanwhile, so that nobody begins in it."""
    if (descriptor := _opened(building)) is None:
        return
    try:
        is_free = try_lock(descriptor, fcntl.LOCK_EX)
        is_old = time.time() - os.fstat(descriptor).st_mtime > ABANDONED_AFTER_SECONDS
        if is_free or (is_free is None and is_old):
            shutil.rmtree(building, ignore_errors=True)
    finally:
        os.close(descriptor)


def _opened(building: Path) -> int | None:
    """The descriptor of a builder's folder; None where it is gone, or another user's."""
    try:
        return os.open(building, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None


def _is_there(building: Path, descriptor: int) -> bool:
    """Whether the folder that is open has its name still."""
    try:
        return os.path.samestat(os.stat(building), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_unfinished(path: Path) -> int:
    """Remove what builders of `path` left, whatever its age. Returns how many bytes that was."""
    left = _unfinished_of(path)
    num_bytes = sum(each.stat().st_size for folder in left for each in folder.rglob("*") if each.is_file())
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return num_bytes


def remove_folder(directory: Path) -> int:
    """Remove a folder that was made here, whichever version made it: the files that its marker names, and the folder
    where nothing else is in it. Returns how many bytes that was."""
    num_bytes = remove_unfinished(directory) if directory.parent.is_dir() else 0
    marker = _read_marker(directory)
    if marker is None:
        return num_bytes
    # a marker is a file that anybody may have written: it names files of this folder only
    own = [directory / name for name in (*marker["file_bytes"], MARKER_NAME) if name == Path(name).name]
    for path in own:
        if path.is_file():
            num_bytes += path.stat().st_size
            path.unlink()
    if not any(directory.iterdir()):
        directory.rmdir()
    return num_bytes


def _prefix(path: Path) -> str:
    return f".{path.name}.building-"


def _unfinished_of(path: Path) -> list[Path]:
    return [each for each in path.parent.iterdir() if each.name.startswith(_prefix(path))]


def _read_marker(directory: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((directory / MARKER_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and isinstance(marker.get("file_bytes"), dict) else None


def _refuse_foreign(directory: Path) -> None:
    """Never replace what somebody else put there."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() and not (directory / MARKER_NAME).is_file():
        raise ModelLoadError(f"{directory} exists and is not a demo model of kvserve: give another folder.")


def _write_marker(building: Path, digest: str) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(building.iterdir())}
    marker = {"digest": digest, "file_bytes": sizes}
    (building / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _put_in_place(building: Path, directory: Path, digest: str) -> None:
    """Rename the finished folder to its name; when another process was faster with the same recipe, keep its folder."""
    # What is replaced moves below our own temporary folder first, which is removed in the end.
    finished = building / "finished"
    finished.mkdir()
    for path in list(building.iterdir()):
        if path != finished:
            path.rename(finished / path.name)
    while True:
        try:
            finished.rename(directory)
            return
        except OSError:
            if is_complete(directory, digest):
                return
            if not directory.is_dir():
                raise
        try:
            directory.rename(building / f"replaced-{os.urandom(4).hex()}")
        except FileNotFoundError:
            continue
