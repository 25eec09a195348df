"""The trie of blobs and the paths on it: where a prefix ends, the last state on it, the hashes of its blocks, what
serves only this prefix, what others would lose with it, and where blobs are whose tokens are known from others. No
files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.disk_blob import BlobHead, BlobName
from kvserve.cache.disk_records import BlobStep, Entry
from kvserve.cache.forget_users import IsForgotten, is_needed, remaining
from kvserve.cache.node import Node, Position
from kvserve.cache.records import Copy, RecordId
from kvserve.cache.token_run import ID_BYTES, TokenRun, image_around, join
from kvserve.cache.trie import Trie
from kvserve.core import ImageSpan, TokenSequence


@dataclass(slots=True)
class _Alias:
    """Such a blob, and the position behind its last token when that was looked for last."""

    head: BlobHead
    end: Position


class Aliases:
    """Blobs whose tokens are known from other blobs already, with their positions: another server wrote the same prefix
    in pieces of its own. They serve no request, but other blobs have them as parents. The caller holds the index's
    lock."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._aliases: dict[BlobName, _Alias] = {}

    def add(self, head: BlobHead, end: Position) -> None:
        """Note that a blob's tokens end at this position."""
        self._aliases[head.name] = _Alias(head, end)

    def place(self, name: BlobName, offset: int) -> Position | None:
        """The position behind `offset` tokens, which is inside this blob; None where its path is not known any more."""
        alias = self._aliases.get(name)
        if alias is None or not alias.head.tokens.start < offset <= alias.head.tokens.end:
            return None
        position = self._trie.still_there(alias.end)
        if position is None or position.depth < alias.head.tokens.start:
            return None
        node, depth = position.node, min(position.depth, offset)
        while node.parent is not None and node.start >= depth:
            node = node.parent
        found = self._trie.walk(Position(node, depth), alias.head.tokens, offset)
        return found if found.depth == offset else None

    def state_place(self, name: str) -> Position | None:
        """The position of a state where another server's is known."""
        alias = self._aliases.get(BlobName(name))
        position = self._trie.still_there(alias.end) if alias is not None else None
        is_there = alias is not None and position is not None and position.depth == alias.head.tokens.start
        return position if is_there else None

    def head(self, name: str) -> BlobHead | None:
        """An alias's head."""
        alias = self._aliases.get(BlobName(name))
        return alias.head if alias is not None else None

    def parents(self, name: str) -> Iterator[BlobName]:
        """This blob, if it is an alias, and the aliases among its ancestors."""
        while (alias := self._aliases.get(BlobName(name))) is not None:
            yield alias.head.name
            name = alias.head.parent

    def forget(self, name: BlobName) -> None:
        """Forget an alias."""
        self._aliases.pop(name, None)

    def lost(self) -> list[BlobName]:
        """Forget the aliases whose tokens are not known to their end any more; returns their names."""
        lost = [name for name, each in self._aliases.items() if not self._is_whole(each.head)]
        for name in lost:
            del self._aliases[name]
        return lost

    def _is_whole(self, head: BlobHead) -> bool:
        if head.kind == "checkpoint":
            return self.state_place(head.name) is not None
        return self.place(head.name, head.tokens.end) is not None

    def clear(self) -> None:
        """Forget everything."""
        self._aliases.clear()


MAX_NODES_BEHIND_STATE = 4
"""The last state before a position is looked for on so many nodes; above them it is known from when the blob was
added."""


class BlobPaths:
    """The known blobs on a trie. The caller holds the index's lock, and owns the content."""

    def __init__(self) -> None:
        self.trie = Trie(use_index=True)
        self.entries: dict[RecordId, Entry] = {}

    def find(self, run: TokenRun, chain: HashChain, above: Sequence[Copy] = ()) -> Position:
        root = self.trie.root(chain.partition)
        if run.start == 0:
            return self.trie.find(root, run, chain.truncated(run.end))
        start = self.inside(above, run.start)
        return self.trie.walk(start, run, run.end) if start is not None else Position(root, 0)

    def inside(self, rows: Sequence[Copy], offset: int) -> Position | None:
        """The position behind `offset` tokens of a prefix: in the last one of its blobs that begins before it."""
        entry = next((each for each in reversed(rows) if isinstance(each, Entry) and each.start < offset), None)
        if entry is None or entry.is_forgotten:
            return None
        holders = self.trie.holders.get(entry.record_id, ())
        return next((Position(node, offset) for node in holders if node.start < offset <= node.end), None)

    def steps(self, position: Position, start: int = 0) -> Iterator[BlobStep]:
        """The steps of the path to a position, from the first that ends behind `start`."""
        nodes, above = list[Node](), position.node
        while above.parent is not None and above.end > start:
            nodes.append(above)
            above = above.parent
        for node in reversed(nodes):
            end = min(node.end, position.depth)
            state = self.entries[node.checkpoint.record_id] if node.checkpoint is not None and end == node.end else None
            yield BlobStep(self.entry_of(node), node.start, end, state)

    def entry_of(self, node: Node) -> Entry:
        if node.segment is None:
            raise ValueError("The root is no blob.")
        return self.entries[node.segment.record_id]

    def last_state(self, position: Position, limit: int) -> tuple[Entry | None, int]:
        """The last state on the path to a position that ends before `limit`, and where; None and 0 where there is none.

        Above a few nodes it is not looked for: it is where it was when the last of these nodes was added.
        """
        node = below = position.node
        for _ in range(MAX_NODES_BEHIND_STATE):
            if node.parent is None:
                return None, 0
            if node.checkpoint is not None and node.end < limit:
                return self.entries[node.checkpoint.record_id], node.end
            below, node = node, node.parent
        return None, self.entry_of(below).state_end


def serving_only(trie: Trie, entry_of: Callable[[Node], Entry], position: Position, start: int) -> list[RecordId]:
    """The records that serve only the path to a position, from its end up to a branch or to the end of system and
    tools, and begin at `start` or behind it: states, and segments that no other node has. None where known tokens
    follow the position."""
    node, tail = position.node, list[Node]()
    while node.parent is not None and len(node.children) == bool(tail) and node.start >= start:
        entry = entry_of(node)
        if position.depth < node.end or (node.end == entry.head.tokens.end and entry.is_anchor):
            break
        tail.append(node)
        node = node.parent
    states = [node.checkpoint.record_id for node in tail if node.checkpoint is not None]
    rows = dict.fromkeys(entry_of(node).record_id for node in tail)
    return [*states, *(each for each in rows if set(trie.holders[each]) <= set(tail))]


def hashes_at(hasher: BlockHasher, position: Position, tokens: TokenRun) -> tuple[bytes, ...]:
    """The hashes of the blocks that end inside `tokens`, which follow `position`."""
    size = hasher.block_size
    border = position.depth // size * size
    chain, before = hasher.start(position.node.root().partition), [tokens]
    node: Node | None = position.node
    while node is not None and node.parent is not None:
        if node.start < position.depth and node.end > border:
            before.append(node.tokens.part(max(node.start, border), min(node.end, position.depth)))
        if node.start < border <= node.end:
            chain = HashChain(size, node.hashes[border // size - node.start // size - 1], (), hasher.digest)
            break
        node = node.parent
    return chain.extended(_shifted(join(before[::-1]), border)).hashes


def _shifted(run: TokenRun, by: int) -> TokenRun:
    """The same tokens `by` places earlier: block hashes depend on what comes before, not on the offset."""
    images = tuple(ImageSpan(span.start - by, span.end - by, span.digest) for span in run.images)
    if run.start < by or len(run.ids) % ID_BYTES:
        raise ValueError("Tokens before the border cannot be hashed.")
    return TokenRun(run.start - by, run.ids, images)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of a partition that `users`, who are not forgotten, used up to these offsets."""

    tokens: TokenSequence
    partition: str
    users: Mapping[str, int]


def shared_prefixes(
    trie: Trie, users_of: Callable[[Node], dict[str, int]], is_forgotten: IsForgotten
) -> list[SharedPrefix]:
    """The longest prefixes that other users have in deleted blobs; `users_of` gives the users of a node's blob.

    blob of one    |-----------------------------|      is deleted, as only that user came to its end
    others               |----- blob             |      has it as its parent: what they used is to be written anew
    """
    users: dict[Node, dict[str, int]] = {}
    deleted: set[Node] = set()
    for node in trie.nodes():  # parents before children
        staying = remaining(users_of(node), is_forgotten)
        users[node] = {user: min(depth, node.end) for user, depth in staying.items() if depth > node.start}
        if not is_needed(staying, node.tokens.end) or node.parent in deleted:
            deleted.add(node)
    ends = (node for node in deleted if users[node] and not any(users[child] for child in node.children.values()))
    return [_shared_prefix(node, users) for node in ends]


def _shared_prefix(last: Node, users: Mapping[Node, Mapping[str, int]]) -> SharedPrefix:
    path = last.path()
    depths = {user: depth for node in path for user, depth in users[node].items()}  # the deepest of each
    run = join([node.tokens.part(node.start, node.end) for node in path])
    end = max(users[last].values())
    if (image := image_around(run.images, end)) is not None:
        end = image.start
    part = run.part(0, end)
    return SharedPrefix(
        TokenSequence(tuple(memoryview(part.ids).cast("I")), part.images), last.root().partition, depths
    )
