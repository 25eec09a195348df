"""The nouns of the disk's index: a blob as the index knows it, the blobs of a prefix, and uses that the catalog does
not have. No trie and no file.
"""

from dataclasses import dataclass, field

from kvserve.cache.disk_blob import BlobHead, BlobName
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
            state = step.checkpoint
            if state is not None and not all(each.is_written for each in state.chain):
                state = None
            steps.append(BlobStep(step.segment, step.start, step.end, state))
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
