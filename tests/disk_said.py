"""What the servers of one folder of KV have said to be written, looked up naively: names from the catalog, all else
from the files. It uses no index and no tier."""

import contextlib
import sqlite3
from array import array
from collections.abc import Sequence
from pathlib import Path

from kvserve.cache.disk_blob import BlobHead, BlobName, unpack_blob
from kvserve.cache.token_run import ID_BYTES
from tests.agents import common_length


class SaidOnDisk:
    """All that was ever in the catalog of `folder`, where nothing is to leave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: set[BlobName] = set()
        self._heads: dict[BlobName, BlobHead] = {}

    def look(self) -> None:
        """Note what the catalog say now, and see that all that they ever said is there: a row and a whole file of each.

        A file that is no whole blob raises DamagedBlob.
        """
        with contextlib.closing(sqlite3.connect(self._folder / "index.sqlite", timeout=60)) as catalog:
            listed = {BlobName(name) for (name,) in catalog.execute("SELECT name FROM blobs")}
            assert catalog.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert listed >= self.names, "a row that was put down has gone"
        self.names |= listed
        files = {BlobName(path.stem): path for path in self._folder.rglob("*.safetensors")}
        assert files.keys() >= self.names, "a file that was said to be written is not there"
        self._heads = {name: unpack_blob(path.read_bytes(), name).head for name, path in files.items()}

    def num_tokens(self, ids: Sequence[int], *, needs_states: bool) -> int:
        """How many tokens of a prompt were said to be written, the last of them, which is always computed, left out; up
        to a state where a row can start from nothing else."""
        wanted, found = array("I", ids[:-1]).tobytes(), 0
        for head in (self._heads[name] for name in self.names):
            before, own = self._before(head), head.tokens.ids
            if not wanted.startswith(before):
                continue
            if head.kind == "checkpoint":
                found = max(found, len(before))
            elif not needs_states:
                found = max(found, len(before) + ID_BYTES * common_length(_ids(own), _ids(wanted[len(before) :])))
        return found // ID_BYTES

    def _before(self, head: BlobHead) -> bytes:
        """The tokens before a blob, packed."""
        if not head.parent:
            return b""
        parent, start = self._heads[BlobName(head.parent)], head.tokens.start
        return self._before(parent) + parent.tokens.packed(parent.tokens.start, start)


def _ids(packed: bytes) -> Sequence[int]:
    return memoryview(packed).cast("I")
