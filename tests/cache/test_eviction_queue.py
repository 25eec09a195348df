"""The queue against a plain sort: whatever was put, put again and discarded, and at whatever time."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.eviction import Ageing
from kvserve.cache.eviction_order import MIN_STALE_ITEMS, EvictionQueue, _rounded
from kvserve.cache.eviction_rank import Rank
from kvserve.cache.node import Node
from tests.laws import num_examples

NUM_NODES = 12
times = st.integers(-800, 800).map(lambda eighths: eighths / 8)
"""Further apart than what a sum with a time of day rounds away."""
ranks = st.builds(
    Rank,
    level=st.integers(-1, 1),
    ageing=st.builds(Ageing, st.sampled_from([0.1, 1.0, 1.001, 1.3, 4.0]), times)
    | st.just(Ageing(math.inf, -math.inf)),
    until=st.sampled_from([math.inf, math.inf, 20.0, 30.0]),
)
changes = st.lists(st.tuples(st.integers(0, NUM_NODES - 1), ranks | st.none()), max_size=40)


def make_nodes() -> list[Node]:
    """Two of each number, as parts of one that was cut."""
    return [Node(None, start, start + 1, None, number=start // 2) for start in range(NUM_NODES)]


def place(node: Node, rank: Rank, now: float) -> tuple[int, float, int, int]:
    urgency = Ageing(_rounded(rank.ageing.slope), rank.ageing.since).urgency(now)
    return rank.level, -urgency, node.number, node.start


@given(changes=changes, now=st.floats(100, 1000))
@settings(max_examples=num_examples(150), deadline=None)
def test_the_queue_lets_go_in_the_order_of_a_plain_sort(changes: list[tuple[int, Rank | None]], now: float) -> None:
    """By level, then how urgent it is now, then number: the last rank of each counts, in whatever order they came."""
    nodes, queue, expected = make_nodes(), EvictionQueue(), dict[Node, Rank]()
    for number, rank in changes:
        node = nodes[number]
        if rank is None:
            queue.discard(node)
            expected.pop(node, None)
        else:
            queue.put(node, rank)
            expected[node] = rank
        assert queue.rank(node) == rank
    left: list[Node] = []
    while (first := queue.first(now)) is not None:
        left.append(first)
        queue.discard(first)
    by_place = sorted(expected, key=lambda node: place(node, expected[node], now))
    assert [place(node, expected[node], now) for node in left] == [
        place(node, expected[node], now) for node in by_place
    ]


@given(changes=changes, now=st.sampled_from([10.0, 20.0, 25.0, 40.0]))
@settings(max_examples=num_examples(50), deadline=None)
def test_ranks_that_held_for_a_time_are_told_once_when_it_has_passed(
    changes: list[tuple[int, Rank | None]], now: float
) -> None:
    """Only of those that are there, with the rank that they have."""
    nodes, queue = make_nodes(), EvictionQueue()
    for number, rank in changes:
        if rank is None:
            queue.discard(nodes[number])
        else:
            queue.put(nodes[number], rank)
    there = {node for node in nodes if (rank := queue.rank(node)) is not None and rank.until < now}
    lapsed = queue.lapsed(now)
    assert set(lapsed) == there and len(lapsed) == len(there)
    assert queue.lapsed(now) == []


def test_what_is_ranked_anew_leaves_no_more_behind_than_there_is() -> None:
    """Memory is that of the nodes, however often they are ranked and whatever holds for a time only."""
    nodes, queue = make_nodes(), EvictionQueue()
    for round_number in range(1000):
        for node in nodes:
            queue.put(node, Rank(0, Ageing(1.0, round_number), 10**6))
    num_items = sum(len(heap) for buckets in queue._levels.values() for heap in buckets.values())
    assert max(num_items, len(queue._ends)) <= 2 * NUM_NODES + MIN_STALE_ITEMS + 1
    for node in nodes:
        queue.discard(node)
    assert queue.first(0.0) is None and not queue._nodes
