"""What SPECULATION=auto costs where nothing can be drafted: a server with it and one without, slice by slice in turn.

Random models on random words: no draft is likely, and the looking for one is all that is left. It knows no prompt of
real text.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from benchmarks.slices import HttpAnswers, in_turns
from benchmarks.stall import Silence, longest_silence
from kvserve.demo.build import SLOW, TINY

NUM_STREAMS = (1, 4, 8)
PROMPT_TOKENS, ANSWER_TOKENS = 64, 192
OWN_STREAMS, OWN_TOKENS = (1, 8), 512
MAX_OWN_MS = 0.1
"""Of a token: a fifth of what all of the server's own time may be (`own_time.py`)."""

NAME = "nothing_drafted"


def run(num_rounds: int) -> list[Figure]:
    """The streams of `throughput` on the slow model, those of `own_time` and the gap of `stall` on the tiny one."""
    with open_rig(SLOW, speculation="auto") as auto, open_rig(SLOW, speculation="off") as off:
        figures = [speed(num, *_pairs(auto, off, num, ANSWER_TOKENS, num_rounds)) for num in NUM_STREAMS]
    with open_rig(TINY, speculation="auto") as auto, open_rig(TINY, speculation="off") as off:
        figures += [own_time(num, *_pairs(auto, off, num, OWN_TOKENS, num_rounds)) for num in OWN_STREAMS]
        return [*figures, *stall(_silences(auto, off, num_rounds))]


def _silences(auto: Rig, off: Rig, num_rounds: int) -> list[tuple[Silence, Silence]]:
    """With and without, in turn."""
    found = []
    for number in range(num_rounds):
        if number % 2:
            with_it, without = longest_silence(auto), longest_silence(off)
        else:
            without, with_it = longest_silence(off), longest_silence(auto)
        found.append((with_it, without))
    return found


def _pairs(
    auto: Rig, off: Rig, num_streams: int, num_tokens: int, num_rounds: int
) -> tuple[list[tuple[float, float]], list[dict[str, Any]]]:
    """Seconds per round, with and without, and the usages of all answers with. A round before the first is thrown away:
    kernels are compiled at their first use."""
    found, usages = [], []
    for number in range(-1, num_rounds):
        asked = [auto.prompts.make(PROMPT_TOKENS) for _ in range(num_streams)]
        with HttpAnswers(auto, asked, num_tokens) as one, HttpAnswers(off, asked, num_tokens) as other:
            if number % 2:
                with_it, without = in_turns(one, other)
            else:
                without, with_it = in_turns(other, one)
            usages += one.usages()
        auto.settle()
        off.settle()
        if number >= 0:
            found.append((with_it, without))
    return found, usages


def speed(num_streams: int, pairs: Sequence[tuple[float, float]], usages: Sequence[dict[str, Any]]) -> Figure:
    """Tokens per second with SPECULATION=auto : off."""
    name = f"tokens per second, SPECULATION=auto : off, {_streams(num_streams)}"
    ratios = tuple(without / with_it for with_it, without in pairs)
    num_tokens = num_streams * ANSWER_TOKENS
    rates = [num_tokens / median(each) for each in zip(*pairs, strict=True)]
    absolute = f"{rates[0]:.1f} : {rates[1]:.1f} tokens/s, {drafted(usages)}"
    return Figure(NAME, name, "", ratios, Bound("at least", 0.97), absolute)


def own_time(num_streams: int, pairs: Sequence[tuple[float, float]], usages: Sequence[dict[str, Any]]) -> Figure:
    """Milliseconds of a token with SPECULATION=auto - off."""
    per_token_ms = 1000 / (num_streams * OWN_TOKENS)
    name = f"time per token, SPECULATION=auto - off, {_streams(num_streams)}"
    rounds = tuple(per_token_ms * (with_it - without) for with_it, without in pairs)
    both = [per_token_ms * median(each) for each in zip(*pairs, strict=True)]
    absolute = f"{both[0]:.3f} - {both[1]:.3f} ms, {drafted(usages)}"
    return Figure(NAME, name, "ms", rounds, Bound("at most", MAX_OWN_MS), absolute)


def stall(pairs: Sequence[tuple[Silence, Silence]]) -> list[Figure]:
    """The longest gap of a stream and the prefill beside it, SPECULATION=auto : off. The gap is that of one step."""
    gaps = [(with_it.seconds, without.seconds) for with_it, without in pairs]
    prefills = [(with_it.prefill_seconds, without.prefill_seconds) for with_it, without in pairs]
    of_both = "SPECULATION=auto : off"
    return [
        _ratio(f"longest gap beside an 8k prefill, {of_both}", gaps),
        _ratio(f"an 8k prefill beside a stream, {of_both}", prefills),
    ]


def _ratio(name: str, pairs: Sequence[tuple[float, float]]) -> Figure:
    with_it, without = (median(each) for each in zip(*pairs, strict=True))
    rounds = tuple(one / other for one, other in pairs)
    return Figure(NAME, name, "", rounds, Bound("at most", 1.1), f"{with_it:.3f} : {without:.3f} s")


def drafted(usages: Sequence[dict[str, Any]]) -> str:
    """How much was drafted all the same."""
    details = [usage.get("completion_tokens_details") or {} for usage in usages]
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    num_drafted = sum(each.get(name, 0) for each in details for name in names)
    return f"{num_drafted:,} tokens drafted beside {sum(usage['completion_tokens'] for usage in usages):,}"


def _streams(number: int) -> str:
    return f"{number} stream{'s' if number > 1 else ''}"
