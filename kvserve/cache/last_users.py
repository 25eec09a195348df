"""Which states are the last ones behind a user message on some branch: no later one follows up to the branch's end. It
looks for such an end once and remembers it, because a branch may have thousands of nodes.
"""

from collections.abc import Callable, Iterable

from kvserve.cache.node import Node


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
