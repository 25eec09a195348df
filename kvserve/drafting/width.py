"""How many drafted tokens are worth a pass of the model, from how likely they are and what passes cost on this machine.
Pure; it knows no tokens."""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def best_width(chances: Sequence[float], seconds_by_width: Mapping[int, float]) -> int:
    """So many of the drafted tokens give most tokens a second, 0 where a plain step gives as many.

    `chances[i]` is how likely token i is where all before it were right. `seconds_by_width` has the measured seconds of
    a pass over so many tokens, the row's pending one counted, 1 among them; between measured widths they are taken to
    lie on a line, and none wider than the widest is thought of. Raises ValueError where a plain step was not measured.
    """
    if 1 not in seconds_by_width:
        raise ValueError("the seconds of a plain step are unknown")
    seconds = seconds_of_widths(len(chances) + 1, seconds_by_width)
    best, best_rate = 0, 1.0 / seconds[0]
    expected, reached = 1.0, 1.0
    for drafted, (chance, taken) in enumerate(zip(chances, seconds[1:], strict=False), 1):
        reached *= chance
        expected += reached
        if expected / taken > best_rate:
            best, best_rate = drafted, expected / taken
    return best


def seconds_of_widths(max_width: int, seconds_by_width: Mapping[int, float]) -> list[float]:
    """Seconds of passes over 1, 2, ... tokens, up to `max_width` or the widest measured one."""
    measured = sorted(seconds_by_width.items())
    seconds = [measured[0][1]]
    for (low, low_seconds), (high, high_seconds) in pairwise(measured):
        slope = (high_seconds - low_seconds) / (high - low)
        for width in range(low + 1, min(high, max_width) + 1):
            seconds.append(low_seconds + slope * (width - low))
    return seconds
