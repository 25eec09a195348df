"""What is removed when users are forgotten: all that no other known user has used, split where the others parted. It
knows nodes and their users, no bytes and no policy.

    one    |-----------------------------|            forgotten: [60, 90) is removed
    other  |------------------|                       used 60 tokens: [0, 60) stays
"""

from collections.abc import Callable, Mapping
from functools import cache

from kvserve.cache.node import Node
from kvserve.cache.store import Store

type IsForgotten = Callable[[str], bool]
"""Whether a user of this name is to be forgotten."""


def remaining(users: dict[str, int], is_forgotten: IsForgotten) -> dict[str, int]:
    """The other users."""
    return {user: depth for user, depth in users.items() if not is_forgotten(user)}


def is_needed(users: Mapping[str, int], end: int) -> bool:
    """Whether one of the remaining users, who came so many tokens far each, has used a blob up to its end: a blob is
    removed or stays whole."""
    return max(users.values(), default=0) >= end


def forget_users(store: Store, is_forgotten: IsForgotten, block_size: int) -> int:
    """Remove these users' own tokens, and those without a known user, which may be theirs. Leased paths stay. Returns
    the number of removed tokens."""
    asked = cache(is_forgotten)
    ordered = sorted(store.trie.nodes(), key=lambda node: -node.start)  # children before their parents
    needed: dict[Node, int] = {}
    for node in ordered:
        node.users = remaining(node.users, asked)
        depths = [*node.users.values(), *(lease.num_tokens for lease in node.leases)]
        is_inner = any(needed[child] > child.start for child in node.children.values())
        needed[node] = node.end if is_inner else min(node.end, max(depths, default=node.start))
    gone = [node for node in ordered if needed[node] <= node.start]
    num_tokens = sum(node.end - node.start for node in gone)
    store.remove_leaves(gone)
    for node in (each for each in ordered if each.start < needed[each] < each.end):
        num_tokens += node.end - needed[node]
        store.trie.split(node, needed[node], block_size)
        store.remove_leaves(list(node.children.values()))
    return num_tokens
