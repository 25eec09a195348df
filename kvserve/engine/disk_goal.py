"""What a row could start from if the disk gave it: a prefix, and the files that it takes."""

from dataclasses import dataclass

from kvserve.cache.disk_index import Entry


@dataclass(frozen=True, slots=True)
class Goal:
    """The prefix `[0, end)` is to be had from `segments`, in order, and `state`, the checkpoint at its end."""

    end: int
    segments: tuple[Entry, ...]
    state: Entry | None
    ends: tuple[int, ...]
    """Where this prefix leaves each segment: what lies behind in it are another prompt's rows."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.segments if self.state is None else (*self.segments, self.state)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)
