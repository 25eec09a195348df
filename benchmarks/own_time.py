"""What the server itself costs per token: on the tiny model, where the model's share is small."""

from statistics import median

from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig, pairs
from kvserve.demo.build import TINY

NUM_STREAMS = (1, 8)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 512


def run(num_rounds: int) -> list[Figure]:
    """One figure per number of streams."""
    with open_rig(TINY) as rig:
        return [_measure(rig, num_streams, num_rounds) for num_streams in NUM_STREAMS]


def _measure(rig: Rig, num_streams: int, num_rounds: int) -> Figure:
    def http() -> float:
        prompts = [rig.prompts.make(PROMPT_TOKENS) for _ in range(num_streams)]
        seconds = rig.answer_seconds(prompts, ANSWER_TOKENS)
        rig.settle()
        return seconds

    def bare() -> float:
        prompts = [rig.prompts.make(PROMPT_TOKENS).ids for _ in range(num_streams)]
        return rig.bare.generation_seconds(prompts, ANSWER_TOKENS)

    http(), bare()  # kernels are compiled at their first use
    found = [(1000 * h, 1000 * b) for h, b in pairs(num_rounds, http, bare)]
    num_tokens = num_streams * ANSWER_TOKENS
    http_ms, bare_ms = (median(side) / num_tokens for side in zip(*found, strict=True))
    return Figure(
        "own_time",
        f"(HTTP - bare) per token, {num_streams} stream{'s' if num_streams > 1 else ''}",
        "ms",
        tuple((h - b) / num_tokens for h, b in found),
        Bound("at most", 0.5),
        f"{http_ms:.3f} - {bare_ms:.3f} ms",
    )
