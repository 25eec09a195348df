"""Two clocks of fairness: where a machine that divides itself equally among all prompts would stand, and how long
streams are to step for the time that prompts took. Numbers only; the scheduler says what was computed.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

NUM_OWN_STEPS = 15
LEAST_COUNTED = 0.9
"""Of a step beside prompts at least so much counts: what slows it more than that slows the chunks of prompts, too."""


class FairClock[R: Hashable]:
    """An equal-share machine beside the real one: it does as much work, but a little of every prompt at a time.

    Its clock shows how much each row that entered at 0 would have got. A row that enters at `now` with so much work is
    through at `now + work`, whoever comes later. Rows that are computed in the order of these times are through no
    later than there (the fair sojourn protocol: Friedman and Henderson, 2003). A row that was quicker stays until the
    clock has passed it: else those behind it would be promised more than there is.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entered: dict[R, float] = {}
        self._finish: dict[R, float] = {}
        self._ahead: list[float] = []

    def enter(self, row: R, work: float) -> None:
        """Add a row with so much work, all of it its own to compute."""
        self._entered[row], self._finish[row] = self.now, self.now + work
        self._ahead.append(self.now + work)

    def finish(self, row: R) -> float:
        """Where the clock stands when equal shares end this row; where it stands now for one that never entered."""
        return self._finish.get(row, self.now)

    def correct(self, row: R, work: float) -> None:
        """Set how much work a row has: more than was known when it entered, or less."""
        if row in self._entered and self._entered[row] + work > self._finish[row]:
            self._move(row, self._entered[row] + work)

    def leave(self, row: R, undone: float = 0.0) -> None:
        """Remove a row of whose work so much is not done; nothing where it is not here."""
        if row not in self._entered:
            return
        if undone > 0:
            self._move(row, self._finish[row] - undone)
        del self._entered[row], self._finish[row]

    def advance(self, work: float) -> None:
        """Note that the real machine did so much work on prompts."""
        self._ahead = sorted(finish for finish in self._ahead if finish > self.now)
        while self._ahead and work > 0:
            needed = (self._ahead[0] - self.now) * len(self._ahead)
            if needed > work:
                self.now += work / len(self._ahead)
                return
            work -= needed
            self.now = self._ahead.pop(0)

    def rest(self) -> None:
        """Drop what is ahead on the clock: no row has work left, and the next one has the machine to itself."""
        self._ahead.clear()

    def _move(self, row: R, finish: float) -> None:
        if self._finish[row] in self._ahead:
            self._ahead.remove(self._finish[row])
        self._finish[row] = finish
        if finish > self.now:
            self._ahead.append(finish)


@dataclass(slots=True)
class StreamShare:
    """What streams are owed of the time that prompts take beside them: `share` of all of it, a number below 1.

    They keep that share of their own pace: a step that is slower behind a chunk, which left nothing of theirs in the
    processor's caches, counts as one of those that they took alone. `slice_seconds`: how long prompts compute since the
    last step.
    """

    share: float
    owed_seconds: float = 0.0
    slice_seconds: float = 0.0
    _num_rows: int = 0
    _own_steps: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_OWN_STEPS))

    def prefilled(self, seconds: float, *, is_beside_streams: bool) -> None:
        """Note how long a prompt was computed. Where no client reads, streams that were owed something are gone."""
        self.slice_seconds += seconds
        if is_beside_streams:
            self.owed_seconds += seconds * self.share / (1 - self.share)
        else:
            self.owed_seconds = 0.0

    def stepped(self, num_rows: int, seconds: float, *, is_beside_prompts: bool) -> None:
        """Note how long so many streams stepped; what they had too much is a prompt's while there is one."""
        self.slice_seconds = 0.0
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._own_steps.clear()
        if not is_beside_prompts:
            self._own_steps.append(seconds)
        self.owed_seconds = self.owed_seconds - self._counted(seconds) if is_beside_prompts else 0.0

    def _counted(self, seconds: float) -> float:
        if not self._own_steps:
            return seconds
        return max(min(seconds, median(self._own_steps)), LEAST_COUNTED * seconds)
