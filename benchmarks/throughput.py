"""Tokens per second of 1, 4 and 8 streams over HTTP, against bare `BatchGenerator` on the same prompts."""

from statistics import median

from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig, pairs
from kvserve.demo.build import SLOW

NUM_STREAMS = (1, 4, 8)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 192


def run(num_rounds: int) -> list[Figure]:
    """One figure per number of streams."""
    with open_rig(SLOW) as rig:
        return [_measure(rig, num_streams, num_rounds) for num_streams in NUM_STREAMS]


def _measure(rig: Rig, num_streams: int, num_rounds: int) -> Figure:
    num_tokens = num_streams * ANSWER_TOKENS

    def http() -> float:
        prompts = [rig.prompts.make(PROMPT_TOKENS) for _ in range(num_streams)]
        seconds = rig.answer_seconds(prompts, ANSWER_TOKENS)
        rig.settle()
        return num_tokens / seconds

    def bare() -> float:
        prompts = [rig.prompts.make(PROMPT_TOKENS).ids for _ in range(num_streams)]
        return num_tokens / rig.bare.generation_seconds(prompts, ANSWER_TOKENS)

    http(), bare()  # kernels are compiled at their first use
    found = pairs(num_rounds, http, bare)
    step_ms = 1000 * num_streams / median(b for _, b in found)
    return Figure(
        "throughput",
        f"tokens/s over HTTP : bare, {num_streams} stream{'s' if num_streams > 1 else ''}",
        "",
        tuple(h / b for h, b in found),
        Bound("at least", 0.9),
        f"{median(h for h, _ in found):.1f} : {median(b for _, b in found):.1f} tokens/s, bare step {step_ms:.1f} ms",
    )
