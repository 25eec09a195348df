"""Block hashes: a SHA-256 chain over blocks of model tokens. It knows tokens and images, not what is cached.

A block's hash depends on everything before it, on the model's fingerprint and on the partition, so equal hashes mean
equal prefixes. They are no proof: what is found by its hash is compared token by token.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvserve.cache.token_run import ID_BYTES, TokenRun, touching

FORMAT = b"kvserve prefix blocks, version 1"
"""Changes whenever what is hashed changes, so that old hashes match nothing."""

type Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class HashChain:
    """The hashes of a sequence's whole blocks, first to last, over its first `num_tokens` tokens, in `partition`. A
    chain may begin behind `num_dropped` blocks; then `seed` is the hash of the last of them."""

    block_size: int
    seed: bytes
    hashes: tuple[bytes, ...] = ()
    digest: Digest = sha256
    partition: str = ""
    num_dropped: int = 0

    @property
    def num_tokens(self) -> int:
        return (self.num_dropped + len(self.hashes)) * self.block_size

    def between(self, start: int, end: int) -> tuple[bytes, ...]:
        """The hashes of the blocks that end in `(start, end]`."""
        first, last = start // self.block_size, end // self.block_size
        return self.hashes[first - self.num_dropped : last - self.num_dropped]

    def extended(self, run: TokenRun) -> "HashChain":
        """The chain of all tokens up to the end of `run`, which begins at or before `num_tokens`; only new blocks are
        hashed."""
        known, last = self.num_tokens, run.end // self.block_size * self.block_size
        if last <= known:
            return self
        parent = self.hashes[-1] if self.hashes else self.seed
        packed, step, digest = run.packed(known, last), self.block_size * ID_BYTES, self.digest
        images = _image_suffixes(run, known, last, self.block_size)
        hashes: list[bytes] = []
        for offset in range(0, len(packed), step):
            block = parent + packed[offset : offset + step]
            if images and (suffix := images.get(offset // step)):
                block += suffix
            parent = digest(block)
            hashes.append(parent)
        return replace(self, hashes=(*self.hashes, *hashes))

    def truncated(self, num_tokens: int) -> "HashChain":
        """The chain of the first `num_tokens` tokens."""
        return replace(self, hashes=self.hashes[: max(0, num_tokens // self.block_size - self.num_dropped)])


def _image_suffixes(run: TokenRun, start: int, end: int, block_size: int) -> dict[int, bytes]:
    """For each block (counted from `start`) that touches an image: which of its tokens are which tokens of it."""
    suffixes: dict[int, bytes] = {}
    for span in touching(run.images, start, end):
        digest = span.digest.encode()
        for block in range(
            (max(span.start, start) - start) // block_size, -(-(min(span.end, end) - start) // block_size)
        ):
            block_start = start + block * block_size
            first, last = max(span.start, block_start), min(span.end, block_start + block_size)
            where = struct.pack("<4Q", first - block_start, last - block_start, first - span.start, len(digest))
            suffixes[block] = suffixes.get(block, b"") + where + digest
    return suffixes


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """How one model's prefixes are hashed.

    `fingerprint` stands for weights, configuration, tokenizer, template and KV settings. Raises ValueError for a
    block size below 1.
    """

    block_size: int
    fingerprint: str
    digest: Digest = sha256

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"A block has at least one token, not {self.block_size}.")

    def start(self, partition: str = "") -> HashChain:
        """The empty chain; sequences of different partitions never share a hash."""
        fields = [FORMAT, str(self.block_size).encode(), self.fingerprint.encode(), partition.encode()]
        seed = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
        return HashChain(self.block_size, self.digest(seed), digest=self.digest, partition=partition)
