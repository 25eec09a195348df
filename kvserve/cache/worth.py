"""How well what could leave is protected, and what it is worth: candidates of leaves, states and entries, as ranks.

    GUESS < SURPLUS < PLAIN < BRANCH_POINT, PINNED < NEWEST        a lower level leaves first, whatever it is worth

It reads nodes; it changes nothing and lets nothing leave.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvserve.cache.eviction import BRIEF_TOKENS, Candidate, Score
from kvserve.cache.node import Node

GUESS = -2
"""Computed ahead of requests and used by none: it has no place that anybody else could use."""

SURPLUS = -1
"""A leaf that is more than its owner, or all owners, may have where bytes are short."""

PLAIN, BRANCH_POINT, NEWEST = 0, 1, 2
"""Levels of a checkpoint. NEWEST: the last two of a branch, its last user message, and the end of system and tools."""

PINNED = 1
"""The level of a leaf that was asked to be kept; other leaves are PLAIN."""

NUM_NEWEST_KEPT = 2


@dataclass(order=True, slots=True)
class Ranked:
    """A place in the queue of what may leave: by level, then score, then age. No guess changes that of others."""

    rank: tuple[int, float, int]
    node: Node = field(compare=False)

    @property
    def level(self) -> int:
        return self.rank[0]


class Worth:
    """Ranks at one moment, `now`, which its owner sets."""

    def __init__(self, score: Score, *, needs_checkpoints: bool) -> None:
        self.now = 0.0
        self._score = score
        self._needs_checkpoints = needs_checkpoints

    def of_leaf(self, node: Node, *, is_surplus: bool = False) -> Ranked:
        """A leaf with all that leaves with it. `is_surplus` counts only where nobody asked for it to be kept."""
        level = GUESS if node.is_guess else PINNED if self.is_pinned(node) else SURPLUS if is_surplus else PLAIN
        return self._ranked(level, self._leaf_candidate(node), node)

    def of_state(self, node: Node, level: int | None = None) -> Ranked:
        """A node's checkpoint alone; `level` where that is known."""
        return self._ranked(level_of(node) if level is None else level, self._state_candidate(node), node)

    def of_entry(self, leaf: Node, tail: list[Node]) -> float:
        """An entry with all that serves only it."""
        num_bytes = sum(_num_bytes(node) for node in tail)
        age_seconds = self.now - leaf.last_used_at
        brief = is_brief(leaf)
        return self._score(Candidate(tail[-1].start, leaf.end, num_bytes, leaf.num_uses, age_seconds, is_brief=brief))

    def is_pinned(self, leaf: Node) -> bool:
        """Whether an entry was asked to be kept for a time that is not over."""
        own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
        return own is not None and self.now - leaf.last_used_at <= own

    def _ranked(self, level: int, candidate: Candidate, node: Node) -> Ranked:
        return Ranked((level, self._score(candidate), node.number), node)

    def _leaf_candidate(self, node: Node) -> Candidate:
        start, end = node.start, node.end
        if self._needs_checkpoints:
            start = _previous_checkpoint(node) if node.checkpoint is not None else end
        age_seconds, brief = self.now - node.last_used_at, is_brief(node)
        return Candidate(start, end, _num_bytes(node), node.num_uses, age_seconds, is_brief=brief)

    def _state_candidate(self, node: Node) -> Candidate:
        return Candidate(
            start=_previous_checkpoint(node),
            end=node.end,
            num_bytes=node.checkpoint.num_bytes if node.checkpoint is not None else 0,
            num_uses=node.num_restores,
            age_seconds=self.now - node.restored_at,
            is_end=not node.children,
            is_brief=is_brief(node),
        )


def is_brief(node: Node) -> bool:
    """Whether all that goes through a node ends few tokens behind system and tools; no more than that is looked at."""
    above = node
    while above.parent is not None and above.kind != "system":
        if node.end - above.start >= BRIEF_TOKENS:
            return False
        above = above.parent
    todo = [node] if above is not node else []
    while todo:
        each = todo.pop()
        if each.end - above.end >= BRIEF_TOKENS:
            return False
        todo += each.children.values()
    return above is not node


def level_of(node: Node) -> int:
    """How well a checkpoint is protected."""
    if node.is_guess:
        return GUESS
    if (node.checkpoint is not None and node.checkpoint.kind == "system") or node.kind == "system" or _is_newest(node):
        return NEWEST
    return BRANCH_POINT if len(_used_children(node)) > 1 else PLAIN


def newest_above(node: Node) -> Iterator[Node]:
    """A node that got a state, and those above it whose level that may have changed."""
    num_states, num_users = 0, 0
    each = node
    while each.parent is not None and (num_states <= NUM_NEWEST_KEPT or num_users < 2):
        if each.checkpoint is not None:
            is_user = each.checkpoint.kind == "user"
            if num_states <= NUM_NEWEST_KEPT or is_user:
                yield each
            num_states += 1
            num_users += is_user
        each = each.parent


def _is_newest(node: Node) -> bool:
    """Whether a leaf is below of whose path this is one of the deepest checkpoints, or the deepest one behind a user
    message. No path is followed further than it takes to know."""
    is_user = node.checkpoint is not None and node.checkpoint.kind == "user"
    todo = [(child, 0, False) for child in _used_children(node)]
    if not todo:
        return True
    while todo:
        each, num_deeper, has_user = todo.pop()
        if each.checkpoint is not None:
            num_deeper += 1
            has_user = has_user or each.checkpoint.kind == "user"
        if num_deeper >= NUM_NEWEST_KEPT and (has_user or not is_user):
            continue
        if not (children := _used_children(each)):
            return True
        todo += [(child, num_deeper, has_user) for child in children]
    return False


def _used_children(node: Node) -> list[Node]:
    return [child for child in node.children.values() if not child.is_guess]


def _previous_checkpoint(node: Node) -> int:
    """The offset of the last checkpoint above a node."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above.end if above is not None else 0


def _num_bytes(node: Node) -> int:
    num_bytes = node.checkpoint.num_bytes if node.checkpoint is not None else 0
    if node.segment is not None:
        num_bytes += node.segment.num_bytes * (node.end - node.start) // len(node.segment.tokens)
    return num_bytes
