"""One system prompt of 4k tokens, many conversations: it is held once, and agents that start together prefill it once.

Over HTTP, from what `/v1/cache` tells; the lengths of prompts are counted here.
"""

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.client import BenchmarkError, Client, Message
from benchmarks.figure import Bound, Figure
from benchmarks.prompts import num_common
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import TINY

SYSTEM_TOKENS = 4096
USER_TOKENS = 100
ANSWER_TOKENS = 32
NUM_CONVERSATIONS = 10
NUM_AGENTS = 8


def run(num_rounds: int) -> list[Figure]:
    """Bytes on a dense model, whose KV is all there is; prefilled tokens on one with recurrent states too."""
    with open_rig(TINY) as rig:
        held = [_held(rig) for _ in range(num_rounds)]
        dense = [_prefilled(rig) for _ in range(num_rounds)]
    with open_rig(TINY, "qwen3_5") as rig:
        hybrid = [_prefilled(rig) for _ in range(num_rounds)]
    return [
        Figure(
            "sharing",
            f"{NUM_CONVERSATIONS} conversations without their own tails : their 4k system prompt",
            "",
            tuple(shared / system for shared, system in held),
            Bound("at most", 1.5),
            f"{held[-1][0] / 2**20:.2f} : {held[-1][1] / 2**20:.2f} MiB",
        ),
        _once("dense", dense),
        _once("hybrid", hybrid),
    ]


def _once(kind: str, found: Sequence[tuple[int, int]]) -> Figure:
    return Figure(
        "sharing",
        f"{NUM_AGENTS} agents at once, prefilled without their own tails : 4k system prompt, {kind}",
        "",
        tuple(prefilled / system for prefilled, system in found),
        Bound("at most", 1.02),
        f"{found[-1][0]} : {found[-1][1]} tokens",
    )


def _held(rig: Rig) -> tuple[float, float]:
    """Bytes that conversations, one after the other, hold besides their own tails; bytes of what they share."""
    conversations = _conversations(rig, NUM_CONVERSATIONS)
    rig.clear_cache()
    for messages in conversations:
        _serve(rig, [messages])
    num_shared, num_own = _lengths(rig, conversations)
    bytes_per_token = rig.bare.kv_bytes_per_token
    num_own += NUM_CONVERSATIONS * ANSWER_TOKENS
    return rig.cache()["ram_bytes"] - num_own * bytes_per_token, num_shared * bytes_per_token


def _prefilled(rig: Rig) -> tuple[int, int]:
    """Tokens that agents who start together prefill besides their own; tokens that they share."""
    conversations = _conversations(rig, NUM_AGENTS)
    rig.clear_cache()
    before = rig.cache()["num_prefill_tokens"]
    _serve(rig, conversations)
    num_shared, num_own = _lengths(rig, conversations)
    return rig.cache()["num_prefill_tokens"] - before - num_own, num_shared


def _conversations(rig: Rig, number: int) -> list[list[Message]]:
    """Another system prompt each time, the same for all."""
    system = rig.prompts.message("system", SYSTEM_TOKENS)
    return [[system, rig.prompts.message("user", USER_TOKENS)] for _ in range(number)]


def _lengths(rig: Rig, conversations: Sequence[Sequence[Message]]) -> tuple[int, int]:
    """Prompt tokens that all have in common, and those that are each one's own, summed."""
    prompts = [rig.prompts.encode(messages) for messages in conversations]
    num_shared = min(num_common(one, other) for one, other in pairwise(prompts))
    return num_shared, sum(len(prompt) - num_shared for prompt in prompts)


def _serve(rig: Rig, conversations: Sequence[Sequence[Message]]) -> None:
    """Ask all at once and wait for all. Raises BenchmarkError for an answer of another length."""
    with Client(rig.port) as client:
        streams = [client.chat(messages, ANSWER_TOKENS) for messages in conversations]
        client.run_until(lambda: all(stream.ended_at is not None for stream in streams))
    if any(stream.usage()["completion_tokens"] != ANSWER_TOKENS for stream in streams):
        raise BenchmarkError("an answer was cut")
    rig.settle()
