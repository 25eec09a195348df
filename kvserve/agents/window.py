"""Chooses the turns of an agent that a prompt shows when not all fit. A function that is handed in counts tokens.

The oldest whole turns are dropped, several at once: if every prompt had one turn less, nothing behind the system prompt
could be reused.
"""

from collections.abc import Callable, Sequence

SHARE_KEPT = 0.75
"""The part of the room that is filled after turns were dropped."""

ANSWER_SHARE = 0.25
"""The largest part of the context that is kept free for the answer."""


def answer_room(max_context: int, max_tokens: int) -> int:
    """The tokens that a prompt leaves to its answer."""
    return min(max_tokens, max(1, int(max_context * ANSWER_SHARE)))


def first_turn_shown(
    beginnings: Sequence[int], shown_from: int, num_tokens_from: Callable[[int], int], room: int
) -> tuple[int, int]:
    """The first turn that a prompt within `room` tokens shows, and the prompt's tokens.

    `beginnings` are the turns with which a prompt may begin, in order, perhaps with the new one last; so far it began
    with `shown_from`. `num_tokens_from(turn)` counts a prompt and does not grow with the turn. If nothing fits, it is
    the last beginning.
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
