"""The nouns of the disk tier: limits, reads and writes in progress, figures. Values without behaviour."""

from collections import deque
from dataclasses import dataclass, field

from kvserve.cache.disk_blob import Blob, BlobName, Tensor
from kvserve.cache.disk_entries import Entry


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
