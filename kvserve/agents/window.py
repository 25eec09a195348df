"""Which of an agent's turns a prompt shows when not all of them fit. It counts with a function that it is given.

The oldest whole turns go, and several at once: with one turn less in every prompt nothing behind the system prompt
could ever be reused.
"""

from collections.abc import Callable, Sequence

SHARE_KEPT = 0.75
"""What is left of the room when turns had to go."""

ANSWER_SHARE = 0.25
"""The most of the context that is kept free for the answer."""


def answer_room(max_context: int, max_tokens: int) -> int:
    """Tokens that a prompt leaves to its answer."""
    return min(max_tokens, max(1, int(max_context * ANSWER_SHARE)))


def first_turn_shown(
    beginnings: Sequence[int], shown_from: int, num_tokens_from: Callable[[int], int], room: int
) -> tuple[int, int]:
    """The first turn that a prompt within `room` tokens shows, and how many tokens it then has.

    `beginnings` are the turns that a prompt may begin with, in order, the last of them may be the new one; so far it
    began with `shown_from`. `num_tokens_from(turn)` counts a prompt; it does not grow with the turn. Where nothing fits
    it is the last beginning, with its tokens.
    """
    num_tokens = num_tokens_from(shown_from)
    later = [turn for turn in beginnings if turn > shown_from]
    if num_tokens <= room or not later:
        return shown_from, num_tokens
    counted = {later[-1]: num_tokens_from(later[-1])}
    low, high = 0, len(later) - 1
    while low < high:
        middle = (low + high) // 2
        counted[later[middle]] = num_tokens_from(later[middle])
        if counted[later[middle]] <= room * SHARE_KEPT:
            high = middle
        else:
            low = middle + 1
    return later[low], counted[later[low]]
