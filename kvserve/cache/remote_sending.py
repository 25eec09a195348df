"""Sends the blobs of a path to the shared cache once the local disk has them: the bytes of their files, parents first,
and what makes them known last. It knows names and bytes; a step is short, so that others go between two.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.disk_blob import BlobHead, BlobName, partition_of_first
from kvserve.cache.disk_records import Entry
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.remote_keys import PART_BYTES, RemoteKeys, borders, num_parts, user_digest
from kvserve.cache.remote_path import RemoteBlob, blob_of, packed, used_ends
from kvserve.cache.token_run import join
from kvserve.remote.redis_link import Command, Link, LinkRefusal, Reply
from kvserve.remote.shared_server import SharedServer, Steps

SEND_SECONDS = 30.0
STEP_SECONDS = 0.1
MAX_STEP_PARTS = 16
TOLD_SHARE = 8
"""The blocks of a path are named again after so small a part of the time that they stay."""

MAX_TOLD = 65_536
END_MARK, PARTS_MARK = "=end", "=parts"
"""Beside the users of a blob: where it ends, and how many parts it has."""


class NoPath(Exception):
    """Something on the way to a blob is not there any more."""


@dataclass(slots=True, eq=False)
class SendCounts:
    """What was sent; the puts thread counts."""

    num_written: int = 0
    num_written_bytes: int = 0
    num_not_worth: int = 0


@dataclass(frozen=True, slots=True)
class SendPath:
    """The blobs from the first token to a leaf: each segment, then the newest states on it."""

    blobs: tuple[RemoteBlob, ...]
    heads: dict[BlobName, BlobHead]

    @property
    def segments(self) -> list[RemoteBlob]:
        return [each for each in self.blobs if each.kind == "segment"]

    @property
    def left_at(self) -> dict[BlobName, int]:
        return used_ends(self.blobs)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.blobs)


def path_to(entry: Entry, index: BlobTrie, store: FolderStore) -> SendPath:
    """Raises NoPath, or OSError for a file that is gone."""
    head: BlobHead | None = entry.head
    if entry.head.kind == "checkpoint":
        head = index.head_of(entry.head.parent)
    segments = list[BlobHead]()
    while head is not None:
        segments.append(head)
        if partition_of_first(head.parent) is not None:
            break
        head = index.head_of(head.parent)
    if head is None or entry.is_forgotten:
        raise NoPath
    segments.reverse()
    names = {each.name for each in segments}
    used_names = dict.fromkeys(index.restored_names([_row_of(entry, index)], entry.head.tokens.end))
    used = [index.head_of(name) for name in used_names]
    states = [each for each in used if each is not None and each.kind == "checkpoint" and each.parent in names]
    left_at = used_ends([blob_of(each, 1) for each in segments])
    ordered = list[BlobHead]()
    for segment in segments:
        ordered.append(segment)
        on_it = [each for each in states if each.parent == segment.name and each.tokens.start <= left_at[segment.name]]
        ordered += sorted(on_it, key=lambda each: each.tokens.start)
    blobs = tuple(blob_of(each, store.num_bytes(each.name)) for each in ordered)
    return SendPath(blobs, {each.name: each for each in ordered})


def _row_of(entry: Entry, index: BlobTrie) -> Entry:
    """The segment whose rows end where a blob does. Raises NoPath."""
    if entry.head.kind == "segment":
        return entry
    row = index.entry_of(BlobName(entry.head.parent))
    if row is None:
        raise NoPath
    return row


class Sending:
    """Sends paths of one model."""

    def __init__(
        self, server: SharedServer, index: BlobTrie, hasher: BlockHasher, store: FolderStore, counts: SendCounts
    ) -> None:
        self._server = server
        self._hasher = hasher
        self._index = index
        self._told_at: dict[BlobName, float] = {}
        self._users_told: dict[BlobName, int] = {}
        self._store = store
        self._counts = counts

    def steps(self, link: Link, keys: RemoteKeys, path: SendPath, users: dict[str, int]) -> Steps:
        """Make sure that a path is there: what is stays for longer, what is not is sent. Raises LinkFailed."""
        refresh: list[Command] = []
        for blob in path.blobs:
            names = [*keys.parts(blob.name, blob.num_bytes), keys.users(blob.name)]
            names += [keys.path(blob.name)] if _is_row(blob) else []
            refresh += [("EXPIRE", name, keys.seconds) for name in names]
        replies = iter(self._run(link, refresh))
        missing = set[BlobName]()
        for blob in path.blobs:
            num = num_parts(blob.num_bytes) + 1 + _is_row(blob)
            if sum(next(replies) == 1 for _ in range(num)) < num:
                missing.add(blob.name)
        yield 0.0
        told = dict[BlobName, int]()
        self._run(link, list(self._whose(keys, path, users, missing, told)))
        for name, users_told in told.items():  # now that it is there
            _note(self._users_told, name, users_told)
        for blob in path.blobs:
            if blob.name in missing:
                for _ in self._send(link, keys, blob):
                    yield 0.0
        named_at = dict[BlobName, float]()
        self._run(link, list(self._known(keys, path, missing, named_at)))
        for name, at in named_at.items():
            _note(self._told_at, name, at)

    def _send(self, link: Link, keys: RemoteKeys, blob: RemoteBlob) -> Iterator[None]:
        batch = list[Command]()
        for number, data in enumerate(self._store.slices(blob.name, PART_BYTES)):
            batch.append(("SET", keys.part(blob.name, number), data, "EX", keys.seconds))
            if len(batch) >= self._parts_at_once():
                self._write(link, batch)
                batch = []
                yield
        self._write(link, batch)
        self._counts.num_written += 1
        self._counts.num_written_bytes += blob.num_bytes

    def _parts_at_once(self) -> int:
        rate = self._server.rates.write_bytes_per_second or 0.0
        return max(1, min(int(STEP_SECONDS * rate / PART_BYTES), MAX_STEP_PARTS))

    def _write(self, link: Link, batch: list[Command]) -> None:
        num_bytes = sum(len(command[2]) for command in batch if isinstance(command[2], bytes))
        started = time.perf_counter()
        self._run(link, batch)
        self._server.rates.was_written(num_bytes, time.perf_counter() - started)

    def _whose(
        self,
        keys: RemoteKeys,
        path: SendPath,
        users: dict[str, int],
        missing: set[BlobName],
        told: dict[BlobName, int],
    ) -> Iterator[Command]:
        """Who used each blob, before it is there: what has no user is removed with whoever is forgotten. Those of the
        leaf came through all that is before it. Adds to `told` what is known there once the commands have run."""
        left_at = path.left_at
        for blob in path.blobs:
            key, end = keys.users(blob.name), left_at.get(blob.name, blob.end)
            depths = {user: min(depth, end) for user, depth in users.items()}
            own = self._index.entry_of(blob.name)
            for user, depth in tuple(own.users.items()) if own is not None else ():
                depths[user] = max(depth, depths.get(user, 0))
            users_now = hash(frozenset(depths.items()))
            if blob.name in missing or self._users_told.get(blob.name) != users_now:
                scores = [each for user, depth in depths.items() for each in (depth, user_digest(user))]
                yield "ZADD", key, "GT", *scores, blob.end, END_MARK, num_parts(blob.num_bytes), PARTS_MARK
                told[blob.name] = users_now
            yield "EXPIRE", key, keys.seconds

    def _known(
        self, keys: RemoteKeys, path: SendPath, missing: set[BlobName], named_at: dict[BlobName, float]
    ) -> Iterator[Command]:
        """What makes blobs known: the path to each, then its blocks. Adds to `named_at` when blocks were named."""
        blobs, now = path.blobs, time.monotonic()
        chain: HashChain | None = None
        for place, blob in enumerate(blobs):
            if not _is_row(blob):
                continue
            last = next((at for at in range(place + 1, len(blobs)) if _is_row(blobs[at])), len(blobs))
            is_new = not missing.isdisjoint(each.name for each in blobs[place:last])
            if is_new or last == len(blobs):
                yield "SET", keys.path(blob.name), packed(blobs[:last]), "EX", keys.seconds
            if is_new or now - self._told_at.get(blob.name, -keys.seconds) > keys.seconds / TOLD_SHARE:
                chain = chain or self._chain(path)
                size = chain.block_size
                for border in borders(blob.start, blob.end, size):
                    if border // size <= len(chain.hashes) and border <= path.left_at[blob.name]:
                        yield "SET", keys.block(chain.hashes[border // size - 1]), blob.name, "EX", keys.seconds
                named_at[blob.name] = now

    def _chain(self, path: SendPath) -> HashChain:
        runs = [path.heads[each.name].tokens.part(each.start, path.left_at[each.name]) for each in path.segments]
        partition = partition_of_first(path.segments[0].parent)
        return self._hasher.start(partition or "").extended(join(runs))

    def _run(self, link: Link, commands: Sequence[Command] | Iterator[Command]) -> list[Reply]:
        """Raises LinkFailed."""
        replies = link.run(list(commands), time.monotonic() + SEND_SECONDS)
        for reply in replies:
            if isinstance(reply, LinkRefusal):
                self._server.is_refused(reply)
                raise NoPath
        return replies


def _note[T](told: dict[BlobName, T], name: BlobName, what: T) -> None:
    if len(told) >= MAX_TOLD:
        told.clear()
    told[name] = what


def _is_row(blob: RemoteBlob) -> bool:
    return blob.kind == "segment"
