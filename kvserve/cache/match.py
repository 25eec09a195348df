"""Lookups in the prefix tree: what one found, a value that knows the tree's records and its node; and the prompts that
were looked up last. A prompt that repeats or continues one of these is hashed, and compared with the stored tokens,
from its first new token on: an agent's prompt of 100k tokens is looked up several times and differs from its last one
in its end.
"""

from collections import deque
from dataclasses import dataclass, field

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.node import NamedPrompt, Node, Position
from kvserve.cache.records import KvPiece, MatchCause, State
from kvserve.cache.store import Store
from kvserve.cache.token_run import TokenRun, common_end, pack
from kvserve.core import TokenSequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree knows of a prompt; to be acquired before the tree changes.

    `[0, num_matched_tokens)` is stored, token by token the same. `[0, num_usable_tokens)` can be restored: from
    `pieces`, which cover it in order, and `state`, the checkpoint at exactly that offset (None where everything can be
    cut, or nothing is usable). At most all but the last token is usable: computing that one gives the first answer
    token. `prompt` is all of it, packed and named.
    """

    num_prompt_tokens: int
    num_matched_tokens: int
    num_usable_tokens: int
    state: State | None
    cause: MatchCause
    prompt: NamedPrompt = field(repr=False)
    node: Node = field(repr=False)
    store: Store = field(repr=False)
    version: int = field(repr=False)

    @property
    def pieces(self) -> tuple[KvPiece, ...]:
        """Read from the tree on demand: most callers only need to know how much there is."""
        return self.store.pieces_to(self.node, self.num_usable_tokens)

    @property
    def run(self) -> TokenRun:
        """The whole prompt."""
        return self.prompt.run

    @property
    def chain(self) -> HashChain:
        """The hashes of its whole blocks."""
        return self.prompt.chain

    @property
    def num_trim_missed_tokens(self) -> int:
        """Tokens that match but are computed again, because no checkpoint is there (`hybrid_trim_miss`)."""
        return min(self.num_matched_tokens, max(self.num_prompt_tokens - 1, 0)) - self.num_usable_tokens


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
