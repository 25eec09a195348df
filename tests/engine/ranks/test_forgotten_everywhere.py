"""What is forgotten on rank 0 is forgotten on the others: each keeps its own part, and only rank 0 knows who is
meant."""

from collections.abc import Callable, Iterator

import pytest

from kvserve.core import TokenSequence
from kvserve.engine import forget_everywhere
from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import OneRank, Pair, pair

OWNERS = ("ann", "bob")
PROMPTS = {owner: prompt_of(80, seed) for seed, owner in enumerate(OWNERS)}


@pytest.fixture
def both() -> Iterator[Pair]:
    """Two owners have each had a prompt answered."""
    with pair("qwen3") as ranks:
        for owner, prompt in PROMPTS.items():
            ranks.add(prompt, 2, owner=owner)
            ranks.run()
        ranks.catch_up()
        yield ranks


def kept(rank: OneRank) -> dict[str, bool]:
    """Whose prompts a rank has."""
    tokens = {owner: TokenSequence(tuple(prompt)) for owner, prompt in PROMPTS.items()}
    return {owner: rank.scheduler.cache.kept_tokens(prompt)[1] > 0 for owner, prompt in tokens.items()}


def forget(ranks: Pair) -> None:
    gone = forget_everywhere.forget(ranks.leader.scheduler, ranks.leader.ranks, "ann".__eq__)
    assert gone.is_done
    assert len(PROMPTS["ann"]) <= gone.num_tokens < 2 * len(PROMPTS["ann"]), "those of one rank: both have the same"


def discard(ranks: Pair) -> None:
    tokens = TokenSequence(tuple(PROMPTS["ann"]))
    forget_everywhere.discard(ranks.leader.scheduler, ranks.leader.ranks, tokens, "ann".__eq__)


def clear(ranks: Pair) -> None:
    forget_everywhere.clear(ranks.leader.scheduler, ranks.leader.ranks)


@pytest.mark.parametrize(("act", "left"), [(forget, {"bob"}), (discard, {"bob"}), (clear, set())])
def test_a_follower_forgets_what_rank_0_forgets(both: Pair, act: Callable[[Pair], None], left: set[str]) -> None:
    assert kept(both.leader) == kept(both.follower) == dict.fromkeys(OWNERS, True)
    act(both)
    expected = {owner: owner in left for owner in OWNERS}
    assert kept(both.leader) == kept(both.follower) == expected
