"""The prompts that were looked up last: a prompt that repeats or continues one of them is hashed, and compared with the
stored tokens, from its first new token on.

An agent's prompt of 100k tokens is looked up several times and differs from its last one in its end. It knows tokens,
hashes and positions, not what is stored there.
"""

from collections import deque

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.node import NamedPrompt, Position
from kvserve.cache.token_run import TokenRun, common_end, pack
from kvserve.core import TokenSequence

NUM_KEPT = 8


class RecentNames:
    """Hashes prompts for a tree; remembers the last few."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._kept: deque[NamedPrompt] = deque(maxlen=NUM_KEPT)
        self._last_tokens: TokenSequence | None = None

    def name(self, tokens: TokenSequence, partition: str) -> NamedPrompt:
        """The hashes of a prompt's blocks, as hashing all of it would give them."""
        if tokens is self._last_tokens and self._kept[-1].partition == partition:
            return self._kept[-1]
        run = pack(tokens)
        nearest, num_common = self._nearest(run, partition)
        if nearest is None:
            named = NamedPrompt(partition, run, self._hasher.start(partition).extended(run))
        elif num_common == nearest.run.end == run.end:
            named = nearest
        else:
            place = nearest.place and Position(nearest.place.node, min(nearest.place.depth, num_common))
            named = NamedPrompt(partition, run, nearest.chain.truncated(num_common).extended(run), place)
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
            # One that differs where the best one ends cannot be better.
            next_id = run.packed(num_common, num_common + 1)
            if named.partition == partition and next_id and named.run.packed(num_common, num_common + 1) == next_id:
                end = common_end(named.run, run, 0, min(named.run.end, run.end))
                if end > num_common:
                    best, num_common = named, end
        return best, num_common
