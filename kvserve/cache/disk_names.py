"""The names of blocks of tokens that stand somewhere on a trie: they go on from those of what lies before. No file."""

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.node import Node, Position
from kvserve.cache.token_run import ID_BYTES, TokenRun, join
from kvserve.core import ImageSpan


def hashes_at(hasher: BlockHasher, position: Position, tokens: TokenRun) -> tuple[bytes, ...]:
    """The names of the blocks that end inside `tokens`, which stand at `position`."""
    size = hasher.block_size
    border = position.depth // size * size
    chain, before = hasher.start(position.node.root().partition), [tokens]
    node: Node | None = position.node
    while node is not None and node.parent is not None:
        if node.start < position.depth and node.end > border:
            before.append(node.tokens.part(max(node.start, border), min(node.end, position.depth)))
        if node.start < border <= node.end:
            chain = HashChain(size, node.hashes[border // size - node.start // size - 1], (), hasher.digest)
            break
        node = node.parent
    return chain.extended(_shifted(join(before[::-1]), border)).hashes


def _shifted(run: TokenRun, by: int) -> TokenRun:
    """The same tokens `by` places earlier: names of blocks depend on what comes before, not on where they stand."""
    images = tuple(ImageSpan(span.start - by, span.end - by, span.digest) for span in run.images)
    if run.start < by or len(run.ids) % ID_BYTES:
        raise ValueError("Tokens before the border cannot be named.")
    return TokenRun(run.start - by, run.ids, images)
