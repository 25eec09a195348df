"""The longest silence of a running stream while another request's 8k-token prompt is prefilled.

On the tiny model: its stream is the densest, and the length of a chunk follows time, not the model.
"""

from itertools import pairwise
from statistics import median

from benchmarks.client import BenchmarkError, Client
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import TINY
from kvserve.engine.policy import CHUNK_SECONDS_BESIDE_STREAMS

SHORT_TOKENS = 64
LONG_TOKENS = 8192
CALM_SECONDS = 1.0


def run(num_rounds: int) -> list[Figure]:
    """The gap in chunks of the length that the engine aims at, and in seconds."""
    with open_rig(TINY) as rig:
        found = [_round(rig) for _ in range(num_rounds)]
    gaps = tuple(gap for gap, _, _ in found)
    absolute = (
        f"prefill beside the stream {median(seconds for _, seconds, _ in found):.1f} s, "
        f"{median(num for _, _, num in found):.0f} deltas meanwhile"
    )
    chunks = tuple(gap / CHUNK_SECONDS_BESIDE_STREAMS for gap in gaps)
    name = "longest gap beside an 8k prefill"
    return [
        Figure("stall", name, "chunks", chunks, Bound("at most", 2), f"chunk {CHUNK_SECONDS_BESIDE_STREAMS} s"),
        Figure("stall", name, "s", gaps, Bound("at most", 0.5), absolute),
    ]


def _round(rig: Rig) -> tuple[float, float, int]:
    """Longest gap and prefill in seconds, and the running stream's deltas in between."""
    short, long = rig.prompts.make(SHORT_TOKENS), rig.prompts.make(LONG_TOKENS)
    with Client(rig.port) as client:
        running = client.chat(short.text, 32768)
        client.run_until(lambda: running.first_text_at is not None)
        client.run_for(CALM_SECONDS)
        prefilled = client.chat(long.text, 2)
        client.run_until(lambda: prefilled.first_text_at is not None)
        client.run_for(CALM_SECONDS / 2)
    start, end = prefilled.sent_at, prefilled.first_text_at or 0.0
    times = [at for at, _ in running.texts()]
    inside = [at for at in times if start <= at <= end]
    if not inside:
        raise BenchmarkError("the running stream was silent for the whole prefill")
    edges = [max(at for at in times if at < start), *inside, min(at for at in times if at > end)]
    rig.settle()
    return max(b - a for a, b in pairwise(edges)), end - start, len(inside)
