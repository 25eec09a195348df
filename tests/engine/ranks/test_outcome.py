"""What a pass comes to is the same on all ranks: a row that fails on rank 0 fails everywhere, one that fails on a
follower alone ends the group."""

from collections import deque

import pytest

from kvserve.core import GenerationFailed
from kvserve.core.rank_place import RankPlace
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.ranks.rank_link import Progress
from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import PairLink, Turns, answer, pair

PROMPT = prompt_of(40)


@pytest.mark.parametrize("is_on_both", [True, False])
def test_a_prefill_that_raises_on_rank_0_fails_its_row_everywhere(is_on_both: bool) -> None:
    """The next one is answered."""
    with pair("qwen3") as both:
        for rank in (both.leader, both.follower)[: 2 if is_on_both else 1]:
            rank.passes.planted[1] = RuntimeError("a kernel broke")
        both.add(PROMPT, 3)
        both.run()
        both.add(PROMPT, 3)
        both.run()
    assert both.ended == [None]
    events = [event for batch in both.rows[0].handle.batches(0) for event in batch]
    assert isinstance(events[-1], GenerationFailed)
    assert tuple(both.rows[1].generated) == answer("qwen3", tuple(PROMPT), 3)
    assert both.leader.passes.noted() == both.follower.passes.noted()


def test_a_batch_that_breaks_begins_again_on_all() -> None:
    """As on one rank: the first time none is to blame."""
    with pair("qwen3") as both:
        both.add(PROMPT, 6)
        both.tick(3)
        for rank in (both.leader, both.follower):
            rank.passes.planted[len(both.leader.passes.seen) + 1] = RuntimeError("a kernel broke")
        both.run()
    assert both.ended == [None]
    both.assert_alike()
    assert tuple(both.rows[0].generated) == answer("qwen3", tuple(PROMPT), 6)


def test_a_follower_that_fails_alone_ends_the_group() -> None:
    """It cannot go on with a row that it has not computed, and rank 0 has gone on."""
    with pytest.raises(RanksLost), pair("qwen3") as both:
        both.follower.passes.planted[1] = RuntimeError("a kernel broke here")
        both.add(PROMPT, 3)
        both.run()
        both.add(PROMPT, 3)
        both.run()
    assert isinstance(both.ended[0], RanksLost)
    assert "failed alone: RuntimeError: a kernel broke here" in str(both.ended[0])


def test_a_lost_collective_is_nobodys_failure() -> None:
    """No row is blamed for it: the group ends."""
    with pytest.raises(RanksLost, match="does not compute any more"), pair("qwen3") as both:
        both.leader.passes.planted[1] = RuntimeError("[ring] connection to a peer was lost")
        both.add(PROMPT, 3)
        both.run()
    assert not both.rows[0].is_over


def test_a_failure_that_a_follower_does_not_await_ends_the_group() -> None:
    """Rank 0 failed in a pass, and this one is not in any: nobody but the end of the engine takes that."""
    link = PairLink(1, deque([("outcome", [False, "a kernel broke"])]), deque(), Turns())
    ranks = FollowingRanks(RankPlace(1, 2, ""), link, Progress(), lambda ids: ids, lambda: True)
    with pytest.raises(RanksLost, match="rank 0 failed"):
        ranks.gathered("depth", 3)
