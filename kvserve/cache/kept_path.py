"""What the tree tells the other tier: all that is stored of a prefix, and what is about to be evicted from RAM, with
the whole path only where that tier must write it. Values, read off the tree's records; no policy and no disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.node import Copies, Lease, Node
from kvserve.cache.records import BoundaryKind, Copy, KvPiece, State
from kvserve.cache.store import Store
from kvserve.cache.token_run import TokenRun, join


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Rows of a path, with the state behind them and why they end there (`kind` None: not known). `copies` is the
    tree's own note of what the other tier has of them, for that tier to set."""

    piece: KvPiece
    state: State | None
    kind: BoundaryKind | None
    copies: Copies


@dataclass(frozen=True, slots=True)
class KeptPath:
    """All that is stored of a prefix: its tokens, the hashes of their blocks, the parts that cover them in order, and
    who used it up to which offset.

    It may be the end of a path: then `run`, `chain` and `parts` have only what follows on tokens that the other tier
    has in `above`. That tier was told the users of the first `num_told_tokens`.
    """

    run: TokenRun
    chain: HashChain
    parts: tuple[KeptPart, ...]
    users: Mapping[str, int]
    above: tuple[Copy, ...] = ()
    num_told_tokens: int = 0


def kept_path(store: Store, hasher: BlockHasher, last: Node) -> KeptPath:
    """What is stored up to the end of a node, which is no root."""
    return _path_of(store, last.path(), hasher.start(last.root().partition))


def kept_end(store: Store, hasher: BlockHasher, lease: Lease, behind: int) -> KeptPath:
    """The end of a lease's path: all that ends at or behind `behind` tokens, and before that what the other tier
    lacks."""
    nodes, above = [lease.node], lease.node.parent
    while above is not None and above.parent is not None and (above.end >= behind or not above.copies.has_rows):
        nodes.append(above)
        above = above.parent
    nodes.reverse()
    start, empty = nodes[0].start, hasher.start(lease.prompt.partition)
    chain = replace(_named_before(empty, above), num_dropped=start // hasher.block_size)
    rows = above.copies.rows if above is not None else ()
    return replace(_path_of(store, nodes, chain), above=rows, num_told_tokens=min(lease.num_told_tokens, start))


def _path_of(store: Store, nodes: Sequence[Node], before: HashChain) -> KeptPath:
    run = join([node.tokens.part(node.start, node.end) for node in nodes])
    hashes = tuple(name for node in nodes for name in node.hashes)
    parts = (KeptPart(store.piece_of(node, node.end), store.state_of(node), node.kind, node.copies) for node in nodes)
    users = {user: depth for node in nodes for user, depth in node.users.items()}  # the deepest of each
    return KeptPath(run, replace(before, hashes=hashes), tuple(parts), users)


def _named_before(empty: HashChain, node: Node | None) -> HashChain:
    """A chain that continues from the last whole block up to a node's end."""
    while node is not None and not node.hashes:
        node = node.parent
    return replace(empty, seed=node.hashes[-1]) if node is not None else empty


@dataclass(frozen=True, slots=True)
class EvictedNodes:
    """A leaf and the ancestors evicted with it or, with `is_state_only`, one node's state. `kept` builds the stored
    path to a node, which takes time in the path's length."""

    nodes: Sequence[Node]
    is_state_only: bool
    kept: Callable[[Node], KeptPath]

    @property
    def num_bytes(self) -> int:
        """The size of the record at their end: its state, or else its segment."""
        record = self.nodes[0].checkpoint or self.nodes[0].segment
        return record.num_bytes if record is not None else 0

    def path(self) -> KeptPath:
        """All that is stored up to the end of these nodes."""
        return self.kept(self.nodes[0])

    @property
    def is_copied(self) -> bool:
        """Whether the other tier has all of it, or will have it: then also its ancestors."""
        return all(copy is not None and not copy.is_forgotten for copy in self._copies())

    def unwritten(self) -> list[Copy]:
        """The copies that wait to be written."""
        copies = [copy for copy in self._copies() if copy is not None]
        return [copy for copy in copies if not (copy.is_written or copy.is_forgotten)]

    def _copies(self) -> Iterator[Copy | None]:
        """The copies of each evicted record; None for a record without one."""
        for node in self.nodes:
            if not self.is_state_only:
                yield from node.copies.rows or (None,)
            if node.checkpoint is not None:
                yield node.copies.state
