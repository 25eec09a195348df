"""What one row of 8k tokens costs three short ones: while it decodes, which has a bound, and while it is prefilled.

On the tiny model, where a step over 8k tokens costs many times one over a few, so that padding would show most. There
a step of the short rows costs more with every token of their own, too, so they are compared with themselves at the same
length, between a window before and one behind. How well that works is shown by the same windows without a long row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.client import Client
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
    """Paces of the short rows: alone before and after, and between, while a long one is prefilled and as it decodes."""

    before: Pace
    prefills: Sequence[Pace]
    between: Pace
    after: Pace

    def slowdown(self, pace: Pace) -> float:
        """That pace : the pace alone at the same length."""
        return pace.seconds / self.alone(pace)

    def alone(self, pace: Pace) -> float:
        """Seconds per delta that they would have had alone where that pace was measured."""
        share = (pace.num_deltas - self.before.num_deltas) / (self.after.num_deltas - self.before.num_deltas)
        return self.before.seconds + share * (self.after.seconds - self.before.seconds)


def run(num_rounds: int) -> list[Figure]:
    """How many times slower the short rows are than alone, once the long one decodes and while it is prefilled."""
    with open_rig(TINY) as rig:
        # One long prompt for all rounds: where the server keeps its KV, only the first round has to prefill it.
        long = rig.prompts.make(LONG_TOKENS)
        beside, without = zip(*((_round(rig, long), _round(rig, None)) for _ in range(num_rounds)), strict=True)
    [prefill] = beside[0].prefills
    return [
        Figure(
            "mixed_lengths",
            "3 short rows beside a decoding 8k row : alone at the same length",
            "",
            tuple(each.slowdown(each.between) for each in beside),
            Bound("at most", 1.5),
            _absolute(beside),
        ),
        Figure(
            "mixed_lengths",
            "control: the same without the 8k row",
            "",
            tuple(each.slowdown(each.between) for each in without),
            None,
            _absolute(without),
        ),
        Figure(
            "mixed_lengths",
            "3 short rows beside its prefill : alone at the same length",
            "",
            (beside[0].slowdown(prefill),),
            None,
            f"{1 / prefill.seconds:.1f} tokens/s",
        ),
    ]


def pace(arrivals: Sequence[float], window: Window) -> Pace:
    """The pace of deltas that arrived at these times, of whichever stream."""
    start, end = window
    num_before, num_within = sum(at < start for at in arrivals), sum(start <= at < end for at in arrivals)
    return Pace((end - start) / num_within, num_before + num_within / 2)


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
    prefills = [pace(arrivals, (stream.sent_at, stream.first_text_at or 0.0)) for stream in neighbours]
    return Round(pace(arrivals, before), prefills, pace(arrivals, between), pace(arrivals, after))


def _absolute(rounds: Sequence[Round]) -> str:
    alone = median(1 / each.alone(each.between) for each in rounds)
    return f"{median(1 / each.between.seconds for each in rounds):.1f} : {alone:.1f} tokens/s"
