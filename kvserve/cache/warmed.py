"""Tokens that were computed ahead of requests, and how many of them were used or wasted. It knows tokens and counts, no
arrays.

A token counts once: as used when a request first starts from it, as wasted when it was evicted from RAM and disk
unused, or when it is known that something else follows in its place.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.token_run import TokenRun, common_end
from kvserve.core import TokenSequence

MAX_RUNS = 128
"""A run that is still unused after this many later ones is wasted."""

NUM_RUNS_PER_LOOK = 4
"""Looking up a long prefix takes a millisecond, and these counts are not urgent."""


@dataclass(frozen=True, slots=True)
class WarmedTotals:
    """Tokens computed ahead, those of them that a request started from, and those that no request can start from."""

    num_warmed_tokens: int = 0
    num_used_tokens: int = 0
    num_wasted_tokens: int = 0

    @property
    def num_unused_tokens(self) -> int:
        """Still stored, and not used yet."""
        return self.num_warmed_tokens - self.num_used_tokens - self.num_wasted_tokens


@dataclass(slots=True, eq=False)
class _Run:
    """Tokens `[first_unused, end)` of a prefix that were computed ahead and that no request has started from."""

    tokens: TokenSequence
    run: TokenRun
    chain: HashChain
    first_unused: int
    end: int
    key: str | None
    owner: str


class WarmedTokens:
    """The one owner of these counts. Belongs to the engine thread; totals may be read anywhere."""

    def __init__(self, known_depth: Callable[[TokenSequence, str], int]) -> None:
        """`known_depth` tells how much of a prompt a request of a partition could start from now, in RAM or on disk."""
        self._known_depth = known_depth
        self._runs: list[_Run] = []
        self._totals = WarmedTotals()

    def add(
        self,
        tokens: TokenSequence,
        run: TokenRun,
        chain: HashChain,
        start: int,
        end: int,
        key: str | None,
        owner: str = "",
    ) -> None:
        """Count `[start, end)` of `tokens` as warmed. `run` and `chain` reach at least to `end`; `key` says which next
        request it is for, `owner` whose ("": not known)."""
        if end <= start:
            return
        self._count(num_warmed_tokens=end - start)
        self._runs.append(_Run(tokens, run.part(0, end), chain.truncated(end), start, end, key, owner))
        for old in self._runs[:-MAX_RUNS]:
            self._waste(old, old.first_unused)

    def use(self, run: TokenRun, chain: HashChain, num_tokens: int) -> int:
        """Count what a request starts from, `[0, num_tokens)` of this. Returns how many of these were warmed and not
        used before."""
        num_used = 0
        for each in list(self._runs):
            common = min(num_tokens, _common(each, run, chain))
            if common > each.first_unused:
                num_used += common - each.first_unused
                each.first_unused = common
                self._forget_if_over(each)
        self._count(num_used_tokens=num_used)
        return num_used

    def replace(self, key: str, run: TokenRun, chain: HashChain) -> None:
        """Count as wasted what was warmed for `key` and is no prefix of this, which follows instead."""
        for each in [each for each in self._runs if each.key == key]:
            self._waste(each, max(each.first_unused, _common(each, run, chain)))

    def look(self) -> None:
        """Look whether a few are still stored; those that are go to the end of the list."""
        for each in self._runs[:NUM_RUNS_PER_LOOK]:
            self._waste(each, max(each.first_unused, self._known_depth(each.tokens, each.chain.partition)))
            if each in self._runs:
                self._runs.remove(each)
                self._runs.append(each)

    def rename(self, hasher: BlockHasher) -> None:
        """Hash prefixes by this from now on."""
        for each in self._runs:
            each.chain = hasher.start(each.chain.partition).extended(each.run)

    def clear(self) -> None:
        """Count all as wasted: nothing is stored any more."""
        for each in list(self._runs):
            self._waste(each, each.first_unused)

    def forget_owners(self, is_forgotten: Callable[[str], bool]) -> None:
        """Count as wasted what was warmed for these owners, or for no known one."""
        for each in [each for each in self._runs if not each.owner or is_forgotten(each.owner)]:
            self._waste(each, each.first_unused)

    def forget(self) -> None:
        """Set all counts to zero."""
        self._runs.clear()
        self._totals = WarmedTotals()

    def totals(self) -> WarmedTotals:
        """The counts so far."""
        return self._totals

    def _waste(self, run: _Run, end: int) -> None:
        """Count what is behind `end` as wasted."""
        self._count(num_wasted_tokens=max(0, run.end - end))
        run.end = min(run.end, end)
        self._forget_if_over(run)

    def _forget_if_over(self, run: _Run) -> None:
        if run.first_unused >= run.end:
            self._runs.remove(run)

    def _count(self, *, num_warmed_tokens: int = 0, num_used_tokens: int = 0, num_wasted_tokens: int = 0) -> None:
        self._totals = WarmedTotals(
            self._totals.num_warmed_tokens + num_warmed_tokens,
            self._totals.num_used_tokens + num_used_tokens,
            self._totals.num_wasted_tokens + num_wasted_tokens,
        )


def _common(one: _Run, run: TokenRun, chain: HashChain) -> int:
    """How many tokens a warmed run has in common with a prefix, at most to the run's end."""
    if one.chain.partition != chain.partition:
        return 0
    limit = min(one.end, run.end)
    mine, others = one.chain.hashes, chain.hashes
    blocks = range(min(len(mine), len(others), limit // chain.block_size))
    num_blocks = bisect_left(blocks, True, key=lambda block: mine[block] != others[block])
    return common_end(one.run, run, num_blocks * chain.block_size, limit)
