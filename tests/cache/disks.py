"""A disk tier over payloads that know whose they are: what the tests of the disk share."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.disk_blob import Blob, BlobName, Tensor
from kvserve.cache.disk_records import DiskLimits, Faults, Found
from kvserve.cache.disk_scratch import BlobStore, ScratchStore
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.token_run import TokenRun, pack
from kvserve.core import TokenSequence

MODEL, OTHER = "0" * 32, "f" * 32
WAIT_SECONDS = 60.0
MAX_CHAIN = 4
ROOMY = DiskLimits(max_bytes=10**12, min_free_bytes=0, ttl_seconds=3600, max_queued_bytes=10**9)
HASHER = BlockHasher(4, "fingerprint")


def named(ids: Sequence[int]) -> tuple[TokenRun, HashChain]:
    """A prompt as the tree packs and names it."""
    run = pack(TokenSequence(tuple(ids)))
    return run, HASHER.start().extended(run)


def names_of(found: Found) -> list[BlobName]:
    """All that a prefix stands on, in order."""
    blobs = [each for step in found.steps for each in (step.segment, step.checkpoint)]
    return [each.name for each in blobs if each is not None]


@dataclass
class Disk(AbstractContextManager["Disk"]):
    """A tier on a folder. A row of KV is the token's own bytes, a state is the whole prefix."""

    folder: Path
    limits: DiskLimits = ROOMY
    model: str = MODEL
    is_scratch: bool = False
    beside: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    store: BlobStore = field(init=False)
    tier: DiskTier = field(init=False)

    def __post_init__(self) -> None:
        folder, model = self.folder, self.model
        self.store = ScratchStore(folder, model) if self.is_scratch else FolderStore(folder, model, self.beside)
        self.tier = DiskTier(self.store, BlobTrie(HASHER, self.model), self.limits, Faults(self.lines.append))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.tier.close(WAIT_SECONDS)

    @property
    def faults(self) -> dict[str, int]:
        return self.tier.faults.counts()

    def say(
        self, ids: Sequence[int], *, states: Sequence[int] = (), flush: bool = True, is_based: bool = False
    ) -> bool:
        """Write what is new of a prompt, as one segment, and states at some offsets, each going on from the one before
        where `is_based`. Whether all was taken."""
        run, chain = named(ids)
        depth = self.tier.index.find(run, chain).depth
        if depth < run.end:
            data = run.packed(depth, run.end)
            if not self.tier.can_take(len(data)):
                return False
            entry = self.tier.index.add_segment(run, chain, depth, run.end, "stride")
            assert entry is not None
            self.tier.put(entry, "rows", [Tensor("U8", (len(data),), data)])
        for offset in states:
            steps = self.tier.index.find(run, chain).steps if is_based else ()
            before = [step.checkpoint for step in steps if step.checkpoint is not None and step.end < offset]
            base = before[-1] if before and len(before[-1].chain) < MAX_CHAIN else None
            entry = self.tier.index.add_checkpoint(run, chain, offset, "user", (), base)
            if entry is not None:
                self.tier.put(entry, "state", [Tensor("U8", (offset * 4,), run.packed(0, offset))])
        if flush:
            assert self.tier.flush(WAIT_SECONDS)
        return True

    def recall(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of the longest prefix that comes back, and where states came back. Checks every byte of it."""
        run, chain = named(ids)
        found = self.tier.index.find(run, chain).written()
        rows, offsets = b"", []
        for step in found.steps:
            blob = self.read(step.segment)
            if blob is None:
                break
            first = blob.head.tokens.start
            part = bytes(blob.tensors[0].data)[(step.start - first) * 4 : (step.end - first) * 4]
            assert part == run.packed(step.start, step.end), "rows of something else"
            rows += part
            if step.checkpoint is not None and (state := self.read(step.checkpoint)) is not None:
                assert bytes(state.tensors[0].data) == run.packed(0, step.end), "a state of something else"
                offsets.append(step.end)
        return list(memoryview(rows).cast("I")), offsets

    def named(self, ids: Sequence[int]) -> tuple[TokenRun, HashChain]:
        """A prompt as the index asks for it."""
        return named(ids)

    def found(self, ids: Sequence[int]) -> Found:
        """What is known of a prompt."""
        return self.tier.index.find(*named(ids))

    def read(self, entry: object) -> Blob | None:
        load = self.tier.load([entry])  # type: ignore[list-item]
        deadline = time.monotonic() + WAIT_SECONDS
        found: list[Blob | None] = []
        while not self.tier.is_over(load) and time.monotonic() < deadline:
            self.tier.wait(0.05)
            found += self.tier.take(load)
        [blob] = found
        return blob

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))
