"""The rank of what may be evicted: how well leaves, states and entries are protected, and how urgent their eviction is;
and which ranks may fall with a change of one node.

    GUESS < SURPLUS < PLAIN < BRANCH_POINT, PINNED < NEWEST        a lower level is evicted first, whatever its urgency

It reads nodes; it changes and evicts none.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvserve.cache.branches import end_without_user, used_children
from kvserve.cache.eviction import BRIEF_TOKENS, Ageing, Candidate, Score
from kvserve.cache.node import Node

GUESS = -2
"""Computed ahead of requests and used by none: it takes no room from what was used."""

SURPLUS = -1
"""A leaf over the number that its owner, or all owners, may have where bytes are short."""

PLAIN, BRANCH_POINT, NEWEST = 0, 1, 2
"""Levels of a checkpoint. NEWEST: the last two of a branch, its last user message, and the end of system and tools."""

PINNED = 1
"""The level of an entry within its own lifetime; other leaves are PLAIN."""

NUM_NEWEST_KEPT = 2


@dataclass(frozen=True, slots=True)
class Rank:
    """A lower level is evicted first, whatever its urgency. The rank holds until `until`."""

    level: int
    ageing: Ageing
    until: float = math.inf


class EvictionRank:
    """Ranks nodes at one moment, `now`, which the sweep sets. `is_last_user` says whether a state behind a user message
    is the last such state on some branch."""

    def __init__(self, score: Score, is_last_user: Callable[[Node], bool], *, needs_checkpoints: bool) -> None:
        self.now = 0.0
        self._score = score
        self._is_last_user = is_last_user
        self._needs_checkpoints = needs_checkpoints

    def of_leaf(self, node: Node, *, is_surplus: bool = False) -> Rank:
        """The rank of a leaf with its state. A pinned leaf is no surplus."""
        ageing = self._score(self._leaf_candidate(node))
        if node.is_guess:
            return Rank(GUESS, ageing)
        if self.is_pinned(node):
            return Rank(PINNED, ageing, _pinned_until(node))
        return Rank(SURPLUS if is_surplus else PLAIN, ageing)

    def of_state(self, node: Node) -> Rank:
        """The rank of a node's checkpoint alone."""
        return Rank(level_of(node, self._is_last_user), self._score(self._state_candidate(node)))

    def of_entry(self, leaf: Node, tail: list[Node]) -> Ageing:
        """The ageing of an entry with all that serves only it."""
        num_bytes, brief = sum(node.num_bytes for node in tail), is_brief(leaf)
        start, end = tail[-1].start, leaf.end
        return self._score(Candidate(start, end, num_bytes, leaf.num_uses, leaf.last_used_at, is_brief=brief))

    def is_pinned(self, leaf: Node) -> bool:
        """Whether an entry has its own lifetime and that is not over."""
        return self.now <= _pinned_until(leaf)

    def _leaf_candidate(self, node: Node) -> Candidate:
        start, end = node.start, node.end
        if self._needs_checkpoints:
            start = _previous_checkpoint(node) if node.checkpoint is not None else end
        brief = is_brief(node)
        return Candidate(start, end, node.num_bytes, node.num_uses, node.last_used_at, is_brief=brief)

    def _state_candidate(self, node: Node) -> Candidate:
        return Candidate(
            start=_previous_checkpoint(node),
            end=node.end,
            num_bytes=node.checkpoint.num_bytes if node.checkpoint is not None else 0,
            num_uses=node.num_restores,
            used_at=node.restored_at,
            is_end=not node.children,
            is_brief=is_brief(node),
        )


def _pinned_until(leaf: Node) -> float:
    own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
    return leaf.last_used_at + own if own is not None else -math.inf


def is_brief(node: Node) -> bool:
    """Whether all paths through a node end few tokens behind system and tools; it looks no further than that."""
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


def _ends_without_user(node: Node) -> bool:
    return end_without_user(node) is not None


def level_of(node: Node, is_last_user: Callable[[Node], bool] = _ends_without_user) -> int:
    """How well a checkpoint is protected."""
    if node.is_guess:
        return GUESS
    kind = node.checkpoint.kind if node.checkpoint is not None else None
    if kind == "system" or node.kind == "system" or _is_newest(node) or (kind == "user" and is_last_user(node)):
        return NEWEST
    return BRANCH_POINT if len(used_children(node)) > 1 else PLAIN


# --- whose rank may fall ----------------------------------------------------------------------------------------------


def fallen_by_state(node: Node) -> Iterator[Node]:
    """After a node got a state: states above that were among the newest until now, and the next ones below, which save
    fewer tokens."""
    if node.checkpoint is None:
        return
    yield node
    yield from _newest_above(node.parent, of_user=node.checkpoint.kind == "user")
    todo = list(node.children.values())
    while todo:
        each = todo.pop()
        if each.checkpoint is not None:
            yield each
        else:
            todo += each.children.values()


def fallen_by_parting(node: Node) -> Iterator[Node]:
    """After a node lost a descendant, or one that was a guess was used: states above that were the newest of a branch
    that ended there, and nodes that were not brief because of it."""
    yield node
    if used_children(node):
        yield from _newest_above(node, of_user=False)
    above: Node | None = node
    behind_anchor: list[Node] = []  # of system and tools, or of the root
    while above is not None:
        if above.parent is None or above.kind == "system":
            yield from behind_anchor
            behind_anchor = []
        if node.end - above.start >= BRIEF_TOKENS:
            return
        behind_anchor.append(above)
        above = above.parent


def fallen_by_anchor(node: Node) -> Iterator[Node]:
    """After a node became the end of system and tools: what follows within a few tokens may be brief."""
    todo = list(node.children.values())
    while todo:
        each = todo.pop()
        if each.end - node.end < BRIEF_TOKENS:
            yield each
            todo += each.children.values()


def _newest_above(node: Node | None, *, of_user: bool) -> Iterator[Node]:
    """The deepest states of a path and, with `of_user`, the deepest one behind a user message."""
    num_states = 0
    while node is not None and node.parent is not None and (num_states < NUM_NEWEST_KEPT or of_user):
        if node.checkpoint is not None:
            is_user = node.checkpoint.kind == "user"
            if num_states < NUM_NEWEST_KEPT or is_user:
                yield node
            num_states += 1
            of_user = of_user and not is_user
        node = node.parent


def _is_newest(node: Node) -> bool:
    """Whether this is one of the deepest checkpoints on the path to some leaf. It follows paths no further than
    needed."""
    todo = [(node, 0)]
    while todo:
        each, num_deeper = todo.pop()
        if not (children := used_children(each)):
            return True
        for child in children:
            if (num := num_deeper + (child.checkpoint is not None)) < NUM_NEWEST_KEPT:
                todo.append((child, num))
    return False


def _previous_checkpoint(node: Node) -> int:
    """The offset of the last checkpoint above a node."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above.end if above is not None else 0
