"""The prompts that were named last: one that repeats or continues such a prompt is hashed from its first new block on.

An agent's prompt of 100k tokens is looked up several times and differs from its last one in its end. It knows tokens
and names, not what is stored.
"""

from collections import deque
from dataclasses import dataclass

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.token_run import TokenRun, common_end, pack
from kvserve.core import TokenSequence

NUM_KEPT = 8


@dataclass(frozen=True, slots=True, eq=False)
class NamedPrompt:
    """A whole prompt, packed, and the names of its blocks."""

    partition: str
    run: TokenRun
    chain: HashChain


class RecentNames:
    """Names prompts for a tree; remembers the last few."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._kept: deque[NamedPrompt] = deque(maxlen=NUM_KEPT)
        self._last_tokens: TokenSequence | None = None

    def name(self, tokens: TokenSequence, partition: str) -> NamedPrompt:
        """The prompt's names, as hashing all of it would give them."""
        if tokens is self._last_tokens and self._kept[-1].partition == partition:
            return self._kept[-1]
        run = pack(tokens)
        nearest, num_common = self._nearest(run, partition)
        known = nearest.chain.truncated(num_common) if nearest is not None else self._hasher.start(partition)
        named = NamedPrompt(partition, run, known.extended(run))
        if nearest is not None and num_common == nearest.run.end:
            self._kept.remove(nearest)
        self._kept.append(named)
        self._last_tokens = tokens
        return named

    def clear(self) -> None:
        """Forget all prompts."""
        self._kept.clear()
        self._last_tokens = None

    def _nearest(self, run: TokenRun, partition: str) -> tuple[NamedPrompt | None, int]:
        """The remembered prompt with the longest common beginning, and its length in tokens."""
        best, num_common = None, 0
        for named in reversed(self._kept):
            # Nobody who differs where the best one ends can be better.
            next_id = run.packed(num_common, num_common + 1)
            if named.partition == partition and next_id and named.run.packed(num_common, num_common + 1) == next_id:
                end = common_end(named.run, run, 0, min(named.run.end, run.end))
                if end > num_common:
                    best, num_common = named, end
        return best, num_common
