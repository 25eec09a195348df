"""A tree gets other names for the same prefixes: what its model is called became known after the first rows were kept.

It changes names only: tokens, records, uses and who stands where stay as they are.
"""

from collections.abc import Iterable

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.node import Lease, Node
from kvserve.cache.token_run import join
from kvserve.cache.trie import Trie


def rename(trie: Trie, leases: Iterable[Lease], hasher: BlockHasher) -> None:
    """Name every node's blocks, and those that a lease holds, as `hasher` does. Its block size is the old one's."""
    for leaf in [node for node in trie.nodes() if not node.children]:
        chain = _chain_to(leaf, hasher)
        for node in leaf.path():
            first, last = node.start // hasher.block_size, node.end // hasher.block_size
            node.hashes = chain.hashes[first:last]
    for lease in leases:
        lease.chain = _chain_to(lease.node, hasher).truncated(lease.num_tokens)
    trie.index_anew()


def _chain_to(last: Node, hasher: BlockHasher) -> HashChain:
    """The names of the whole blocks up to the end of a node."""
    chain, path = hasher.start(last.root().partition), last.path()
    return chain.extended(join([node.tokens.part(node.start, node.end) for node in path])) if path else chain
