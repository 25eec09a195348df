"""Which nodes are removed together: those that serve only one leaf, one request or some owners. It changes none."""

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
