"""Tokens per second of 1, 4 and 8 streams over HTTP, against bare `BatchGenerator` on prompts of the same length.

On the slow model, whose decode step takes 10 ms or more, as that of a model in real use.
"""

from statistics import median

from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from benchmarks.slices import answer_pair
from kvserve.demo.build import SLOW

NUM_STREAMS = (1, 4, 8)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 192


def run(num_rounds: int) -> list[Figure]:
    """One figure per number of streams."""
    with open_rig(SLOW) as rig:
        return [_measure(rig, num_streams, num_rounds) for num_streams in NUM_STREAMS]


def _measure(rig: Rig, num_streams: int, num_rounds: int) -> Figure:
    http, bare = answer_pair(rig, num_streams, PROMPT_TOKENS, ANSWER_TOKENS, num_rounds)
    num_tokens = num_streams * ANSWER_TOKENS
    step_ms = 1000 * median(bare) / ANSWER_TOKENS
    return Figure(
        "throughput",
        f"tokens per second over HTTP : bare, {num_streams} stream{'s' if num_streams > 1 else ''}",
        "",
        tuple(b / h for h, b in zip(http, bare, strict=True)),
        Bound("at least", 0.9),
        f"{num_tokens / median(http):.1f} : {num_tokens / median(bare):.1f} tokens/s, bare step {step_ms:.1f} ms",
    )
