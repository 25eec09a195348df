"""A look into the shared cache: what it has of a prompt, in a few exchanges whatever the length. It reads no payload.

deepest known block, coarse, then fine -> path to its blob -> what our own tokens prove of it -> what is whole
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.cache.block_hash import HashChain
from kvserve.cache.disk_blob import BlobHead, BlobName, DamagedBlob, parent_of_first, read_head
from kvserve.cache.remote_keys import COARSE_BLOCKS, RemoteKeys, num_parts
from kvserve.cache.remote_path import RemoteBlob, StrangePath, unpacked, used_ends
from kvserve.cache.token_run import TokenRun, common_end
from kvserve.remote.redis_link import Command, Link, Reply

KEYS_AT_ONCE = 1024
MAX_TRIES = 3
"""So many index entries are followed whose blob is gone."""

HEAD_BYTES = 65536


@dataclass(frozen=True, slots=True)
class RemoteFound:
    """What is there of a prompt: the blobs on its path, and up to where they hold our tokens. `are_strange`: something
    on the way was not what it should be."""

    path: tuple[RemoteBlob, ...] = ()
    common: int = 0
    are_strange: bool = False


def look(
    link: Link, keys: RemoteKeys, model: str, run: TokenRun, chain: HashChain, known: int, until: float
) -> RemoteFound:
    """What is there of a prompt beyond `known` tokens. Raises LinkFailed."""
    is_strange = False
    for name in _candidates(link, keys, chain, known, until)[:MAX_TRIES]:
        [data] = link.run([("GET", keys.path(name))], until)
        if data is None:
            continue
        try:
            path, common = _proved(link, keys, model, run, chain.partition, unpacked(data), until)
        except StrangePath:
            is_strange = True
            continue
        if path := _whole(link, keys, path, until):
            return RemoteFound(tuple(path), min(common, _end_of(path, common)), is_strange)
    return RemoteFound(are_strange=is_strange)


def _end_of(path: Sequence[RemoteBlob], common: int) -> int:
    return max((min(each.end, common) for each in path if each.kind == "segment"), default=0)


def _candidates(link: Link, keys: RemoteKeys, chain: HashChain, known: int, until: float) -> list[str]:
    """The blobs that the index names, for the deepest block first."""
    size, num_blocks = chain.block_size, len(chain.hashes)
    step = size * COARSE_BLOCKS
    coarse = list(range((known // step + 1) * step, num_blocks * size + 1, step))
    found = _names_at(link, keys, chain, coarse, until)
    deepest = max(found, default=known // step * step)
    fine = list(range(deepest + size, min(deepest + step, num_blocks * size) + 1, size))
    found |= _names_at(link, keys, chain, [border for border in fine if border > known], until)
    return list(dict.fromkeys(found[border] for border in sorted(found, reverse=True)))


def _names_at(link: Link, keys: RemoteKeys, chain: HashChain, offsets: list[int], until: float) -> dict[int, str]:
    groups = [offsets[first : first + KEYS_AT_ONCE] for first in range(0, len(offsets), KEYS_AT_ONCE)]
    size = chain.block_size
    asked: list[Command] = [("MGET", *(keys.block(chain.hashes[at // size - 1]) for at in group)) for group in groups]
    replies = link.run(asked, until)
    found: dict[int, str] = {}
    for group, reply in zip(groups, replies, strict=True):
        names: Sequence[Reply] = reply if isinstance(reply, list) else []
        for at, name in zip(group, names, strict=False):
            if isinstance(name, bytes) and len(name) == 40 and name.isalnum():
                found[at] = name.decode("ascii", "replace")
    return found


def _proved(
    link: Link,
    keys: RemoteKeys,
    model: str,
    run: TokenRun,
    partition: str,
    path: list[RemoteBlob],
    until: float,
) -> tuple[list[RemoteBlob], int]:
    """The part of a path that our tokens are on, and up to where. Where they leave a blob in its middle, its own head
    tells. Raises StrangePath or LinkFailed."""
    left_at = used_ends(path)
    heads = _heads(link, keys, model, run, [each for each in path if each.kind == "segment"], until)
    kept, common, parent = list[RemoteBlob](), 0, parent_of_first(partition)
    for blob in path:
        if blob.kind == "checkpoint":
            stands = blob.parent == parent and blob.start <= min(common, left_at.get(BlobName(parent), 0))
            kept += [blob] if stands and blob.proved(model, run) is not None else []
            continue
        head = heads[blob.name]
        if blob.parent != parent or head is None or blob.start > common:
            break
        limit = min(blob.end, run.end)
        end = common_end(head.tokens, run, blob.start, limit) if blob.start < limit else blob.start
        if end == blob.start:
            break
        kept.append(blob)
        common, parent = end, blob.name
        if end < left_at[blob.name]:
            break
    return kept, common


def _heads(
    link: Link, keys: RemoteKeys, model: str, run: TokenRun, segments: list[RemoteBlob], until: float
) -> dict[BlobName, BlobHead | None]:
    """The head of each blob: from our own tokens, else from its file. Each gives the blob's name."""
    heads = {each.name: each.proved(model, run) for each in segments}
    asked = [each for each in segments if heads[each.name] is None and each.start < run.end]
    num_bytes = {each.name: HEAD_BYTES for each in asked}
    for _ in range(2):
        ranges = [(keys.part(each.name, 0), num_bytes[each.name] - 1) for each in asked]
        replies = link.run([("GETRANGE", key, 0, last) for key, last in ranges], until)
        again = []
        for each, data in zip(asked, replies, strict=True):
            head = _head_in(data, each, model)
            if isinstance(head, int):
                num_bytes[each.name] = head
                again.append(each)
            else:
                heads[each.name] = head
        asked = again
    return heads


def _head_in(data: Reply, blob: RemoteBlob, model: str) -> BlobHead | int | None:
    """Raises StrangePath for what is no head of this name."""
    if not isinstance(data, bytes) or not data:
        return None
    try:
        head = read_head(data, blob.name)
    except DamagedBlob as error:
        raise StrangePath(str(error)) from error
    if isinstance(head, int):
        return head if head > len(data) else None
    said = model, blob.parent, blob.start, blob.end
    return head if (head.model, head.parent, head.tokens.start, head.tokens.end) == said else None


def _whole(link: Link, keys: RemoteKeys, path: list[RemoteBlob], until: float) -> list[RemoteBlob]:
    """The path up to the first blob of which parts are gone. That it was looked at makes it young."""
    replies = link.run([("TOUCH", *keys.parts(each.name, each.num_bytes)) for each in path], until)
    kept = list[RemoteBlob]()
    for blob, num_there in zip(path, replies, strict=True):
        if num_there == num_parts(blob.num_bytes):
            kept.append(blob)
        elif blob.kind == "segment":
            break
    return kept
