"""A turn that adds 200 tokens to 16k known ones, over HTTP, against the work that no server can save.

That is: putting the stored pieces of KV together, prefilling what is new at that depth, one decode step for the first
token. On the tiny model: on a processor its turn takes as long as that of a small model in real use on a GPU.
"""

from statistics import median

from benchmarks.bare import KvPieces
from benchmarks.client import BenchmarkError, Client, Message
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig, rounds
from kvserve.cache.checkpoints import MAX_STRIDE_TOKENS
from kvserve.demo.build import TINY

KNOWN_TOKENS = 16384
NEW_TOKENS = 200
TOLERANCE_TOKENS = 24
MESSAGE_TOKENS = 500


def run(num_rounds: int) -> list[Figure]:
    """Every round goes on from the same 16k tokens with another message."""
    with open_rig(TINY) as rig:
        known = _conversation(rig)
        num_known = len(rig.prompts.encode(known))
        # The same number of pieces as the server stores: a prefill keeps what it has every so many tokens.
        stored = rig.bare.stored_pieces(num_known, MAX_STRIDE_TOKENS)
        _over_http(rig, known, num_known=0)
        measurements = (lambda: _over_http(rig, known, num_known), lambda: _bare(rig, stored))
        http, bare = rounds(num_rounds, *measurements)
    return [
        Figure(
            "warm_turn",
            f"first token of a turn of {NEW_TOKENS} new tokens on 16k known ones : bare",
            "",
            tuple(h / b for h, b in zip(http, bare, strict=True)),
            Bound("at most", 1.3),
            f"{1000 * median(http):.0f} : {1000 * median(bare):.0f} ms",
        )
    ]


def _conversation(rig: Rig) -> list[Message]:
    """System prompt, then user and assistant in turns, up to about the number of known tokens."""
    messages = [rig.prompts.message("system", 8 * MESSAGE_TOKENS)]
    while len(rig.prompts.encode(messages)) < KNOWN_TOKENS:
        messages += [rig.prompts.message(role, MESSAGE_TOKENS) for role in ("user", "assistant")]
    return messages


def _over_http(rig: Rig, known: list[Message], num_known: int) -> float:
    """Seconds to the first token. Raises BenchmarkError if the server did not know what it should have known."""
    new = rig.prompts.message("user", NEW_TOKENS - 20)
    with Client(rig.port) as client:
        stream = client.chat([*known, new], 2)
        client.run_until(lambda: stream.ended_at is not None)
    usage = stream.usage()
    num_new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    if num_known and abs(num_new - NEW_TOKENS) > TOLERANCE_TOKENS:
        raise BenchmarkError(f"{num_new} tokens were new to the server instead of about {NEW_TOKENS}")
    rig.settle()
    return (stream.first_text_at or 0.0) - stream.sent_at


def _bare(rig: Rig, stored: KvPieces) -> float:
    return rig.bare.warm_first_token_seconds(stored, rig.prompts.make(NEW_TOKENS).ids[:NEW_TOKENS])
