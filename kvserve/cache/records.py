"""What the prefix cache stores and returns: immutable records, pieces and limits, without behaviour.

A payload is what the engine stores: opaque here but for its size. Payloads are in a tier; records have their key and
their tokens.
"""

from dataclasses import dataclass
from typing import Literal, NewType, Protocol

from kvserve.cache.token_run import TokenRun

RecordId = NewType("RecordId", int)


class Payload(Protocol):
    """Arrays of the engine. `num_bytes` never changes."""

    @property
    def num_bytes(self) -> int: ...


class Copy(Protocol):
    """A record's copy in the other tier: there once it is written, gone once it is forgotten. That tier sets both."""

    @property
    def is_written(self) -> bool: ...

    @property
    def is_forgotten(self) -> bool: ...


BoundaryKind = Literal["system", "user", "message", "tail", "image", "divergence", "answer", "stride"]
"""Why a prefill stops at an offset: end of system and tools, of a user message, of another message, of the newest
message before the generation tail, before an image, where a stored branch parts, end of an answer, else distance."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """KV of the tokens `[tokens.start, tokens.end)` for every layer that can be cut; row i is of token `start + i`.

    `num_bytes` is 0 where the model has no such layer; there is no payload then.
    """

    record_id: RecordId
    tokens: TokenRun
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The whole state, after `offset` tokens, of every layer that cannot be cut."""

    record_id: RecordId
    offset: int
    num_bytes: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class KvPiece:
    """Rows `[first_row, end_row)` of a segment's payload; their tokens begin at `start`."""

    segment: Segment
    payload: Payload | None
    first_row: int
    end_row: int

    @property
    def start(self) -> int:
        return self.segment.tokens.start + self.first_row

    @property
    def end(self) -> int:
        return self.segment.tokens.start + self.end_row


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint with its payload."""

    checkpoint: Checkpoint
    payload: Payload


MatchCause = Literal["nothing", "whole", "ended", "diverged", "no_checkpoint", "inside_image"]
"""Why no more was usable: nothing is stored, all but the last token is reused, what is stored ends here, it continues
with other tokens, it matches further but has no checkpoint there, the cut would divide an image."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What `extend` did with `[start, end)`: `[start, first_new)` was stored already, `[first_new, end)` is new."""

    start: int
    first_new: int
    end: int
    has_new_checkpoint: bool

    @property
    def num_new_tokens(self) -> int:
        return self.end - self.first_new


@dataclass(frozen=True, slots=True)
class Eviction:
    """The result of an eviction. `is_within_limits` is False if live requests need too much, or if this was only a
    slice of the work; `is_over`: no work is left."""

    num_freed_bytes: int
    is_within_limits: bool
    is_over: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the RAM tier. `max_bytes` counts live requests too; 0 seconds mean no limit. Numbers of entries bind
    only where bytes, or those of checkpoints, are over their bound: entries over their number are evicted first.

    Expired nodes are looked for when the first is due, at least every `check_seconds`. Entries of the short class count
    as used again after `keep_alive_seconds` while their owner is not idle; 0 means never.

    Raises ValueError for a bound that leaves no room at all.
    """

    max_bytes: int
    max_checkpoint_bytes: int
    max_entries: int
    max_entries_per_owner: int
    ttl_seconds: float = 0.0
    owner_idle_seconds: float = 0.0
    keep_alive_seconds: float = 0.0
    check_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_checkpoint_bytes", "max_entries", "max_entries_per_owner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may be added before anything is evicted for it, and how many of them in states."""

    num_bytes: float
    num_state_bytes: float

    def fits(self, num_bytes: float, num_state_bytes: float) -> bool:
        """Whether so much may be added, `num_state_bytes` of it in states."""
        return num_bytes <= self.num_bytes and num_state_bytes <= self.num_state_bytes


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the cache holds and has done so far; a snapshot for other threads."""

    num_nodes: int
    num_segments: int
    num_checkpoints: int
    num_entries: int
    num_stored_tokens: int
    ram_bytes: int
    checkpoint_bytes: int
    live_bytes: int
    num_leases: int
    num_image_retreats: int
    num_evicted_tokens: int
    num_evicted_checkpoints: int
