"""What a pass of the model takes by its width, the number of tokens in it, and by the row's length: measured at load,
and again with every pass. So many drafted tokens are worth a pass as give most tokens a second. It knows no tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx

from kvserve.engine.kv_buffers import held_arrays

MAX_PASS_TOKENS = 16
"""No pass of a row that decodes is wider, unless the operator says so: what a draft brings is used up before."""

MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
NUM_NEWEST = 5
"""Of so many passes the median counts: one that something else delayed says nothing."""


class PassCosts:
    """Seconds of passes. Belongs to the engine thread."""

    def __init__(self, max_width: int = MAX_PASS_TOKENS) -> None:
        self.max_width = max_width
        self._newest: dict[int, dict[int, deque[float]]] = {}
        self._tables: dict[int, list[float] | None] = {}

    def measure(self, module: Callable[..., Any], new_caches: Callable[[], list[Any]]) -> None:
        """Try one row in passes of each width that there may be, the second of two, as the first may compile."""
        caches, num_tokens = new_caches(), 0
        for width in (each for each in MEASURED_WIDTHS if each <= self.max_width):
            for _ in range(2):
                started = perf_counter()
                logits = module(mx.array([[1 + (37 * place) % 89 for place in range(width)]]), cache=caches)
                mx.eval(mx.argmax(logits[0], axis=-1), held_arrays(caches))
                seconds = perf_counter() - started
            num_tokens += 2 * width
            self.note(width, num_tokens, seconds)

    def note(self, width: int, num_tokens: int, seconds: float) -> None:
        """Learn from a pass of a row that had so many tokens."""
        near = self._newest.setdefault(num_tokens.bit_length(), {})
        near.setdefault(width, deque(maxlen=NUM_NEWEST)).append(seconds)
        self._tables.clear()

    def seconds(self, width: int, num_tokens: int) -> float | None:
        """What such a pass takes; None before anything was measured."""
        table = self._table(num_tokens)
        return table[min(width, len(table)) - 1] if table is not None else None

    def num_worth(self, chances: Sequence[float], num_tokens: int, num_again: int, *, goes_back: bool) -> int:
        """How many drafted tokens give most tokens a second, 0 where a plain step gives as many.

        `chances[i]`: how likely token i is where all before it are right. `num_again` tokens have to go through the
        model in any case, before the pending one. `goes_back`: where a token is wrong, all right ones pass again.
        """
        table = self._table(num_tokens)
        if table is None:
            return 0
        plain = table[min(num_again, len(table) - 1)]
        best, best_rate = 0, 1 / plain
        expected, reached, again_seconds = 1.0, 1.0, 0.0
        for count, chance in enumerate(chances[: self.max_width - 1 - num_again], 1):
            if goes_back:  # the tokens so far pass again where this one is wrong
                again_seconds += reached * (1 - chance) * (table[min(num_again + count, len(table) - 1)] - table[0])
            reached *= chance
            expected += reached
            rate = expected / (table[num_again + count] + again_seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _table(self, num_tokens: int) -> list[float] | None:
        """Seconds of passes of 1, 2, ... tokens; on lines between those that were measured."""
        place = num_tokens.bit_length()
        if place not in self._tables:
            self._tables[place] = self._tabled(place)
        return self._tables[place]

    def _tabled(self, place: int) -> list[float] | None:
        """Widths that were not tried at about this length cost as much more than one token as they do elsewhere."""
        measured = {
            length: {width: median(newest) for width, newest in near.items()} for length, near in self._newest.items()
        }
        by_distance = sorted((abs(length - place), length) for length, near in measured.items() if 1 in near)
        if not by_distance:
            return None
        plain = measured[by_distance[0][1]][1]
        known = dict[int, float]()
        for _, length in by_distance:
            near = measured[length]
            known = {width: seconds / near[1] * plain for width, seconds in near.items()} | known
        widths = sorted(known)
        return [_between(known, widths, width) for width in range(1, self.max_width + 1)]


def _between(known: dict[int, float], widths: Sequence[int], width: int) -> float:
    """On the line between the two nearest; beyond the widest as much a token as there."""
    low = max(each for each in widths if each <= width)
    high = next((each for each in widths if each >= width), None)
    if high is None:
        return known[low] * width / low
    return known[low] + (known[high] - known[low]) * (width - low) / max(1, high - low)
