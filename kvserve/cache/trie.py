"""The shape of the tree: nodes, splits, merges and the index over block hashes. It knows no bytes and no policy.

root -- [0, 40) -- [40, 64) -- [64, 90)        a node is the tokens [start, end) that follow its parent's;
             `---- [40, 55)                    its rows are a range of a record, so a split copies nothing
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.node import Changes, Copies, Entries, Lease, Node, Position
from kvserve.cache.records import BoundaryKind, RecordId, Segment
from kvserve.cache.token_run import TokenRun, common_end, join


class Trie:
    """All nodes, the holders of each record, the entries and the `index`, from each block's hash to the node in whose
    range the block ends; others read these. `version` counts the changes of shape.
    The sweep reads `changed`: nodes that a request released or that became its entry. The eviction order, if there is
    one, reads `changes`."""

    def __init__(self, *, use_index: bool, is_ranked: bool = False) -> None:
        self._use_index = use_index
        self.index: dict[bytes, Node] = {}
        self._roots: dict[str, Node] = {}
        self.holders: dict[RecordId, dict[Node, None]] = {}
        self.changed: dict[Node, None] = {}
        self.changes = Changes(is_noted=is_ranked)
        self.entries = Entries()
        self.version = 0
        self.num_collisions = 0
        self._num_attached = 0

    def root(self, partition: str) -> Node:
        """The root of a partition's sequences."""
        if partition not in self._roots:
            self._roots[partition] = Node(None, 0, 0, None, partition=partition)
        return self._roots[partition]

    def prune(self) -> None:
        """Drop partitions without nodes and leases: every user who asks once makes one."""
        for root in self.roots():
            self.prune_root(root)

    def prune_root(self, root: Node) -> None:
        """Drop this one if it has neither."""
        if not (root.children or root.leases) and self._roots.get(root.partition) is root:
            del self._roots[root.partition]
            self.version += 1  # a lookup may have found this root

    def roots(self) -> list[Node]:
        """One root per partition that was ever asked for."""
        return list(self._roots.values())

    def is_held(self, node: Node) -> bool:
        """Whether a node is still part of the tree."""
        return node.segment is not None and node in self.holders.get(node.segment.record_id, ())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        for root in reversed(self.roots()):
            yield from root.descendants()

    def forget_copies(self) -> None:
        """Forget all copies: there is another tier now, which has none."""
        for node in self.nodes():
            node.copies = Copies()

    def clear(self) -> None:
        """Remove everything."""
        for node in self.nodes():
            self.changes.note_gone(node)
        self.entries.clear()
        self.index.clear()
        self._roots.clear()
        self.holders.clear()
        self.changed.clear()
        self.version += 1

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, root: Node, run: TokenRun, chain: HashChain, known: Position | None = None) -> Position:
        """The deepest position whose tokens begin `run`, every token compared. Tokens up to `known`, a position below
        `root` that may have been removed or split since, were compared before."""
        start = self.still_there(known) if known is not None else None
        if start is None and self._use_index:
            start = self._by_hash(root, run, chain)
        return self.walk(start or Position(root, 0), run, run.end)

    def still_there(self, known: Position) -> Position | None:
        """What is left of an earlier position: while a node is held, the path to it never changes, nor do its tokens up
        to its first split."""
        node: Node | None = known.node if self.is_held(known.node) else None
        while node is not None and node.start >= known.depth:
            node = node.parent
        if node is None or node.parent is None:
            return None
        return Position(node, int(min(known.depth, node.end, node.first_cut)))

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
        num_blocks = bisect_left(chain.hashes, True, key=lambda name: name not in self.index)
        if not num_blocks:
            return None
        node, depth = self.index[chain.hashes[num_blocks - 1]], num_blocks * chain.block_size
        if node.start < depth <= node.end and self._is_prefix(root, node, run, depth):
            return Position(node, depth)
        self.num_collisions += 1
        return None

    def _is_prefix(self, root: Node, node: Node, run: TokenRun, depth: int) -> bool:
        path = node.path()
        if path[0].parent is not root:
            return False
        for step in path:
            stop = min(step.end, depth)
            if common_end(step.tokens, run, step.start, stop) != stop:
                return False
        return True

    # --- changing the shape -------------------------------------------------------------------------------------------

    def attach(self, parent: Node, segment: Segment, hashes: tuple[bytes, ...]) -> Node:
        """A new leaf for a whole segment, whose tokens begin where `parent` ends."""
        tokens = segment.tokens
        self._num_attached += 1
        node = Node(parent, tokens.start, tokens.end, segment, hashes, number=self._num_attached)
        parent.children[tokens.key_at(tokens.start)] = node
        self.holders.setdefault(segment.record_id, {})[node] = None
        self._point(hashes, node)
        self.num_collisions += len(hashes) - len(set(hashes))
        self.changes.note(parent)
        self.changes.note(node)
        self.version += 1
        return node

    def split(self, node: Node, at: int, block_size: int) -> None:
        """Split a node: it keeps `[start, at)`, a new child gets the rest and all that belongs to the end."""
        num_hashes = at // block_size - node.start // block_size
        lower = Node(node, at, node.end, node.segment, node.hashes[num_hashes:], node.children, number=node.number)
        lower.checkpoint, lower.kind = node.checkpoint, node.kind
        self.entries.move(node, lower)
        lower.last_used_at, lower.num_uses = node.last_used_at, node.num_uses
        lower.restored_at, lower.num_restores = node.restored_at, node.num_restores
        lower.is_guess = node.is_guess
        lower.copies, node.copies = node.copies, Copies(node.copies.rows)
        lower.users = {user: depth for user, depth in node.users.items() if depth > at}
        node.users = {user: depth for user, depth in node.users.items() if depth <= at}
        for child in lower.children.values():
            child.parent = lower
        for lease in [lease for lease in node.leases if lease.num_tokens > at]:
            self.move(lease, Position(lower, lease.num_tokens))
        node.first_cut = min(node.first_cut, at)
        node.end, node.hashes, node.children = at, node.hashes[:num_hashes], {node.tokens.key_at(at): lower}
        node.checkpoint = node.kind = None
        node.num_uses = node.num_restores = 0
        if node.segment is not None:
            self.holders[node.segment.record_id][lower] = None
        self._point(lower.hashes, lower, instead_of=node)
        if node in self.changed:
            self.changed[lower] = None
        self.changes.note_cut(node, lower)
        self.version += 1

    def merge(self, node: Node) -> None:
        """Join a node with its only child, which holds the following rows of the same record."""
        (lower,) = node.children.values()
        node.end, node.children = lower.end, lower.children
        for child in node.children.values():
            child.parent = node
        node.checkpoint, node.kind = lower.checkpoint, lower.kind
        self.entries.move(lower, node)
        node.restored_at, node.num_restores = lower.restored_at, lower.num_restores
        is_known = node.copies.rows and lower.copies.rows
        rows = dict.fromkeys((*node.copies.rows, *lower.copies.rows)) if is_known else ()
        node.copies = Copies(tuple(rows), lower.copies.state)
        node.inherit(lower)
        lower.parent = None
        for lease in list(lower.leases):
            self.move(lease, Position(node, lease.num_tokens))
        self._point(lower.hashes, node, instead_of=lower)
        node.hashes += lower.hashes
        if node.segment is not None:
            del self.holders[node.segment.record_id][lower]
        if lower in self.changed:
            self.changed[node] = None
        self.changes.note_gone(lower, node)
        self.changes.note(node)
        self.version += 1

    def detach(self, leaf: Node) -> Segment:
        """Remove a leaf without leases; returns its segment."""
        if leaf.parent is None or leaf.children or leaf.leases or leaf.segment is None:
            raise ValueError("Only a leaf without leases can be removed.")
        del leaf.parent.children[leaf.tokens.key_at(leaf.start)]
        leaf.parent.inherit(leaf)
        self.entries.set(leaf, None)
        self.changes.note_gone(leaf)
        self.changes.note_parted(leaf.parent)
        for name in leaf.hashes:
            if self.index.get(name) is leaf:
                del self.index[name]
        self._unhold(leaf, leaf.segment)
        self.version += 1
        return leaf.segment

    def rename(self, leases: Iterable[Lease], hasher: BlockHasher) -> None:
        """Name all blocks, those of leases too, as `hasher` does, which has the same block size: the fingerprint of the
        model became known after the first prefixes were stored."""
        for leaf in [node for node in self.nodes() if not node.children]:
            chain = _chain_to(leaf, hasher)
            for node in leaf.path():
                first, last = node.start // hasher.block_size, node.end // hasher.block_size
                node.hashes = chain.hashes[first:last]
        for lease in leases:
            lease.chain = _chain_to(lease.node, hasher).truncated(lease.num_tokens)
        self.index.clear()
        for node in self.nodes():
            self._point(node.hashes, node)
        self.version += 1

    def rehold(self, node: Node, segment: Segment) -> None:
        """Give a node another record that has its tokens."""
        if node.segment is not None:
            self._unhold(node, node.segment)
        node.segment = segment
        self.holders.setdefault(segment.record_id, {})[node] = None
        if not node.children:
            self.changes.note(node)
        self.version += 1

    def move(self, lease: Lease, position: Position) -> None:
        """Move a lease to another position."""
        self.drop_lease(lease)
        lease.node, lease.num_tokens = position.node, position.depth
        position.node.leases.add(lease)

    def use(self, lease: Lease, now: float, num_uses: int = 1) -> None:
        """Note that a request uses the path of its lease."""
        if (above := lease.touch(now, num_uses)) is not None:
            self.changes.note_parted(above)

    def mark(self, node: Node, kind: BoundaryKind) -> None:
        """Note why requests stop at a node's end. The end of system and tools stays marked as that."""
        if node.kind != "system":
            node.kind = kind
            if kind == "system":
                self.changes.note_anchor(node)

    def drop_lease(self, lease: Lease) -> None:
        """Take a lease off its node."""
        lease.node.leases.discard(lease)
        self.changes.note(lease.node)

    def _unhold(self, node: Node, segment: Segment) -> None:
        holders = self.holders[segment.record_id]
        del holders[node]
        if not holders:
            del self.holders[segment.record_id]

    def _point(self, hashes: tuple[bytes, ...], node: Node, instead_of: Node | None = None) -> None:
        for name in hashes:
            holder = self.index.setdefault(name, node)
            if holder is instead_of:
                self.index[name] = node
            elif holder is not node:
                self.num_collisions += 1


def _chain_to(last: Node, hasher: BlockHasher) -> HashChain:
    """The names of the whole blocks up to the end of a node."""
    chain, path = hasher.start(last.root().partition), last.path()
    return chain.extended(join([node.tokens.part(node.start, node.end) for node in path])) if path else chain
