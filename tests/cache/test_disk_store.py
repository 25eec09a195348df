"""Files of blobs in their folders."""

from pathlib import Path

import pytest

from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_store import FolderStore

MODEL = "0" * 32
NAMES = [BlobName(f"{number:040x}") for number in range(3)]


def test_what_another_server_deletes_during_the_walk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or a folder that is gone when its turn comes ends neither the walk nor what is found of the others."""
    store = FolderStore(tmp_path, MODEL)
    other = tmp_path / ("1" * 32)
    other.mkdir()
    for name in NAMES:
        store.write(name, [b"blob"])
    whole = {file.name for file in store.files()}
    found = store.files()
    first = next(found)
    rest = [name for name in NAMES if name != first.name]
    store.delete(MODEL, rest[0])
    assert [file.name for file in found] == rest[1:]
    assert whole == set(NAMES)
    folders = store._folders()
    monkeypatch.setattr(store, "_folders", lambda: [*folders, other])
    other.rmdir()
    assert {file.name for file in store.files()} == {first.name, rest[1]}
