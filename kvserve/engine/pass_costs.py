"""What a pass of the model takes by its width, the number of tokens in it, and by the row's length: measured at load,
and again with every pass. So many drafted tokens are worth a pass as give most tokens a second. It knows no tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx

from kvserve.engine.kv_buffers import held_arrays

MAX_PASS_TOKENS = 16
"""No pass of a row that decodes is wider: what a draft brings is used up before."""

MEASURED_WIDTHS = (1, 2, 4, 8, 16)
FIRST_WIDTHS = (1, 2, 4)
UNPAID_WIDTHS = (*FIRST_WIDTHS, MAX_PASS_TOKENS)
"""What is measured of a model that no draft makes faster."""

NUM_ROUNDS = 3
NUM_MEASURED_TOKENS = NUM_ROUNDS * sum(MEASURED_WIDTHS)
"""About as long is the row by which they are measured."""

LEAST_GAIN = 0.05
"""A wide pass that saves no more than this share of as many plain steps is not worth it, however right its draft is."""

NUM_NEWEST = 5
"""Of so many passes the median counts: one that something else delayed says nothing."""

LEAST_CHANGE = 0.02
"""Medians that move by less than this share lead to the same choice."""


class PassCosts:
    """Seconds of passes. Belongs to the engine thread. No pass is wider than `max_width`."""

    def __init__(self, max_width: int = MAX_PASS_TOKENS) -> None:
        self.max_width = max_width
        self._newest: dict[int, dict[int, deque[float]]] = {}
        self._medians: dict[int, dict[int, float]] = {}
        self._described: deque[float] = deque(maxlen=NUM_NEWEST)
        self._tables: dict[int, list[float] | None] = {}
        self._guessed: Mapping[int, float] = {}
        self._may_compile: set[int] = set()

    def measure(self, module: Callable[..., Any], new_caches: Callable[[], list[Any]]) -> dict[int, float]:
        """Try one row in passes of each width; all of them only where one of the narrow ones, or the widest, saves
        anything (`pays`): a model that computes token after token would be slow to start for nothing. Some kernels take
        many tokens at once and few one by one, so the widest is asked before that is believed. Returns what another
        process may `guess` with."""
        fastest = _fastest(module, new_caches, FIRST_WIDTHS)
        if not pays(_ratios(fastest)):
            fastest |= _fastest(module, new_caches, (MAX_PASS_TOKENS,), num_rounds=1)
        if pays(_ratios(fastest)):
            others = (width for width in MEASURED_WIDTHS if width not in FIRST_WIDTHS)
            fastest |= _fastest(module, new_caches, tuple(others))
        for width, seconds in fastest.items():
            self.note(width, NUM_MEASURED_TOKENS, seconds)
        return _ratios(dict(sorted(fastest.items())))

    def measure_wider(
        self, module: Callable[..., Any], new_caches: Callable[[], list[Any]], width: int, ratios: Mapping[int, float]
    ) -> dict[int, float]:
        """Try passes of one width more, in turns with single ones; `ratios` with it. One more round than that which may
        compile: such a pass is the dearest of all."""
        fastest = _fastest(module, new_caches, (1, width), num_rounds=2)
        for each, seconds in fastest.items():
            self.note(each, NUM_MEASURED_TOKENS, seconds)
        widest = _ratios(fastest)[width]
        return {narrow: min(ratio, widest) for narrow, ratio in ratios.items()} | {width: widest}

    def guess(self, ratios: Mapping[int, float]) -> None:
        """Begin with how many plain steps passes took by width in another process; what is measured here replaces it,
        from the first plain step on. The first pass of each width counts for nothing: it may compile."""
        self._guessed = ratios
        self._may_compile = set(range(1, MAX_PASS_TOKENS + 1))
        self._tables.clear()

    def note(self, width: int, num_tokens: int, seconds: float) -> None:
        """Learn from a pass of a row that had so many tokens."""
        if width in self._may_compile:
            self._may_compile.remove(width)
            return
        length = num_tokens.bit_length()
        newest = self._newest.setdefault(length, {}).setdefault(width, deque(maxlen=NUM_NEWEST))
        newest.append(seconds)
        known, found = self._medians.setdefault(length, {}), median(newest)
        if abs(found - known.get(width, 0.0)) > LEAST_CHANGE * found:
            known[width] = found
            self._tables.clear()

    def note_described(self, seconds: float) -> None:
        """Learn how long it takes to describe a pass, which a plain step does while the last one computes."""
        self._described.append(seconds)

    @property
    def described_seconds(self) -> float:
        """How long it takes to describe a pass; 0 before one was."""
        return median(self._described) if self._described else 0.0

    def ratio(self, width: int) -> float | None:
        """How many plain steps such a pass takes, of a row about as long as those at load; None where nothing is known.
        It may be guessed."""
        times = self._times(NUM_MEASURED_TOKENS.bit_length())
        return _between(times, sorted(times), width) if times else None

    def seconds(self, width: int, num_tokens: int) -> float | None:
        """What such a pass takes; None before anything was measured. One that is wider than any is taken for the widest
        one."""
        table = self._table(num_tokens)
        return table[min(width, len(table)) - 1] if table is not None else None

    def fastest_wider(self, num_tokens: int) -> float | None:
        """What the fastest pass of several tokens takes; None where nothing was measured, or none may have several."""
        table = self._table(num_tokens)
        return min(table[1 : self.max_width], default=None) if table is not None else None

    def seconds_more(self, width: int, num_tokens: int) -> float:
        """How much longer such a pass takes than a plain step; 0 before anything was measured."""
        return (self.seconds(width, num_tokens) or 0.0) - (self.seconds(1, num_tokens) or 0.0)

    def num_worth(self, chances: Sequence[float], num_tokens: int, num_again: int, *, goes_back: bool) -> int:
        """How many drafted tokens give most tokens a second, 0 where a plain step gives as many.

        `chances[i]`: how likely token i is where all before it are right. `num_again` tokens have to go through the
        model in any case, before the pending one. `goes_back`: where a token is wrong, all right ones pass again.
        """
        table = self._table(num_tokens)
        if table is None:
            return 0
        best, best_rate = 0, 1 / table[min(num_again, len(table) - 1)]
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

    def is_worth_reading(self, chance: float, chances: Sequence[float], num_tokens: int) -> bool:
        """Whether to wait for the pending token, which is the drafted one by this chance: where it is another, the next
        pass was not described meanwhile, and nothing came of it."""
        table = self._table(num_tokens)
        if table is None or not chances:
            return False
        expected, reached = 1.0, 1.0
        for each in chances:
            reached *= each
            expected += reached
        saved_seconds = expected * table[0] - table[min(len(chances), len(table) - 1)]
        return chance * saved_seconds > (1 - chance) * self.described_seconds

    def _table(self, num_tokens: int) -> list[float] | None:
        """Seconds of passes of 1, 2, ... tokens, as many as a pass may have at least; on lines between those that were
        measured."""
        place = num_tokens.bit_length()
        if place not in self._tables:
            self._tables[place] = self._tabled(place)
        return self._tables[place]

    def _tabled(self, place: int) -> list[float] | None:
        if (seconds := self._plain_near(place)) is None:
            return None
        times = self._times(place)
        widths = sorted(times)
        most = max(MAX_PASS_TOKENS, *widths)
        return [_between(times, widths, width) * seconds for width in range(1, most + 1)]

    def _times(self, place: int) -> dict[int, float]:
        """How many plain steps passes take by width. What was not tried at about this length costs as many as at the
        next one where it was, and what was not tried at all as many as is guessed."""
        times = dict(self._guessed)
        for length in sorted(self._medians, key=lambda other: (abs(other - place), other), reverse=True):
            if (plain := self._plain_near(length)) is not None:
                times |= {width: found / plain for width, found in self._medians[length].items()}
        return times

    def _plain_near(self, place: int) -> float | None:
        """Seconds of a plain step at the nearest length where one was measured."""
        plain = {length: near[1] for length, near in self._medians.items() if 1 in near}
        return plain[min(plain, key=lambda other: (abs(other - place), other))] if plain else None


def pays(ratios: Mapping[int, float]) -> bool:
    """Whether any pass takes less than as many plain steps, by how many it takes."""
    return any(ratio < (1 - LEAST_GAIN) * width for width, ratio in ratios.items() if width > 1)


def _fastest(
    module: Callable[..., Any],
    new_caches: Callable[[], list[Any]],
    widths: Sequence[int],
    num_rounds: int = NUM_ROUNDS,
) -> dict[int, float]:
    """Seconds of the fastest of some passes of each width, in turns, so that each meets what else the machine does.
    The first may compile, and a width that something else delayed would be turned off: it would never be tried."""
    caches, seconds = new_caches(), {width: list[float]() for width in widths}
    for _ in range(num_rounds):
        for width in widths:
            started = perf_counter()
            logits = module(mx.array([[1 + (37 * place) % 89 for place in range(width)]]), cache=caches)
            mx.eval(mx.argmax(logits[0], axis=-1), held_arrays(caches))
            seconds[width].append(perf_counter() - started)
    return {width: min(taken) for width, taken in seconds.items()}


def _ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    """How many plain steps such passes take. None takes longer than a wider one: what is guessed too cheap is tried and
    measured, what is guessed too dear never is."""
    return {
        width: max(1.0, min(taken for wider, taken in seconds.items() if wider >= width) / seconds[1])
        for width in seconds
    }


def _between(known: dict[int, float], widths: Sequence[int], width: int) -> float:
    """On the line between the two nearest; beyond the widest as much a token as there."""
    low = max(each for each in widths if each <= width)
    high = next((each for each in widths if each >= width), None)
    if high is None:
        return known[low] * width / low
    return known[low] + (known[high] - known[low]) * (width - low) / max(1, high - low)
