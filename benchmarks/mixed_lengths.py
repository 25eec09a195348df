"""What one row of 8k tokens costs three short ones: while it decodes, which has a bound, and while it is prefilled.

On the tiny model, where a step over 8k tokens costs many times one over a few, so that padding would show most.
"""

from statistics import median

from benchmarks.client import Client, Stream
from benchmarks.figure import Bound, Figure
from benchmarks.prompts import Prompt
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import TINY

NUM_SHORT = 3
SHORT_TOKENS = 64
LONG_TOKENS = 8192
WINDOW_SECONDS = 3.0

type Window = tuple[float, float]


def run(num_rounds: int) -> list[Figure]:
    """How many times slower the short rows are than alone, once the long one decodes and while it is prefilled."""
    with open_rig(TINY) as rig:
        # One long prompt for all rounds: where the server keeps its KV, only the first round has to prefill it.
        long = rig.prompts.make(LONG_TOKENS)
        found = [_round(rig, long) for _ in range(num_rounds)]
    alone, decoding = median(a for a, _, _ in found), median(d for _, _, d in found)
    alone_first, prefilling, _ = found[0]
    return [
        Figure(
            "mixed_lengths",
            "3 short rows alone : beside a decoding 8k row",
            "",
            tuple(a / d for a, _, d in found),
            Bound("at most", 1.5),
            f"{alone:.1f} : {decoding:.1f} tokens/s",
        ),
        Figure(
            "mixed_lengths",
            "3 short rows alone : beside its prefill",
            "",
            (alone_first / prefilling,),
            None,
            f"{alone_first:.1f} : {prefilling:.1f} tokens/s",
        ),
    ]


def _round(rig: Rig, long: Prompt) -> tuple[float, float, float]:
    """Deltas per second of the short rows: alone (mean of before and after), beside the prefill, beside the decode."""
    shorts = [rig.prompts.make(SHORT_TOKENS) for _ in range(NUM_SHORT)]
    with Client(rig.port) as client:
        streams = [client.chat(prompt.text, 32768) for prompt in shorts]
        client.run_until(lambda: all(stream.first_text_at is not None for stream in streams))
        before = client.run_for(WINDOW_SECONDS)
        longer = client.chat(long.text, 32768)
        client.run_until(lambda: longer.first_text_at is not None)
        prefill = longer.sent_at, longer.first_text_at or 0.0
        beside = client.run_for(WINDOW_SECONDS)
        client.close([longer])
        client.run_for(0.3)
        after = client.run_for(WINDOW_SECONDS)
    rig.settle()
    alone = (_rate(streams, before) + _rate(streams, after)) / 2
    return alone, _rate(streams, prefill), _rate(streams, beside)


def _rate(streams: list[Stream], window: Window) -> float:
    start, end = window
    return sum(start <= at < end for stream in streams for at, _ in stream.texts()) / (end - start)
