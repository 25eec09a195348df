"""A node of the tree and what belongs to its end, a position, a prompt that was looked up, a lease; which nodes are
entries, and which have changed since they were ranked. It knows no index and does not change the shape."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvserve.cache.block_hash import HashChain
from kvserve.cache.records import BoundaryKind, Checkpoint, Copy, Segment
from kvserve.cache.token_run import TokenKey, TokenRun, common_end

MAX_USERS = 64
"""The latest users of the same tokens that are remembered. What many share is removed when the last remembered one is
forgotten; what a single user used is never affected by this bound."""


def note_use(users: dict[str, int], user: str, depth: int) -> str | None:
    """Note that a user's own requests came `depth` tokens far, as the latest user. Returns the one dropped for it."""
    users[user] = max(depth, users.pop(user, 0))
    if len(users) <= MAX_USERS:
        return None
    oldest = next(iter(users))
    del users[oldest]
    return oldest


@dataclass(frozen=True, slots=True, eq=False)
class SequenceEnd:
    """An entry of `owner`: a request ended here, last at `ended_at`. `ttl_seconds` None means the general limit. It is
    the same entry wherever the tree moves it."""

    owner: str | None
    ttl_seconds: float | None
    ended_at: float


@dataclass(slots=True, eq=False)
class Copies:
    """What the other tier has, or will have, of one node: the copies that together cover its rows (none: the tier lacks
    some), and that of its state. That tier sets them; a forgotten copy says so itself."""

    rows: tuple[Copy, ...] = ()
    state: Copy | None = None

    @property
    def has_rows(self) -> bool:
        """Whether that tier has the node's rows, or will have them: then also those of its ancestors."""
        return bool(self.rows) and not any(copy.is_forgotten for copy in self.rows)


@dataclass(slots=True, eq=False)
class Node:
    """The tokens `[start, end)` behind `parent`; `checkpoint`, `kind` and `sequence_end` belong to its end.

    A restore is a request that began at its end (or ended there, and may go on). `hashes` name the blocks that end in
    `(start, end]`. Children differ in their first token. `partition` is set on roots only. `number` grows with each
    segment that the tree gets; both parts of a split node have that of the whole.

    A use of a path is noted at its last node only, in `last_used_at`, `num_uses` and `users` (who, up to which offset;
    unknown users are not in it). Descendants used the node too: their notes reach it when they are removed (`inherit`).
    So a leaf's notes are complete, and those of inner nodes lack their descendants'. `first_cut`: the lowest offset at
    which it was ever split; other tokens may follow there since (`Trie.merge`). `is_guess`: computed, or read from
    disk, ahead of requests; no request has used it, nor any descendant.
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

    def descendants(self) -> "Iterator[Node]":
        """All nodes below this one, parents before children."""
        todo = list(self.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def inherit(self, behind: "Node") -> None:
        """Take over the uses of a child that is removed: they came through here."""
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
    """A position on the tree: `depth` tokens from the root, `node.start <= depth <= node.end`."""

    node: Node
    depth: int


@dataclass(slots=True, eq=False)
class NamedPrompt:
    """A whole prompt, packed, and the hashes of its blocks. `place` is the last position that was found to begin it;
    its node may have been removed or split since. Changed by the tree only."""

    partition: str
    run: TokenRun
    chain: HashChain
    place: Position | None = None

    def follow(self, place: Position, run: TokenRun, start: int) -> None:
        """Move on to `place`, where a request with this prompt is now. `run` has its tokens from `start` on."""
        num_known, end = self.place.depth if self.place is not None else 0, min(place.depth, self.run.end)
        if start <= num_known < end and common_end(self.run, run, start, end) == end:
            self.place = Position(place.node, end)


@dataclass(slots=True, eq=False)
class Lease:
    """Pins the path of a live request's first `num_tokens` tokens, which end in `node`. Changed by the tree only.

    `owner` gets the entry, `user` is the request's user ("": not known). `chain` has the hashes of the request's whole
    blocks so far, `prompt` is what was looked up. The other tier was told that the first `num_told_tokens` were used.
    A lease is detached once it was released or the tree was cleared.
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
        """Note a use at the lease's node; of a guess only for which user it is. Returns the node above those that were
        guesses until now, if any were."""
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


class Entries:
    """The one writer of `sequence_end`."""

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}
        self._owned: dict[str, dict[Node, None]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Over a copy: the caller may change entries meanwhile."""
        return iter(list(self._nodes))

    def owners(self) -> set[str]:
        """The owners that have entries."""
        return set(self._owned)

    def by_owner(self) -> Iterator[list[Node]]:
        """The entries of one owner, then of the next."""
        return (list(nodes) for nodes in self._owned.values())

    def set(self, node: Node, end: SequenceEnd | None) -> None:
        """Make a node an entry, or no entry any more."""
        if node.sequence_end is not None:
            self._drop(node, node.sequence_end.owner)
        node.sequence_end = end
        if end is not None:
            self._nodes[node] = None
            if end.owner is not None:
                self._owned.setdefault(end.owner, {})[node] = None

    def move(self, node: Node, other: Node) -> None:
        """Give a node's entry to another node, in place of what that had."""
        end = node.sequence_end
        self.set(node, None)
        self.set(other, end)

    def clear(self) -> None:
        """Forget all."""
        self._nodes.clear()
        self._owned.clear()

    def _drop(self, node: Node, owner: str | None) -> None:
        del self._nodes[node]
        if owner is not None:
            owned = self._owned[owner]
            del owned[node]
            if not owned:
                del self._owned[owner]


@dataclass(slots=True)
class Changes:
    """Nodes, each once. `nodes`: new ones, and those whose children, rows, record size or leases changed. `states`:
    those that got one. `parted`: those that lost a descendant, or of which one was first used. `anchors`: those that
    became the end of system and tools. `gone`: removed ones, which are in no other list.

    `is_noted` False: no order reads this, so nothing is noted.
    """

    is_noted: bool = True
    nodes: dict[Node, None] = field(default_factory=dict)
    states: dict[Node, None] = field(default_factory=dict)
    parted: dict[Node, None] = field(default_factory=dict)
    anchors: dict[Node, None] = field(default_factory=dict)
    gone: list[Node] = field(default_factory=list)

    def note(self, node: Node) -> None:
        """Its rank may have fallen."""
        self._add(self.nodes, node)

    def note_state(self, node: Node) -> None:
        """It has a state now: states above may not be among the newest any more, those below save fewer tokens."""
        self._add(self.states, node)

    def note_parted(self, node: Node) -> None:
        """A descendant was removed, or was a guess and was used."""
        self._add(self.parted, node)

    def note_anchor(self, node: Node) -> None:
        """System and tools end here: what follows within a few tokens may be brief."""
        self._add(self.anchors, node)

    def note_gone(self, node: Node, heir: Node | None = None) -> None:
        """It was removed; `heir` took over what belonged to it."""
        if not self.is_noted:
            return
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            if node in noted:
                del noted[node]
                if heir is not None:
                    self._add(noted, heir)
        self.gone.append(node)

    def note_cut(self, node: Node, lower: Node) -> None:
        """It was split: what belongs to its end is `lower`'s now."""
        for noted in (self.states, self.parted, self.anchors):
            if node in noted:
                self._add(noted, lower)
        self._add(self.nodes, node)
        self._add(self.nodes, lower)

    def clear(self) -> None:
        """Drop all but `gone`: they were read."""
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            noted.clear()

    def _add(self, noted: dict[Node, None], node: Node) -> None:
        if self.is_noted and node.parent is not None:
            noted[node] = None
