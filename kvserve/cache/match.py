"""What a lookup in the prefix tree found: a value that knows the tree's records and its node."""

from dataclasses import dataclass, field

from kvserve.cache.block_hash import HashChain
from kvserve.cache.node import NamedPrompt, Node
from kvserve.cache.records import KvPiece, MatchCause, State
from kvserve.cache.store import Store
from kvserve.cache.token_run import TokenRun


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
