"""Time to the first token of a 2k-token prompt over HTTP, against the same prefill on bare mlx-lm.

On the tiny model, where the server's own part weighs most. A processor computes long chunks slower than short ones
(the masked half of the attention is computed too), so bare mlx-lm is timed with chunks as long as the server's as well.
"""

from statistics import median

from benchmarks.bare import PREFILL_CHUNK_TOKENS
from benchmarks.client import Client
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig, rounds
from kvserve.demo.build import TINY

PROMPT_TOKENS = 2048
SHORT_CHUNK_TOKENS = 512


def run(num_rounds: int) -> list[Figure]:
    """Against chunks of 2048 tokens, as mlx-lm has them, and against shorter ones."""
    with open_rig(TINY) as rig:
        measurements = (
            lambda: _over_http(rig),
            lambda: rig.bare.first_token_seconds(rig.prompts.make(PROMPT_TOKENS).ids, PREFILL_CHUNK_TOKENS),
            lambda: rig.bare.first_token_seconds(rig.prompts.make(PROMPT_TOKENS).ids, SHORT_CHUNK_TOKENS),
        )
        http, bare, short = rounds(num_rounds, *measurements)
    return [
        _figure(http, bare, PREFILL_CHUNK_TOKENS, Bound("at most", 1.15)),
        _figure(http, short, SHORT_CHUNK_TOKENS, None),
    ]


def _over_http(rig: Rig) -> float:
    text = rig.prompts.make(PROMPT_TOKENS).text
    with Client(rig.port) as client:
        stream = client.chat(text, 2)
        client.run_until(lambda: stream.first_text_at is not None)
    rig.settle()
    return (stream.first_text_at or 0.0) - stream.sent_at


def _figure(http: list[float], bare: list[float], chunk_tokens: int, bound: Bound | None) -> Figure:
    return Figure(
        "first_token",
        f"first token of a 2k prompt over HTTP : bare in chunks of {chunk_tokens}",
        "",
        tuple(h / b for h, b in zip(http, bare, strict=True)),
        bound,
        f"{1000 * median(http):.0f} : {1000 * median(bare):.0f} ms",
    )
