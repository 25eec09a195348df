"""What one row of 8k tokens costs three short ones: while it decodes, which has a bound, and while it is prefilled.

On the tiny model, where a step over 8k tokens costs many times one over a few, so that padding would show most. There
a step of the short rows costs more with every token of their own, too, so they are compared with themselves at the same
length, between a window before and one behind. How well that works is shown by the same windows without a long row,
and by the window behind the long row : those without one: what it leaves behind must not slow that one down either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.client import BenchmarkError, Client
from benchmarks.figure import Bound, Figure
from benchmarks.prompts import Prompt
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import TINY

NUM_SHORT = 3
SHORT_TOKENS = 64
LONG_TOKENS = 8192
WINDOW_SECONDS = 3.0
HANG_UP_SECONDS = 0.3

type Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that one delta took, over all streams of a window, and how many all had in the middle of it."""

    seconds: float
    num_deltas: float


@dataclass(frozen=True, slots=True)
class Round:
    """When the deltas of the short rows arrived, of whichever row, and the windows: alone before and after, in between
    beside a long row that decodes, and while that one was prefilled."""

    arrivals: Sequence[float]
    before: Window
    between: Window
    after: Window
    prefill: Window | None = None

    def slowdown(self, pace: Pace) -> float:
        """That pace : the pace alone at the same length."""
        return pace.seconds / self.alone(pace.num_deltas)

    def alone(self, num_deltas: float) -> float:
        """Seconds per delta that they would have had alone once they had so many."""
        before, after = self.pace(self.before), self.pace(self.after)
        share = (num_deltas - before.num_deltas) / (after.num_deltas - before.num_deltas)
        return before.seconds + share * (after.seconds - before.seconds)

    def pace(self, window: Window) -> Pace:
        """What was measured in one of the windows. Raises BenchmarkError where nothing arrived."""
        start, end = window
        num_before = sum(at < start for at in self.arrivals)
        num_within = sum(start <= at < end for at in self.arrivals)
        if not num_within:
            raise BenchmarkError("the short rows said nothing")
        return Pace((end - start) / num_within, num_before + num_within / 2)


def run(num_rounds: int) -> list[Figure]:
    """How many times slower the short rows are than alone, once the long one decodes and while it is prefilled."""
    with open_rig(TINY) as rig:
        # One long prompt for all rounds: where the server keeps its KV, only the first round has to prefill it.
        long = rig.prompts.make(LONG_TOKENS)
        without, beside = zip(*((_round(rig, None), _round(rig, long)) for _ in range(num_rounds)), strict=True)
    return [
        Figure(
            "mixed_lengths",
            "3 short rows beside a decoding 8k row : alone at the same length",
            "",
            tuple(each.slowdown(each.pace(each.between)) for each in beside),
            Bound("at most", 1.5),
            _absolute(beside),
        ),
        Figure(
            "mixed_lengths",
            "control: the same without the 8k row",
            "",
            tuple(each.slowdown(each.pace(each.between)) for each in without),
            None,
            _absolute(without),
        ),
        Figure(
            "mixed_lengths",
            "control: behind the 8k row : without it, at the same length",
            "",
            tuple(one.slowdown(each.pace(each.after)) for one, each in zip(without, beside, strict=True)),
            None,
            "",
        ),
        Figure(
            "mixed_lengths",
            "3 short rows beside its prefill : alone at the same length",
            "",
            tuple(each.slowdown(each.pace(each.prefill)) for each in beside[:1] if each.prefill is not None),
            None,
            "the first time only: then its KV is known",
        ),
    ]


def _round(rig: Rig, long: Prompt | None) -> Round:
    """The short rows alone, beside the long one if there is one, and alone again."""
    shorts = [rig.prompts.make(SHORT_TOKENS) for _ in range(NUM_SHORT)]
    with Client(rig.port) as client:
        streams = [client.chat(prompt.text, 32768) for prompt in shorts]
        client.run_until(lambda: all(stream.first_text_at is not None for stream in streams))
        before = client.run_for(WINDOW_SECONDS)
        neighbours = [client.chat(long.text, 32768)] if long is not None else []
        client.run_until(lambda: all(stream.first_text_at is not None for stream in neighbours))
        between = client.run_for(WINDOW_SECONDS)
        client.close(neighbours)
        client.run_for(HANG_UP_SECONDS)
        after = client.run_for(WINDOW_SECONDS)
    rig.settle()
    arrivals = [at for stream in streams for at, _ in stream.texts()]
    prefills = [(stream.sent_at, stream.first_text_at or 0.0) for stream in neighbours]
    return Round(arrivals, before, between, after, *prefills)


def _absolute(rounds: Sequence[Round]) -> str:
    between = [each.pace(each.between) for each in rounds]
    alone = [each.alone(pace.num_deltas) for each, pace in zip(rounds, between, strict=True)]
    return f"{1000 * median(pace.seconds for pace in between):.2f} : {1000 * median(alone):.2f} ms per token"
