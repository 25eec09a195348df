"""What the server itself costs per token: on the tiny model, where the model's share is small."""

from statistics import median

from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from benchmarks.slices import answer_pair
from kvserve.demo.build import TINY

NUM_STREAMS = (1, 8)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 512


def run(num_rounds: int) -> list[Figure]:
    """One figure per number of streams."""
    with open_rig(TINY) as rig:
        return [_measure(rig, num_streams, num_rounds) for num_streams in NUM_STREAMS]


def _measure(rig: Rig, num_streams: int, num_rounds: int) -> Figure:
    http, bare = answer_pair(rig, num_streams, PROMPT_TOKENS, ANSWER_TOKENS, num_rounds)
    per_token_ms = 1000 / (num_streams * ANSWER_TOKENS)
    return Figure(
        "own_time",
        f"(HTTP - bare) per token, {num_streams} stream{'s' if num_streams > 1 else ''}",
        "ms",
        tuple(per_token_ms * (h - b) for h, b in zip(http, bare, strict=True)),
        Bound("at most", 0.5),
        f"{per_token_ms * median(http):.3f} - {per_token_ms * median(bare):.3f} ms",
    )
