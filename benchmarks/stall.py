"""The longest silence of a running stream while another request's 8k-token prompt is prefilled.

On the tiny model: its stream is the densest, and the length of a chunk follows time, not the model.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Silence:
    """The longest gap of a running stream while a long prompt was prefilled, how long that took, both in seconds, and
    the stream's deltas meanwhile."""

    seconds: float
    prefill_seconds: float
    num_deltas: int


def run(num_rounds: int) -> list[Figure]:
    """The gap in chunks of the length that the engine aims at, and in seconds."""
    with open_rig(TINY) as rig:
        found = [longest_silence(rig) for _ in range(num_rounds)]
    gaps = tuple(each.seconds for each in found)
    absolute = (
        f"prefill beside the stream {median(each.prefill_seconds for each in found):.1f} s, "
        f"{median(each.num_deltas for each in found):.0f} deltas meanwhile"
    )
    chunks = tuple(gap / CHUNK_SECONDS_BESIDE_STREAMS for gap in gaps)
    name = "longest gap beside an 8k prefill"
    return [
        Figure("stall", name, "chunks", chunks, Bound("at most", 2), f"chunk {CHUNK_SECONDS_BESIDE_STREAMS} s"),
        Figure("stall", name, "s", gaps, Bound("at most", 0.5), absolute),
    ]


def longest_silence(rig: Rig) -> Silence:
    """One stream with one long prompt beside it; both are gone behind it."""
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
    return Silence(max(b - a for a, b in pairwise(edges)), end - start, len(inside))
