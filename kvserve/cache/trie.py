"""The shape of the tree: nodes, splits, merges and the index over block hashes. It knows no bytes and no policy.

root -- [0, 40) -- [40, 64) -- [64, 90)        a node is the tokens [start, end) that follow its parent's;
             `---- [40, 55)                    its rows are a range of a record, so a split copies nothing
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvserve.cache.block_hash import HashChain
from kvserve.cache.records import BoundaryKind, Checkpoint, Copy, RecordId, Segment
from kvserve.cache.token_run import TokenKey, TokenRun, common_end

MAX_USERS = 64
"""So many are remembered of those who used the same tokens, the last ones. What many share goes with the last of them:
whoever is not remembered any more cannot be told apart from those who are, and what only one used has only one."""


def note_use(users: dict[str, int], user: str, depth: int) -> str | None:
    """A user came `depth` tokens far, on its own way: noted as the newest of these. Whom there is no place for then."""
    users[user] = max(depth, users.pop(user, 0))
    if len(users) <= MAX_USERS:
        return None
    oldest = next(iter(users))
    del users[oldest]
    return oldest


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """A row ended here: one entry of its owner's, last at `ended_at`. `ttl_seconds` None means the general limit."""

    owner: str | None
    ttl_seconds: float | None
    ended_at: float


@dataclass(slots=True, eq=False)
class Copies:
    """What another tier has, or will have, of one node: the copies that cover its rows together (none: not all of them
    are known there), and that of its state. That tier notes them; one that it forgets says so itself."""

    rows: tuple[Copy, ...] = ()
    state: Copy | None = None


@dataclass(slots=True, eq=False)
class Node:
    """The tokens `[start, end)` behind `parent`; `checkpoint`, `kind` and `sequence_end` belong to its end.

    A use is a row that went through here, a restore one that began at its end (or ended there, and may go on).
    `hashes` name the blocks that end in `(start, end]`. Children differ in their first token. `partition` is a root's.
    `users` says who used these tokens, and up to which offset; rows of which that is not known are not in it.
    `is_guess`: computed, or read from disk, ahead of requests; none has used it.
    """

    parent: "Node | None"
    start: int
    end: int
    segment: Segment | None
    hashes: tuple[bytes, ...] = ()
    children: dict[TokenKey, "Node"] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    kind: BoundaryKind | None = None
    sequence_end: SequenceEnd | None = None
    leases: set["Lease"] = field(default_factory=set)
    last_used_at: float = 0.0
    num_uses: int = 0
    restored_at: float = 0.0
    num_restores: int = 0
    partition: str = ""
    users: dict[str, int] = field(default_factory=dict)
    is_guess: bool = False
    copies: Copies = field(default_factory=Copies)

    @property
    def tokens(self) -> TokenRun:
        """A run that covers this node's tokens (and maybe its record's others)."""
        if self.segment is None:
            raise ValueError("The root has no tokens.")
        return self.segment.tokens

    def path(self) -> list["Node"]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node


@dataclass(slots=True, eq=False)
class Lease:
    """A live row's hold on the path of its first `num_tokens` tokens, which end in `node`. Changed by the tree only.

    `owner` is whose entry it becomes, `user` who asks ("": not known); of a guess nobody asks yet. `chain` names the
    row's whole blocks so far. A lease is detached once its path is gone: released, or all cleared.
    """

    node: Node
    num_tokens: int
    chain: HashChain
    owner: str | None
    ttl_seconds: float | None
    user: str = ""
    is_guess: bool = False
    is_detached: bool = False

    def touch(self, now: float, num_uses: int = 1) -> None:
        """Note on the path that the row used it; a guess is no use, but for whom its tokens are stays known."""
        node = self.node
        while node.parent is not None:
            if self.user:
                note_use(node.users, self.user, min(self.num_tokens, node.end))
            if not self.is_guess:
                node.last_used_at, node.is_guess = now, False
                node.num_uses += num_uses
            node = node.parent


@dataclass(frozen=True, slots=True)
class Position:
    """A place on the tree: `depth` tokens from the root, `node.start <= depth <= node.end`."""

    node: Node
    depth: int


class Trie:
    """All nodes, the holders of each record and the block index. `version` counts the changes of shape."""

    def __init__(
        self,
        *,
        use_index: bool,
        verify: Callable[[TokenRun, TokenRun, int, int], int] = common_end,
    ) -> None:
        self._use_index = use_index
        self._verify = verify
        self._index: dict[bytes, Node] = {}
        self._roots: dict[str, Node] = {}
        self.holders: dict[RecordId, list[Node]] = {}
        self.version = 0
        self.num_nodes = 0
        self.num_collisions = 0

    @property
    def index(self) -> dict[bytes, Node]:
        """Block hash -> the node in whose range the block ends; to be read only."""
        return self._index

    def root(self, partition: str) -> Node:
        """The root of a partition's sequences."""
        if partition not in self._roots:
            self._roots[partition] = Node(None, 0, 0, None, partition=partition)
        return self._roots[partition]

    def prune(self) -> None:
        """Forget the partitions that hold nothing and that nobody stands in: those who ask once are many."""
        for partition in [name for name, root in self._roots.items() if not (root.children or root.leases)]:
            del self._roots[partition]
            self.version += 1  # a lookup may have found this root

    def roots(self) -> list[Node]:
        """One root per partition that was ever asked for."""
        return list(self._roots.values())

    def is_held(self, node: Node) -> bool:
        """Whether a node is still part of the tree."""
        return node.segment is not None and node in self.holders.get(node.segment.record_id, ())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            if node.parent is not None:
                yield node

    def forget_copies(self) -> None:
        """There is another tier now, which has nothing of this."""
        for node in self.nodes():
            node.copies = Copies()

    def clear(self) -> None:
        """Forget everything."""
        self._index.clear()
        self._roots.clear()
        self.holders.clear()
        self.num_nodes = 0
        self.version += 1

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, root: Node, run: TokenRun, chain: HashChain) -> Position:
        """The deepest place whose tokens are the first ones of `run`, every token compared."""
        start = self._by_hash(root, run, chain) if self._use_index else None
        return self.walk(start or Position(root, 0), run, run.end)

    def walk(self, position: Position, run: TokenRun, limit: int) -> Position:
        """Go down from `position` as long as the tokens of `run` agree, at most to `limit`."""
        node, depth = position.node, position.depth
        while True:
            stop = min(node.end, limit)
            if depth < stop:
                depth = common_end(node.tokens, run, depth, stop)
            if depth < node.end or depth == limit:
                return Position(node, depth)
            child = self._child(node, run, depth)
            if child is None:
                return Position(node, depth)
            node = child

    def _child(self, node: Node, run: TokenRun, depth: int) -> Node | None:
        if self._use_index:
            return node.children.get(run.key_at(depth))
        return next((c for c in node.children.values() if common_end(c.tokens, run, depth, depth + 1) > depth), None)

    def _by_hash(self, root: Node, run: TokenRun, chain: HashChain) -> Position | None:
        """Jump to the deepest indexed block; None where nothing is indexed or a hash lied.

        The ancestors of an indexed block are indexed too, hence the bisection.
        """
        low, high = 0, len(chain.hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if chain.hashes[middle - 1] in self._index:
                low = middle
            else:
                high = middle - 1
        if not low:
            return None
        node, depth = self._index[chain.hashes[low - 1]], low * chain.block_size
        if node.start < depth <= node.end and self._is_prefix(root, node, run, depth):
            return Position(node, depth)
        self.num_collisions += 1
        return None

    def _is_prefix(self, root: Node, node: Node, run: TokenRun, depth: int) -> bool:
        if node.root() is not root:
            return False
        stops = ((step, min(step.end, depth)) for step in node.path())
        return all(self._verify(step.tokens, run, step.start, stop) == stop for step, stop in stops)

    # --- changing the shape -------------------------------------------------------------------------------------------

    def attach(self, parent: Node, segment: Segment, hashes: tuple[bytes, ...]) -> Node:
        """A new leaf for a whole segment, whose tokens begin where `parent` ends."""
        tokens = segment.tokens
        node = Node(parent, tokens.start, tokens.end, segment, hashes)
        parent.children[tokens.key_at(tokens.start)] = node
        self.holders.setdefault(segment.record_id, []).append(node)
        self._point(hashes, node)
        self.num_collisions += len(hashes) - len(set(hashes))
        self._changed(+1)
        return node

    def split(self, node: Node, at: int, block_size: int) -> None:
        """Cut a node in two: it keeps `[start, at)`, a new child gets the rest and all that belongs to the end."""
        num_hashes = at // block_size - node.start // block_size
        lower = Node(node, at, node.end, node.segment, node.hashes[num_hashes:], node.children)
        lower.checkpoint, lower.kind, lower.sequence_end = node.checkpoint, node.kind, node.sequence_end
        lower.last_used_at, lower.num_uses = node.last_used_at, node.num_uses
        lower.restored_at, lower.num_restores = node.restored_at, node.num_restores
        lower.is_guess = node.is_guess
        lower.copies, node.copies = node.copies, Copies(node.copies.rows)
        lower.users = {user: depth for user, depth in node.users.items() if depth > at}
        node.users = {user: min(depth, at) for user, depth in node.users.items()}
        for child in lower.children.values():
            child.parent = lower
        for lease in [lease for lease in node.leases if lease.num_tokens > at]:
            self.move(lease, Position(lower, lease.num_tokens))
        node.end, node.hashes, node.children = at, node.hashes[:num_hashes], {node.tokens.key_at(at): lower}
        node.checkpoint = node.kind = node.sequence_end = None
        node.num_restores = 0
        if node.segment is not None:
            self.holders[node.segment.record_id].append(lower)
        self._point(lower.hashes, lower, instead_of=node)
        self._changed(+1)

    def merge(self, node: Node) -> None:
        """Join a node with its only child, which holds the following rows of the same record."""
        (lower,) = node.children.values()
        node.end, node.children = lower.end, lower.children
        for child in node.children.values():
            child.parent = node
        node.checkpoint, node.kind, node.sequence_end = lower.checkpoint, lower.kind, lower.sequence_end
        node.restored_at, node.num_restores = lower.restored_at, lower.num_restores
        is_known = node.copies.rows and lower.copies.rows
        rows = dict.fromkeys((*node.copies.rows, *lower.copies.rows)) if is_known else ()
        node.copies = Copies(tuple(rows), lower.copies.state)
        for user, depth in lower.users.items():
            note_use(node.users, user, depth)
        lower.parent = None
        for lease in list(lower.leases):
            self.move(lease, Position(node, lease.num_tokens))
        self._point(lower.hashes, node, instead_of=lower)
        node.hashes += lower.hashes
        if node.segment is not None:
            self.holders[node.segment.record_id].remove(lower)
        self._changed(-1)

    def detach(self, leaf: Node) -> None:
        """Take a leaf without leases out."""
        if leaf.parent is None or leaf.children or leaf.leases or leaf.segment is None:
            raise ValueError("Only a leaf that nobody stands on can leave.")
        del leaf.parent.children[leaf.tokens.key_at(leaf.start)]
        for name in leaf.hashes:
            if self._index.get(name) is leaf:
                del self._index[name]
        self._let_go(leaf, leaf.segment)
        self._changed(-1)

    def index_anew(self) -> None:
        """The nodes have other names now."""
        self._index.clear()
        for node in self.nodes():
            self._point(node.hashes, node)
        self.version += 1

    def rehold(self, node: Node, segment: Segment) -> None:
        """Give a node another record that has its tokens."""
        if node.segment is not None:
            self._let_go(node, node.segment)
        node.segment = segment
        self.holders.setdefault(segment.record_id, []).append(node)
        self.version += 1

    def move(self, lease: Lease, position: Position) -> None:
        """Let a lease stand elsewhere."""
        lease.node.leases.discard(lease)
        lease.node, lease.num_tokens = position.node, position.depth
        position.node.leases.add(lease)

    def _let_go(self, node: Node, segment: Segment) -> None:
        holders = self.holders[segment.record_id]
        holders.remove(node)
        if not holders:
            del self.holders[segment.record_id]

    def _point(self, hashes: tuple[bytes, ...], node: Node, instead_of: Node | None = None) -> None:
        for name in hashes:
            holder = self._index.setdefault(name, node)
            if holder is instead_of:
                self._index[name] = node
            elif holder is not node:
                self.num_collisions += 1

    def _changed(self, num_nodes: int) -> None:
        self.num_nodes += num_nodes
        self.version += 1
