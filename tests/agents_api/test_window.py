"""Which turns a prompt shows: all that fit, else whole turns less, with room so that the next ones need no new cut."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.requests.agent_turns import SHARE_KEPT, answer_room, first_turn_shown

TURNS = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30)


def shown(sizes: list[int], beginnings: list[int], shown_from: int, room: int) -> tuple[int, int]:
    return first_turn_shown(beginnings, shown_from, lambda first: sum(sizes[first:]), room)


@given(TURNS, st.integers(0, 1500), st.data())
def test_the_oldest_whole_turns_go_and_no_more_than_needed(
    turns: list[tuple[int, bool]], room: int, data: st.DataObject
) -> None:
    """Against a search through all beginnings; a prompt that fits stays as it is."""
    sizes = [size for size, _ in turns]
    beginnings = [number for number, (_, begins) in enumerate(turns) if begins or number == 0]
    shown_from = data.draw(st.sampled_from(beginnings))
    first, num_tokens = shown(sizes, beginnings, shown_from, room)
    assert num_tokens == sum(sizes[first:])
    later = [number for number in beginnings if number > shown_from]
    if sum(sizes[shown_from:]) <= room or not later:
        assert first == shown_from
    else:
        fitting = [number for number in later if sum(sizes[number:]) <= room * SHARE_KEPT]
        assert first == (fitting[0] if fitting else later[-1])


def test_a_cut_is_not_needed_again_at_the_next_turn() -> None:
    """Equal turns, added one by one: the beginning of the prompt moves once in several turns, never back."""
    firsts = []
    first = 0
    for num_turns in range(1, 60):
        first, num_tokens = shown([10] * num_turns, list(range(num_turns)), first, 200)
        assert num_tokens <= 200
        firsts.append(first)
    assert firsts == sorted(firsts) and firsts[-1] > 0
    assert len(set(firsts)) < 12, "an agent's prompt begins anew at every fifth turn at most"


def test_room_for_the_answer_is_what_it_may_need_up_to_a_quarter() -> None:
    """A short answer leaves the rest to the prompt."""
    assert answer_room(1000, 100) == 100
    assert answer_room(1000, 32_000) == 250
    assert answer_room(2, 100) == 1
