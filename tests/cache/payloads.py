"""Payloads that know whose they are, so that a test can tell exact reuse from the wrong rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvserve.cache.block_hash import BlockHasher, Digest
from kvserve.cache.eviction import Score, value_score
from kvserve.cache.match import PrefixMatch
from kvserve.cache.node import Lease
from kvserve.cache.records import BoundaryKind, KvPiece, Limits, Payload
from kvserve.cache.tree import PrefixTree
from kvserve.core import ImageSpan, TokenSequence

IMAGE_ID = 9
IMAGE_TOKENS = 3
ROW_BYTES = 4
STATE_BYTES = 40

type Key = int | tuple[int, str, int]
type Atom = int | str
"""A text token, or the digest of an image."""


@dataclass(frozen=True)
class Rows:
    """The KV of some tokens: the tokens themselves."""

    keys: tuple[Key, ...]

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES * len(self.keys)


@dataclass(frozen=True)
class WholeState:
    """The state after a prefix: the prefix itself."""

    keys: tuple[Key, ...]
    num_bytes: int = STATE_BYTES


@dataclass
class Clock:
    """Time that passes when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def cut_rows(payload: Payload, start: int, end: int) -> Payload:
    assert isinstance(payload, Rows)
    return Rows(payload.keys[start:end])


def joined(pieces: Sequence[KvPiece]) -> Rows:
    """The rows of pieces that follow one another."""
    keys: list[Key] = []
    for piece in pieces:
        assert isinstance(piece.payload, Rows)
        keys += piece.payload.keys[piece.first_row : piece.end_row]
    return Rows(tuple(keys))


def flatten(atoms: Sequence[Atom]) -> TokenSequence:
    """Text tokens and images as model tokens."""
    ids: list[int] = []
    images: list[ImageSpan] = []
    for atom in atoms:
        if isinstance(atom, str):
            images.append(ImageSpan(len(ids), len(ids) + IMAGE_TOKENS, atom))
            ids += [IMAGE_ID] * IMAGE_TOKENS
        else:
            ids.append(atom)
    return TokenSequence(tuple(ids), tuple(images))


def keys_of(tokens: TokenSequence) -> tuple[Key, ...]:
    """The identity of every token, the slow and obvious way."""
    keys: list[Key] = list(tokens.ids)
    for span in tokens.images:
        for position in range(span.start, min(span.end, len(tokens))):
            keys[position] = (tokens.ids[position], span.digest, position - span.start)
    return tuple(keys)


def short_digest(data: bytes) -> bytes:
    """A hash that collides all the time."""
    return bytes([sha256(data).digest()[0] & 31])


ROOMY = Limits(max_bytes=10**12, max_checkpoint_bytes=10**12, max_entries=10**6, max_entries_per_owner=10**6)


def make_tree(
    limits: Limits = ROOMY,
    *,
    needs_checkpoints: bool = False,
    clock: Clock | None = None,
    use_index: bool = True,
    block_size: int = 4,
    digest: Digest | None = None,
    score: Score = value_score,
) -> PrefixTree:
    """A tree over fake payloads."""
    hasher = BlockHasher(block_size, "model") if digest is None else BlockHasher(block_size, "model", digest)
    return PrefixTree(
        hasher,
        limits,
        needs_checkpoints=needs_checkpoints,
        cut_payload=cut_rows,
        use_index=use_index,
        score=score,
        clock=clock or Clock(),
    )


def rows_of(tokens: TokenSequence) -> Callable[[int, int], Payload]:
    keys = keys_of(tokens)
    return lambda start, end: Rows(keys[start:end])


def store(
    tree: PrefixTree,
    tokens: TokenSequence,
    ends: Sequence[int] | None = None,
    *,
    owner: str | None = None,
    user: str = "",
    ttl_seconds: float | None = None,
    kinds: dict[int, BoundaryKind] | None = None,
    keep: bool = False,
) -> Lease:
    """One row from lookup to release; a state at each of `ends`, an entry at the last."""
    lease = tree.acquire(tree.lookup(tokens), owner=owner, user=user, ttl_seconds=ttl_seconds)
    keys = keys_of(tokens)
    for end in ends or (len(tokens),):
        if end >= lease.num_tokens:
            kind = (kinds or {}).get(end, "message")
            tree.extend(lease, tokens, end, rows_of(tokens), lambda end=end: WholeState(keys[:end]), kind)  # type: ignore[misc]
    tree.mark_end(lease)
    if not keep:
        tree.release(lease)
    return lease


def assert_exact(match: PrefixMatch, tokens: TokenSequence) -> None:
    """The pieces are the rows of the usable prefix, in order and without a gap, and the state is that of its end."""
    keys = keys_of(tokens)[: match.num_usable_tokens]
    restored: list[Key] = []
    for piece in match.pieces:
        assert piece.start == len(restored)
        assert isinstance(piece.payload, Rows)
        restored += piece.payload.keys[piece.first_row : piece.end_row]
    assert tuple(restored) == keys
    if match.state is not None:
        assert match.state.checkpoint.offset == match.num_usable_tokens
        assert match.state.payload == WholeState(keys)
