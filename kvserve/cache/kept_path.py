"""All that is kept of a prefix, for another tier: values, and how they are read off the tree's records."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.records import BoundaryKind, Piece, State
from kvserve.cache.store import Store
from kvserve.cache.token_run import TokenRun, join
from kvserve.cache.trie import Copies, Node


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Rows of a path, with the state behind them and why there is a border; `kind` None: none was given. `copies` is
    the tree's own note of what the other tier has of them, for that tier to keep."""

    piece: Piece
    state: State | None
    kind: BoundaryKind | None
    copies: Copies


@dataclass(frozen=True, slots=True)
class KeptPath:
    """All that is kept of a prefix: its tokens, the names of their blocks, the parts that cover them in order, and who
    used it up to which offset."""

    run: TokenRun
    chain: HashChain
    parts: tuple[KeptPart, ...]
    users: Mapping[str, int]


def kept_path(store: Store, hasher: BlockHasher, last: Node) -> KeptPath:
    """What is kept up to the end of a node, which is no root."""
    path = last.path()
    run = join([node.tokens.part(node.start, node.end) for node in path])
    hashes = tuple(name for node in path for name in node.hashes)
    parts = (KeptPart(store.piece_of(node, node.end), store.state_of(node), node.kind, node.copies) for node in path)
    users = {user: depth for node in path for user, depth in node.users.items()}  # the deepest of each
    return KeptPath(run, replace(hasher.start(last.root().partition), hashes=hashes), tuple(parts), users)
