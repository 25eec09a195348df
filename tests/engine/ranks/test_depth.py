"""A row begins where every rank can begin: each keeps for itself, and may have lost what the other has."""

import pytest

from kvserve.engine.ranks.place import ALONE, Ranks
from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import answer, pair

PROMPT = prompt_of(70)


class Others(Ranks):
    """One more rank, which has what `depths` say, in ascending order."""

    is_alone = False  # type: ignore[assignment]

    def __init__(self, depths: list[int]) -> None:
        self._depths = depths
        self._most = 10**9

    def gathered(self, name: str, value: int) -> list[int]:
        """Its deepest place of at most what was agreed on so far."""
        own = max(depth for depth in self._depths if depth <= self._most)
        self._most = min(value, own)
        return [value, own]


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [([0, 40, 80], [0, 80], 80), ([0, 40, 80], [0, 40], 40), ([0, 30, 80], [0, 40, 70], 0), ([0, 40], [0, 40, 90], 40)],
)
def test_the_deepest_place_that_all_have_is_agreed_on(own: list[int], others: list[int], expected: int) -> None:
    """States are at few places: that all have some below the smallest is not enough."""
    ranks = Others(others)
    assert ranks.common_depth(lambda most: max(depth for depth in own if depth <= most), max(own)) == expected
    assert ALONE.common_depth(lambda _: 0, 80) == 80


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_row_begins_where_both_can(family: str) -> None:
    """Warm on both, then cold on rank 0 because the follower has forgotten, then warm again."""
    cached = list[int]()
    with pair(family) as both:
        for _ in range(2):
            both.add(PROMPT, 4)
            both.run()
        both.chores.append(lambda scheduler: scheduler.cache.clear())
        both.catch_up()
        for _ in range(2):
            both.add(PROMPT, 4)
            both.run()
        cached = [row.num_cached_tokens for row in both.rows]
    assert both.ended == [None]
    both.assert_alike()
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 50
    expected = answer(family, tuple(PROMPT), 4)
    assert [tuple(row.generated) for row in both.rows] == [expected] * 4


def test_what_a_follower_has_to_do_comes_before_the_first_row() -> None:
    """Such as to open its disk: else a request right behind a start found nothing on it."""
    num_passes = list[int]()
    with pair("qwen3") as both:
        both.chores.append(lambda _: num_passes.append(len(both.follower.passes.seen)))
        both.add(PROMPT, 2)
        both.run()
    assert both.ended == [None]
    assert num_passes == [0] and both.follower.passes.seen
