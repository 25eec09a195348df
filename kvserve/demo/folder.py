"""A folder that is made here: complete under its name, or not there. It knows which files are its own and whether all
of them are there, nothing of what they say.

It is written under another name and renamed when it is finished, so a half-made one is never loaded. A marker in it
names its files with their sizes and what they were made from.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvserve.errors import ModelLoadError

MARKER_NAME = "kvserve-demo.json"
ABANDONED_AFTER_SECONDS = 3600


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
    building = unfinished(directory)
    try:
        write(building)
        _write_marker(building, digest)
        _put_in_place(building, directory, digest)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def is_complete(directory: Path, digest: str) -> bool:
    """Whether the folder was made from this and all of its files are there."""
    marker = _read_marker(directory)
    if marker is None or marker.get("digest") != digest:
        return False
    sizes: dict[str, int] = marker["file_bytes"]
    present = {path.name: path.stat().st_size for path in directory.iterdir()}
    return all(present.get(name) == size for name, size in sizes.items())


def unfinished(path: Path) -> Path:
    """An empty folder beside `path`, for what is to have that name when it is finished; whoever asks removes it. Those
    of builders that were killed go first."""
    prefix = _prefix(path)
    for each in _unfinished_of(path):
        if _age_seconds(each) > ABANDONED_AFTER_SECONDS:
            shutil.rmtree(each, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))


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


def _age_seconds(path: Path) -> float:
    """A living builder needs seconds, one that fetches minutes, never an hour."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        # Its builder finished and removed it between the listing and here.
        return 0.0


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
