"""Time to the first token of a 2k-token prompt over HTTP, against the same prefill on bare mlx-lm."""

from statistics import median

from benchmarks.client import Client
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig, pairs
from kvserve.demo.build import SLOW, TINY, ModelScale

PROMPT_TOKENS = 2048
SCALES: tuple[tuple[str, ModelScale], ...] = (("slow", SLOW), ("tiny", TINY))


def run(num_rounds: int) -> list[Figure]:
    """One figure per model."""
    found = []
    for name, scale in SCALES:
        with open_rig(scale) as rig:
            found.append(_measure(rig, name, num_rounds))
    return found


def _measure(rig: Rig, name: str, num_rounds: int) -> Figure:
    def http() -> float:
        text = rig.prompts.make(PROMPT_TOKENS).text
        with Client(rig.port) as client:
            stream = client.chat(text, 2)
            client.run_until(lambda: stream.first_text_at is not None)
        rig.settle()
        return (stream.first_text_at or 0.0) - stream.sent_at

    def bare() -> float:
        return rig.bare.first_token_seconds(rig.prompts.make(PROMPT_TOKENS).ids)

    http(), bare()  # kernels are compiled at their first use
    found = pairs(num_rounds, http, bare)
    return Figure(
        "first_token",
        f"first token over HTTP : bare, 2k prompt, {name} model",
        "",
        tuple(h / b for h, b in found),
        Bound("at most", 1.15),
        f"{1000 * median(h for h, _ in found):.0f} : {1000 * median(b for _, b in found):.0f} ms",
    )
