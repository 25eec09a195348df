"""What others would lose with those who are forgotten: on disk a blob goes whole, with all that stands on it.

blob of one    |-----------------------------|      goes, as its end is of nobody else
others               |----- blob             |      stood on it: what they used is to be written anew
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvserve.cache.forgetting import IsForgotten, is_needed, remaining
from kvserve.cache.node import Node
from kvserve.cache.token_run import image_around, join
from kvserve.cache.trie import Trie
from kvserve.core import TokenSequence


@dataclass(frozen=True, slots=True)
class Endangered:
    """A prefix of a partition that `users`, who stay, used up to these offsets."""

    tokens: TokenSequence
    partition: str
    users: Mapping[str, int]


def endangered(trie: Trie, users_of: Callable[[Node], dict[str, int]], is_forgotten: IsForgotten) -> list[Endangered]:
    """The longest prefixes that others used and that stand on what goes; `users_of` are those of a node's blob."""
    users: dict[Node, dict[str, int]] = {}
    doomed: set[Node] = set()
    for node in trie.nodes():  # parents before children
        staying = remaining(users_of(node), is_forgotten)
        users[node] = {user: min(depth, node.end) for user, depth in staying.items() if depth > node.start}
        if not is_needed(staying, node.tokens.end) or node.parent in doomed:
            doomed.add(node)
    ends = (node for node in doomed if users[node] and not any(users[child] for child in node.children.values()))
    return [_endangered(node, users) for node in ends]


def _endangered(last: Node, users: Mapping[Node, Mapping[str, int]]) -> Endangered:
    path = last.path()
    depths = {user: depth for node in path for user, depth in users[node].items()}  # the deepest of each
    run = join([node.tokens.part(node.start, node.end) for node in path])
    end = max(users[last].values())
    if (image := image_around(run.images, end)) is not None:
        end = image.start
    part = run.part(0, end)
    return Endangered(TokenSequence(tuple(memoryview(part.ids).cast("I")), part.images), last.root().partition, depths)
