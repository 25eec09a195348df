"""The names of what kvserve keeps in a shared Redis, and for how long. Pure: it speaks to nobody.

kvs1:<model>:<tenant>:b:<name>:<i>   part i of a blob's file, as it is on disk
                      m:<name>       the path to that blob: see remote_path.py
                      u:<name>       who used it, up to where
                      i:<hash>       a blob that covers the block with this hash
kvs1:<records>:<principal>:r:<session>:<chain>
                                     how a model read a message, what it wrote there: a field for each way; <records>
                                     stands for model, template and the secret that rows are signed with
kvs1:forget                          who was forgotten, for the other servers
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FORMAT = "kvs1"
PART_BYTES = 2**20
"""A blob is cut into parts of this size: nothing that reads or writes one holds the server for long, and each can be
broken off between two."""

COARSE_BLOCKS = 16
"""Every so many blocks a prefix can be found at once; within so many behind the last of them, at each block."""

RECORDS = "r"
FORGET_STREAM = f"{FORMAT}:forget"
NO_TENANT = "-"


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """The keys of one model in one partition. `seconds`: what is not used for so long goes."""

    model: str
    tenant: str
    seconds: int

    @classmethod
    def of(cls, folder_name: str, device: str, partition: str, seconds: int) -> "RemoteKeys":
        """`folder_name` stands for weights, libraries, KV settings and the blobs' form. KV of another kind of device is
        not this one's to the bit."""
        model = hashlib.sha256(f"{folder_name}\n{device}".encode()).hexdigest()[:32]
        tenant = hashlib.sha256(partition.encode()).hexdigest()[:16] if partition else NO_TENANT
        return cls(model, tenant, seconds)

    @property
    def space(self) -> str:
        return f"{FORMAT}:{self.model}:{self.tenant}"

    def part(self, name: str, number: int) -> str:
        return f"{self.space}:b:{name}:{number}"

    def parts(self, name: str, num_bytes: int) -> list[str]:
        return [self.part(name, number) for number in range(num_parts(num_bytes))]

    def path(self, name: str) -> str:
        return f"{self.space}:m:{name}"

    def users(self, name: str) -> str:
        return f"{self.space}:u:{name}"

    def block(self, block_hash: bytes) -> str:
        return f"{self.space}:i:{block_hash.hex()}"


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """The keys of the conversations of one model under one template, of servers that sign with one secret."""

    space: str

    @classmethod
    def of(cls, fingerprint: str, secret: bytes) -> "RecordKeys":
        """`fingerprint` stands for model and template, `secret` for the form of the rows too."""
        return cls(hashlib.sha256(b"records\n" + secret + fingerprint.encode()).hexdigest()[:32])

    def session(self, principal: str, session: str) -> Callable[[bytes], str]:
        """Gives the key of each place, by its chain, in a session of a principal (by its name)."""
        before = f"{FORMAT}:{self.space}:{name_digest(principal)}:{RECORDS}:{name_digest(session)}:"
        return lambda chain: before + chain.hex()


def num_parts(num_bytes: int) -> int:
    """How many parts a blob of so many bytes has."""
    return max(1, -(-num_bytes // PART_BYTES))


def user_digest(user: str) -> str:
    """How `principal/session` is named there: two digests, so that either can be looked for."""
    principal, _, session = user.partition("/")
    return f"{name_digest(principal)}:{name_digest(session) if session else NO_TENANT}"


def name_digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def borders(start: int, end: int, block_size: int) -> Iterator[int]:
    """The offsets at which a blob of the tokens `[start, end)` can be found: each block up to the first coarse border
    behind its start, then the coarse ones."""
    step = block_size * COARSE_BLOCKS
    first_coarse = (start // step + 1) * step
    yield from range((start // block_size + 1) * block_size, min(first_coarse, end + 1), block_size)
    yield from range(first_coarse, end + 1, step)
