"""Where a row begins that several ranks compute: each keeps for itself what it has computed, so the deepest place that
all of them have is agreed on. No arrays.
"""

from kvserve.cache.match import PrefixMatch
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine.ranks.place import Ranks, RanksLost
from kvserve.engine.rows import Row


def agreed_match(ranks: Ranks, tree: PrefixTree, row: Row, tokens: TokenSequence, match: PrefixMatch) -> PrefixMatch:
    """What a row begins with: `match`, or less of it where another rank has less. Raises RanksLost."""

    def first(num_tokens: int) -> TokenSequence:
        return TokenSequence(tokens.ids[: num_tokens + 1])  # the last token is never restored

    def own(most: int) -> int:
        return tree.peek(first(most), partition=row.request.partition).num_usable_tokens

    depth = ranks.common_depth(own, match.num_usable_tokens)
    if depth == match.num_usable_tokens:
        return match
    row.moved_bytes = 0.0  # what lies behind it stays
    match = tree.lookup(first(depth), partition=row.request.partition)
    if match.num_usable_tokens != depth:
        raise RanksLost(f"{ranks.place} cannot begin at {depth}, only at {match.num_usable_tokens}")
    return match
