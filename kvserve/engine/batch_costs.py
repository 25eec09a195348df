"""What a pass of several rows takes that have several tokens each, and how many drafted tokens of each row are worth
one. It knows no tokens and no caches.

A pass of rows takes about as many plain steps as one of as many tokens of a single row, as the same weights are read
for as many: so it is guessed, by what was measured at load, from the first plain step of so many rows on and until such
passes have run (`PassCosts.guess`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from kvserve.engine.pass_costs import MAX_PASS_TOKENS, MEASURED_WIDTHS, PassCosts

MAX_BATCH_TOKENS = 2 * MAX_PASS_TOKENS
"""No pass of several rows has more tokens, those of all rows together."""

MAX_SLOWDOWN = 1.05
"""A row that nothing is drafted for waits for the wider pass of the others. None may be expected to get its tokens
later, however much the others gain: as much as this is within what measuring is off."""


@dataclass(frozen=True, slots=True)
class Hope:
    """How likely a row's drafted tokens are. `chances[i]`: where all before it are right. They count for nothing where
    the pending token, which may not have been read, is not the one that the draft goes on from: it is by `is_given`."""

    chances: Sequence[float] = ()
    is_given: float = 1.0


class BatchCosts:
    """Seconds of passes by the number of rows in them. Belongs to the engine thread."""

    def __init__(self, single: PassCosts) -> None:
        """`single`: what passes of one row cost."""
        self._single = single
        self._of_rows: dict[int, PassCosts] = {}

    def of(self, num_rows: int) -> PassCosts:
        """Of passes of so many rows; its widths are the tokens of each row."""
        if num_rows not in self._of_rows:
            costs = self._of_rows[num_rows] = PassCosts(min(self._single.max_width, MAX_BATCH_TOKENS // num_rows))
            costs.guess(dict(self._guessed(num_rows)))
        return self._of_rows[num_rows]

    def note_described(self, seconds: float) -> None:
        """Learn how long it takes to describe a pass, which has as many parts whatever rows it has."""
        self._single.note_described(seconds)

    def num_worth(self, hopes: Sequence[Hope], num_tokens: int) -> int:
        """How many drafted tokens of each row, one hope for each, give most tokens a second; 0 where plain steps give
        as many, or a row would be expected to lose too much. The longest row has `num_tokens`."""
        return self._best(hopes, num_tokens)[0]

    def may_leave_one_out(self, num_rows: int, num_tokens: int) -> bool:
        """Whether any wider pass of so many rows is fair to a row that nothing is drafted for."""
        costs = self.of(num_rows)
        plain, fastest = costs.seconds(1, num_tokens), costs.fastest_wider(num_tokens)
        return plain is not None and fastest is not None and fastest <= MAX_SLOWDOWN * plain

    def is_worth_reading(self, hopes: Sequence[Hope], num_tokens: int) -> bool:
        """Whether to wait for the pending tokens: where one is not what its row's draft goes on from, no pass may be
        fair to that row any more, and the next one was not described meanwhile. So it is worth at least what it is
        where all of them are, less that where not."""
        count, saved_seconds = self._best([Hope(hope.chances) for hope in hopes], num_tokens)
        chance_of_all = prod(hope.is_given for hope in hopes if hope.chances)
        lost_seconds = self._single.described_seconds
        return count > 0 and chance_of_all * saved_seconds > (1 - chance_of_all) * lost_seconds

    def _guessed(self, num_rows: int) -> Iterator[tuple[int, float]]:
        """How many plain steps of so many rows their passes take, by width."""
        for width in MEASURED_WIDTHS:
            plain, ratio = (self._single.ratio(num_rows * each) for each in (1, width))
            if plain is not None and ratio is not None and num_rows * width <= MAX_BATCH_TOKENS:
                yield width, ratio / plain

    def _best(self, hopes: Sequence[Hope], num_tokens: int) -> tuple[int, float]:
        """The best number of drafted tokens, and the seconds that it is expected to save."""
        costs, num_rows = self.of(len(hopes)), len(hopes)
        plain = costs.seconds(1, num_tokens)
        if plain is None:
            return 0, 0.0
        best, best_rate, saved_seconds = 0, num_rows / plain, 0.0
        most = min(costs.max_width - 1, max(len(hope.chances) for hope in hopes))
        for count, expected in enumerate(_expectations(hopes, most), 1):
            seconds = costs.seconds(1 + count, num_tokens) or plain
            is_fair = seconds <= MAX_SLOWDOWN * plain * min(expected)
            if is_fair and sum(expected) / seconds > best_rate:
                best, best_rate = count, sum(expected) / seconds
                saved_seconds = sum(expected) * plain / num_rows - seconds
        return best, saved_seconds


def _expectations(hopes: Sequence[Hope], most: int) -> Iterator[list[float]]:
    """How many tokens of each row 1, 2, ... drafted ones are expected to give."""
    expected, reached = [1.0 for _ in hopes], [hope.is_given for hope in hopes]
    for place in range(most):
        for row, hope in enumerate(hopes):
            if place < len(hope.chances):
                reached[row] *= hope.chances[place]
                expected[row] += reached[row]
        yield expected
