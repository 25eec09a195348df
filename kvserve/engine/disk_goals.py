"""The places that a row could start from if the disk were read up to there. Whether that pays is decided elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.cache.disk_records import Entry, Found
from kvserve.cache.match import PrefixMatch
from kvserve.cache.token_run import image_around
from kvserve.core import TokenSequence


@dataclass(frozen=True, slots=True)
class Goal:
    """The prefix `[0, end)` is to be had from `segments`, in order, and `states`: the checkpoint at its end, and before
    it those that it builds on."""

    end: int
    segments: tuple[Entry, ...]
    states: tuple[Entry, ...]
    ends: tuple[int, ...]
    """Where this prefix leaves each segment: what lies behind in it are another prompt's rows."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.segments, *self.states)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def goals(found: Found, match: PrefixMatch, tokens: TokenSequence, *, needs_checkpoints: bool) -> Iterator[Goal]:
    """Every place that the row could start from if everything before it were read."""
    limit = min(found.depth, max(len(tokens) - 1, 0))
    if (image := image_around(tokens.images, limit)) is not None:
        limit = image.start
    segments, ends = list[Entry](), list[int]()
    for step in found.steps:
        if step.start >= limit:
            return
        if step.end > match.num_matched_tokens and step.segment not in segments[-1:]:
            segments.append(step.segment)
            ends.append(step.end)
        elif step.segment in segments[-1:]:
            ends[-1] = step.end
        if not needs_checkpoints:
            yield Goal(min(step.end, limit), tuple(segments), (), tuple(ends))
        elif step.checkpoint is not None and step.end <= limit and image_around(tokens.images, step.end) is None:
            yield Goal(step.end, tuple(segments), step.checkpoint.chain, tuple(ends))
