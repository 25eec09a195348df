"""The nouns of the tree: a node and what belongs to its end, a place, a prompt that was looked up, and a lease.
They know no index and do not change the shape.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvserve.cache.block_hash import HashChain
from kvserve.cache.records import BoundaryKind, Checkpoint, Copy, Segment
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


@dataclass(frozen=True, slots=True, eq=False)
class SequenceEnd:
    """A row ended here: one entry of its owner's, last at `ended_at`. `ttl_seconds` None means the general limit. It is
    the same entry wherever the tree moves it."""

    owner: str | None
    ttl_seconds: float | None
    ended_at: float


@dataclass(slots=True, eq=False)
class Copies:
    """What another tier has, or will have, of one node: the copies that cover its rows together (none: not all of them
    are known there), and that of its state. That tier notes them; one that it forgets says so itself."""

    rows: tuple[Copy, ...] = ()
    state: Copy | None = None

    @property
    def has_rows(self) -> bool:
        """Whether that tier has the node's rows, or will have them: then what they stand on too."""
        return bool(self.rows) and not any(copy.is_forgotten for copy in self.rows)


@dataclass(slots=True, eq=False)
class Node:
    """The tokens `[start, end)` behind `parent`; `checkpoint`, `kind` and `sequence_end` belong to its end.

    A restore is a row that began at its end (or ended there, and may go on). `hashes` name the blocks that end in
    `(start, end]`. Children differ in their first token. `partition` is a root's. `number` grows with each segment that
    the tree gets; both parts of a node that was cut have that of the whole.

    A row that uses a path is noted where it stands, in `last_used_at`, `num_uses` and `users` (who, and up to which
    offset; rows of which that is not known are not in it). What stands behind a node used the node too: it is noted
    there when that leaves (`inherit`), so a leaf's notes are whole, and those of other nodes lack what is behind them.
    `first_cut`: the nearest to its start that it was ever cut; behind it other tokens may stand since (`Trie.merge`).
    `is_guess`: computed, or read from disk, ahead of requests; none has used it, and so none what is behind it.
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
    number: int = 0
    first_cut: float = math.inf

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

    def inherit(self, behind: "Node") -> None:
        """A node behind this one leaves: whoever used it came through here."""
        if self.parent is None:
            return
        if not behind.is_guess:
            self.last_used_at = max(self.last_used_at, behind.last_used_at)
            self.num_uses += behind.num_uses
        for user, depth in behind.users.items():
            note_use(self.users, user, min(depth, self.end))

    @property
    def num_bytes(self) -> int:
        """Bytes of the state at its end, and its share of the record that it is in."""
        num_bytes = self.checkpoint.num_bytes if self.checkpoint is not None else 0
        if self.segment is not None:
            num_bytes += self.segment.num_bytes * (self.end - self.start) // len(self.segment.tokens)
        return num_bytes

    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class Position:
    """A place on the tree: `depth` tokens from the root, `node.start <= depth <= node.end`."""

    node: Node
    depth: int


@dataclass(slots=True, eq=False)
class NamedPrompt:
    """A whole prompt, packed, and the names of its blocks. `place` is the last place whose tokens were compared with it
    and are its first ones; that may have left the tree since, or have been cut. Changed by the tree only."""

    partition: str
    run: TokenRun
    chain: HashChain
    place: Position | None = None

    def follow(self, place: Position, run: TokenRun, start: int) -> None:
        """A row with this prompt stands at `place` now. `run` has its tokens from `start` on, before which it stood."""
        num_known, end = self.place.depth if self.place is not None else 0, min(place.depth, self.run.end)
        if start <= num_known < end and common_end(self.run, run, start, end) == end:
            self.place = Position(place.node, end)


@dataclass(slots=True, eq=False)
class Lease:
    """A live row's hold on the path of its first `num_tokens` tokens, which end in `node`. Changed by the tree only.

    `owner` is whose entry it becomes, `user` who asks ("": not known); of a guess nobody asks yet. `chain` names the
    row's whole blocks so far, `prompt` is what it was looked up by; another tier was told of the first
    `num_told_tokens` that the row used them. A lease is detached once its path is gone: released, or all cleared.
    """

    node: Node
    num_tokens: int
    chain: HashChain
    prompt: NamedPrompt
    owner: str | None
    ttl_seconds: float | None
    user: str = ""
    is_guess: bool = False
    is_detached: bool = False
    num_told_tokens: int = 0

    def touch(self, now: float, num_uses: int = 1) -> Node | None:
        """Note a use where the row stands. A guess is none, but for whom its tokens are stays known. Returns the node
        above what was a guess until now, if anything was."""
        node = self.node
        if node.parent is None:
            return None
        if self.user:
            note_use(node.users, self.user, self.num_tokens)
        if self.is_guess:
            return None
        node.last_used_at = now
        node.num_uses += num_uses
        above = node
        while above.is_guess and above.parent is not None:  # no guess is above what was used
            above.is_guess = False
            above = above.parent
        return above if above is not node else None


def leased_bytes(leases: Iterable[Lease]) -> int:
    """Bytes of all rows and states on the paths of these leases, each once: they cannot be evicted."""
    return sum(node.num_bytes for node in {node for lease in leases for node in lease.node.path()})
