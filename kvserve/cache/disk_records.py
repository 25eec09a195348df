"""The nouns of the disk tier: blobs as its index knows them, uses that the catalog does not have, limits, reads and
writes in progress, figures, and faults, which are reported once and never cost more than a miss. No trie and no file.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvserve.cache.disk_blob import Blob, BlobHead, BlobName, Tensor
from kvserve.cache.node import note_use
from kvserve.cache.records import RecordId


@dataclass(slots=True, eq=False)
class Entry:
    """A blob that is on disk, or will be. `users`: who used its tokens, up to which offset; `state_end`: where the last
    state before its tokens was when it was added. `base`: the state whose windows this one continues; `leaning`: the
    states that continue this one. After it `is_forgotten` another entry may have its name. Changed by the index
    only."""

    record_id: RecordId
    head: BlobHead
    num_bytes: int = 0
    is_written: bool = False
    is_forgotten: bool = False
    users: dict[str, int] = field(default_factory=dict)
    state_end: int = 0
    base: "Entry | None" = None
    leaning: "list[Entry]" = field(default_factory=list)

    @property
    def chain(self) -> "tuple[Entry, ...]":
        """This state and all that it continues, the whole one first."""
        return (*self.base.chain, self) if self.base is not None else (self,)

    @property
    def name(self) -> BlobName:
        return self.head.name

    @property
    def start(self) -> int:
        """Where its tokens begin."""
        return self.head.tokens.start

    @property
    def is_anchor(self) -> bool:
        """Whether system and tools end where it does."""
        return self.head.boundary == "system"


@dataclass(frozen=True, slots=True)
class BlobStep:
    """The tokens `[start, end)` of a prefix are in `segment`; `checkpoint` is the state behind `end`, if any."""

    segment: Entry
    start: int
    end: int
    checkpoint: Entry | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a prefix: `steps` cover it from its first token to `depth`, in order."""

    depth: int = 0
    steps: tuple[BlobStep, ...] = field(default=())

    def written(self) -> "Found":
        """The part that is on disk already."""
        steps: list[BlobStep] = []
        for step in self.steps:
            if not step.segment.is_written:
                break
            has_state = step.checkpoint is not None and all(each.is_written for each in step.checkpoint.chain)
            steps.append(step if has_state else replace(step, checkpoint=None))
        return Found(steps[-1].end if steps else 0, tuple(steps))


@dataclass(frozen=True, slots=True)
class Unused:
    """What no other user needs once these are forgotten: blobs, and the bytes of those that were on disk."""

    names: tuple[BlobName, ...]
    users: tuple[str, ...]
    num_bytes: int


class DiskUses:
    """New uses of blobs since they were last taken. The caller holds the index's lock."""

    def __init__(self) -> None:
        self._unsaved: dict[tuple[BlobName, str], int | None] = {}

    @property
    def are_new(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._unsaved)

    def note(self, entry: Entry, user: str, depth: int) -> None:
        """Note that a user came `depth` tokens far inside a blob."""
        if entry.users.get(user, 0) >= depth:
            return
        oldest = note_use(entry.users, user, depth)
        self._unsaved[entry.name, user] = depth
        if oldest is not None:
            self._unsaved[entry.name, oldest] = None

    def take(self) -> dict[tuple[BlobName, str], int | None]:
        """(blob, user) -> how far it came; None where the user was dropped."""
        unsaved, self._unsaved = self._unsaved, {}
        return unsaved


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Bounds over all models; `max_bytes` None takes the smaller of 500 GB and 20 % of what is free. What was read and
    not yet taken is bounded over all loads: then reading waits."""

    max_bytes: int | None
    min_free_bytes: int
    ttl_seconds: float
    max_queued_bytes: int
    max_read_ahead_bytes: int = 2**29


@dataclass(slots=True, eq=False)
class Load:
    """Blobs to read, in order; a None in `ready` ends it: that blob could not be read. `num_read` of them were read,
    `ready` was not taken yet, each with its bytes."""

    entries: tuple[Entry, ...]
    ready: deque[tuple[Blob | None, int]] = field(default_factory=deque)
    ready_bytes: int = 0
    num_read: int = 0
    is_read: bool = False
    is_cancelled: bool = False

    @property
    def names(self) -> set[BlobName]:
        return {entry.name for entry in self.entries}


@dataclass(frozen=True, slots=True)
class Write:
    """A blob that waits to be written; `num_bytes` are those of its payload."""

    entry: Entry
    note: str
    tensors: tuple[Tensor, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a deletion: bytes of the blobs, and whether files and rows of all are gone."""

    num_bytes: int
    is_done: bool

    def __add__(self, other: "Removal") -> "Removal":
        return Removal(self.num_bytes + other.num_bytes, self.is_done and other.is_done)


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What the disk tier holds (of this model, and of all) and has done; a snapshot for other threads."""

    place: str
    num_bytes: int
    total_bytes: int
    max_bytes: int
    num_segments: int
    num_checkpoints: int
    num_written: int
    num_written_bytes: int
    last_day_written_bytes: int
    num_read: int
    num_read_bytes: int
    num_refused: int
    num_evicted: int
    num_queued_bytes: int
    is_full: bool
    read_bytes_per_second: float | None
    faults: dict[str, int]


FaultKind = Literal[
    "damaged", "missing", "unreadable", "unwritable", "full", "behind", "index", "unsupported", "unlocked"
]

_CONSEQUENCE: Mapping[FaultKind, str] = {
    "damaged": "KV on disk was damaged and is computed again",
    "missing": "KV on disk is gone and is computed again",
    "unreadable": "KV on disk could not be read and is computed again",
    "unwritable": "KV could not be written to disk and stays in RAM only",
    "full": "The disk has no room for more KV; nothing is written until there is",
    "behind": "KV was evicted from RAM before it could be written to disk and is computed again",
    "index": "The index of the KV on disk could not be used; it is made again from the files",
    "unlocked": "This volume has no file locks: two servers on one folder may delete what the other has just written",
    "unsupported": "A state of this model cannot be written to disk and stays in RAM only",
}


class Faults:
    """Counts per kind since the start. May be used from any thread."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._counts: Counter[FaultKind] = Counter()
        self._told: set[FaultKind] = set()

    def add(self, kind: FaultKind, reason: object) -> None:
        """Count a fault; report the first of its kind with its reason."""
        with self._lock:
            self._counts[kind] += 1
            is_first = kind not in self._told
            self._told.add(kind)
        if is_first:
            self._report(f"{_CONSEQUENCE[kind]} ({reason}). Counted in GET /v1/cache; not told again.")

    def is_over(self, kind: FaultKind, line: str) -> None:
        """Report that a condition has ended, and report the next fault of this kind again."""
        with self._lock:
            was_told = kind in self._told
            self._told.discard(kind)
        if was_told:
            self._report(line)

    def counts(self) -> dict[str, int]:
        """Faults per kind; kinds that never occurred are not in it."""
        with self._lock:
            return {str(kind): count for kind, count in self._counts.items()}
