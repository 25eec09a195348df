"""Questions on the branches of the tree, which change nothing: which nodes serve only one leaf, one request or some
owners, and are removed together; which states are the last ones behind a user message on some branch. The end of such a
branch is looked for once and remembered, because a branch may have thousands of nodes.
"""

from collections.abc import Callable, Iterable

from kvserve.cache.node import Node


def exclusive_suffix(leaf: Node) -> list[Node]:
    """A leaf and the ancestors that serve only it, up to a branch, a lease or the end of system and tools."""
    tail = [leaf]
    node = leaf.parent
    while (
        node is not None
        and node.parent is not None
        and len(node.children) == 1
        and not node.leases
        and node.kind != "system"
    ):
        tail.append(node)
        node = node.parent
    return tail


def added_suffix(last: Node, start: int) -> list[Node]:
    """A node and its ancestors that begin at `start` or behind it, up to a branch, a lease or an entry."""
    tail: list[Node] = []
    node = last
    while node.parent is not None and node.start >= start and len(node.children) == bool(tail):
        if node.leases or node.sequence_end is not None:
            break
        tail.append(node)
        node = node.parent
    return tail


def exclusive_nodes(nodes: Iterable[Node], is_owned: Callable[[Node], bool]) -> list[Node]:
    """The nodes that lead to owned leaves only, deepest first: no lease and no end of system and tools is behind them.
    A leaf that is no owner's entry is removed with its parent, or stays."""
    ours: set[Node] = set()
    others: set[Node] = set()
    ordered = sorted((node for node in nodes if node.parent is not None), key=lambda node: -node.start)
    for node in ordered:
        children = node.children.values()
        is_theirs = bool(node.leases) or node.kind == "system" or any(child in others for child in children)
        is_ours = is_owned(node) or any(child in ours for child in children)
        is_entry = node.sequence_end is not None and node.sequence_end.owner is not None
        if is_theirs or (is_entry and not is_owned(node)):
            others.add(node)
        elif is_ours:
            ours.add(node)
    gone: set[Node] = set()
    for node in reversed(ordered):  # what has no owner is removed with its parent
        if node in ours or node.parent in gone:
            gone.add(node)
    return [node for node in ordered if node in gone]


def used_children(node: Node) -> list[Node]:
    """The children that are no guesses."""
    return [child for child in node.children.values() if not child.is_guess]


def end_without_user(node: Node) -> Node | None:
    """The end of a branch below a node that has no state behind a user message; None where there is no such branch."""
    todo = [node]
    while todo:
        each = todo.pop()
        if not (children := used_children(each)):
            return each
        todo += [child for child in children if child.checkpoint is None or child.checkpoint.kind != "user"]
    return None


class LastUsers:
    """The branch end by which each state is known to be the last one. An end that has moved is followed, not looked for
    anew."""

    def __init__(self, is_held: Callable[[Node], bool]) -> None:
        self._is_held = is_held
        self._end_of: dict[Node, Node] = {}
        self._states_of: dict[Node, dict[Node, None]] = {}

    def is_last(self, state: Node) -> bool:
        """Whether a state behind a user message is the last one of some branch."""
        near = self._end_of.get(state)
        while near is not None and near is not state and not self._is_held(near):
            near = near.parent
        end = end_without_user(near) if near is not None else None
        if end is None and near is not state:
            end = end_without_user(state)
        if end is None or end is not self._end_of.get(state):
            self.forget(state)
            if end is not None:
                self._end_of[state] = end
                self._states_of.setdefault(end, {})[state] = None
        return end is not None

    def known_by(self, nodes: Iterable[Node]) -> list[Node]:
        """The states that are known to be last by one of these ends."""
        return [state for node in nodes for state in self._states_of.get(node, ())]

    def forget(self, state: Node) -> None:
        """Forget a state's end: the next question looks for it anew."""
        if (end := self._end_of.pop(state, None)) is not None:
            del self._states_of[end][state]
            if not self._states_of[end]:
                del self._states_of[end]
