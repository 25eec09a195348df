"""Led drafts on random models as deep as the demo's: a hybrid, whose states go back to what was accepted, and one with
windows that are full. The engine itself, without HTTP, plain and drafted in turn, in a process with the fast BLAS.

    python -m benchmarks.drafted_families --rounds N --tokens-a-step X --acceptance Y

prints what it measured, one answer pair a line, as JSON; `speculation.py` starts it. Random weights copy nothing, so
the drafts are spoiled copies of the plain answer (`led_drafts.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.client import BenchmarkError
from benchmarks.decode_rate import Arrived, tokens_per_second
from benchmarks.disk import running_engine
from benchmarks.figure import Bound, Figure
from benchmarks.led_drafts import OF_EDITS, Lead, LedDrafter, Wanted, lead_for
from benchmarks.same_text import Answer, Drawn, compared
from benchmarks.talking import fast_library
from kvserve.app.blas import preloading
from kvserve.core import (
    GenerationDone,
    GenerationFailed,
    GenerationRequest,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    TokenSequence,
)
from kvserve.core.drafting import Drafting
from kvserve.demo.build import ModelScale, build_model
from kvserve.engine.worker import Engine

WINDOW_TOKENS = 128
"""Shorter than the prompt: a full window is the one that cannot go back by itself."""

WIDTHS = ModelScale(
    hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, sliding_window=WINDOW_TOKENS
)
"""Those of SmolLM2-135M."""

SCALES = {"qwen3_5": replace(WIDTHS, num_layers=32), "gemma3": replace(WIDTHS, num_layers=30)}
"""As many layers as SmolLM2 has; the hybrid's come in fours."""

PROMPT_TOKENS, ANSWER_TOKENS = 256, 160
REQUEST = GenerationRequest(
    RequestId("bench"),
    TokenSequence(tuple(300 + (place * 7919 + place * place * 31) % 600 for place in range(PROMPT_TOKENS))),
    ANSWER_TOKENS,
    SamplingParams(),
    frozenset(),
)
SILENCE_SECONDS = 300.0
LOAD_SECONDS = 900.0
"""The checks of a start go through a model of this size a hundred times."""

GAIN, NOT_SLOWER, NEVER_SLOWER = Bound("at least", 1.3), Bound("at least", 1.0), Bound("at least", 0.97)
"""The first two where a fast BLAS makes a wider pass pay; elsewhere nothing need be drafted."""


@dataclass(frozen=True, slots=True)
class Led:
    """One answer, plain and drafted: tokens per second, and of the drafted one its tokens, passes and drafts.
    `num_unexplained`: 1 where it says something else and noise does not explain it."""

    family: str
    plain_rate: float
    drafted_rate: float
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    is_same: bool
    num_unexplained: int = 0

    @property
    def ratio(self) -> float:
        return self.drafted_rate / self.plain_rate

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_steps


@dataclass(frozen=True, slots=True)
class Written:
    """An answer of the engine: its tokens, with their log-probabilities where they were asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    arrived: Arrived
    drafting: Drafting


# --- the process that measures ----------------------------------------------------------------------------------------


def measure_family(family: str, folder: Path, num_rounds: int, wanted: Wanted) -> Iterator[Led]:
    """Pairs of answers to one prompt, with other drafts each round: spoiled copies of its first answer."""
    lead = lead_for(wanted)
    with running_engine(folder, None, start_seconds=LOAD_SECONDS) as engine:
        answer = write(engine, REQUEST)
        for number in range(-1, num_rounds):
            led = _pair(family, partial(_asked, engine, answer, lead, number), is_drafted_first=number % 2 == 1)
            if number >= 0:  # the first passes of each width are slow
                yield led


def _asked(
    engine: Engine, answer: Written, lead: Lead, seed: int, *, is_drafted: bool, num_top_logprobs: int | None = None
) -> Written:
    drafter = LedDrafter(answer.tokens, lead, seed) if is_drafted else None
    return write(engine, replace(REQUEST, drafter=drafter, num_top_logprobs=num_top_logprobs))


def _pair(family: str, ask: Callable[..., Written], *, is_drafted_first: bool) -> Led:
    """Both answers; where they are not the same, both once more with log-probabilities."""
    found = {is_drafted: ask(is_drafted=is_drafted) for is_drafted in (is_drafted_first, not is_drafted_first)}
    plain, drafted = found[False], found[True]
    is_same = plain.tokens == drafted.tokens
    again = partial(ask, num_top_logprobs=2)
    return Led(
        family,
        tokens_per_second([plain.arrived]),
        tokens_per_second([drafted.arrived]),
        len(drafted.tokens),
        drafted.drafting.num_steps or len(drafted.tokens),
        drafted.drafting.num_drafted_tokens,
        drafted.drafting.num_accepted_tokens,
        is_same,
        0 if is_same else num_unexplained(again(is_drafted=False), again(is_drafted=True), (plain, drafted)),
    )


def num_unexplained(plain: Written, drafted: Written, others: Sequence[Written]) -> int:
    """How many answers part from the plain one where noise does not explain it: the two best tokens were further apart
    than the log-probabilities of tokens before it moved."""
    ways = {"drafted": [as_answer(drafted)]}
    ways |= {str(number): [as_answer(other)] for number, other in enumerate(others)}
    return len(compared([as_answer(plain)], ways).unexplained)


def as_answer(written: Written) -> Answer:
    """The same as `same_text` compares it: a token's text is its id."""
    texts = [f"{token} " for token in written.tokens]
    pairs = zip(texts, written.logprobs, strict=True)
    drawn = tuple(Drawn(text.encode(), _gap(each)) for text, each in pairs if each is not None)
    return Answer("".join(texts), "length", drawn, 0, 0)


def _gap(logprobs: TokenLogprobs) -> float:
    (_, first), (_, second), *_ = logprobs.top
    return first - second


def write(engine: Engine, request: GenerationRequest) -> Written:
    """An answer to its end. Raises BenchmarkError where the row fails or nothing comes of it."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    parts: list[tuple[float, int]] = []
    for batch in engine.submit(request).batches(SILENCE_SECONDS):
        if not batch:
            raise BenchmarkError("the engine said nothing for too long")
        deltas = [event for event in batch if isinstance(event, TokenDelta)]
        tokens += [delta.token for delta in deltas]
        logprobs += [delta.logprobs for delta in deltas]
        parts += [(time.perf_counter(), len(deltas))] if deltas else []
        if isinstance(last := batch[-1], GenerationFailed):
            raise BenchmarkError(str(last.error))
        if isinstance(last, GenerationDone):
            return Written(tuple(tokens), tuple(logprobs), Arrived(tuple(parts), len(tokens)), last.drafting)
    raise BenchmarkError("the row ended without a last event")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.drafted_families", description="Led drafts on random models.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--tokens-a-step", type=float, default=OF_EDITS.tokens_a_step, metavar="X")
    parser.add_argument("--acceptance", type=float, default=OF_EDITS.acceptance, metavar="Y")
    given = parser.parse_args(argv)
    wanted = Wanted(given.tokens_a_step, given.acceptance)
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        for family, scale in SCALES.items():
            folder = build_model(family, Path(scratch) / family, scale=scale, answer_tokens=None)
            for led in measure_family(family, folder, given.rounds, wanted):
                print(json.dumps(asdict(led)), flush=True)
    return 0


# --- the process that asks --------------------------------------------------------------------------------------------


def measured(library: Path | None, num_rounds: int, wanted: Wanted) -> list[Led]:
    """All families, in a process that has the library preloaded. Raises BenchmarkError where it fails."""
    command = [sys.executable, "-m", "benchmarks.drafted_families", "--rounds", str(num_rounds)]
    command += ["--tokens-a-step", str(wanted.tokens_a_step), "--acceptance", str(wanted.acceptance)]
    environ: Mapping[str, str] = os.environ
    if library is not None:
        environ = {**environ, **preloading(library, environ)}
    found = []
    with subprocess.Popen(command, env=dict(environ), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            found.append(Led(**json.loads(line)))
    if process.returncode or not found:
        raise BenchmarkError(f"the process that measures led drafts ended with {process.returncode}")
    return found


def figures(all_led: Sequence[Led], *, is_fast: bool) -> list[Figure]:
    """Per family the tokens a step, the speed, and answers that are others."""
    found = []
    for family in dict.fromkeys(led.family for led in all_led):
        some = [led for led in all_led if led.family == family]
        num_drafted, num_accepted = (
            sum(getattr(led, f"num_{name}") for led in some) for name in ("drafted", "accepted")
        )
        steps = f"{num_accepted:,} of {num_drafted:,} drafted tokens accepted"
        drafted, plain = (median(getattr(led, f"{name}_rate") for led in some) for name in ("drafted", "plain"))
        rates = f"{drafted:.1f} : {plain:.1f} tokens/s"
        others = f"{sum(not led.is_same for led in some)} of {len(some)} differ"
        gain, speed = (GAIN, NOT_SLOWER) if is_fast else (None, NEVER_SLOWER)
        name = f"{family}, {SCALES[family].num_layers} layers, led drafts"
        found += [
            _figure(f"{name}: tokens a step", tuple(led.tokens_a_step for led in some), gain, steps),
            _figure(f"{name}: tokens per second, drafted : plain", tuple(led.ratio for led in some), speed, rates),
            _figure(
                f"{name}: answers that differ and noise does not explain it",
                (float(sum(led.num_unexplained for led in some)),),
                Bound("at most", 0),
                others,
            ),
        ]
    return found


def _figure(name: str, rounds: tuple[float, ...], bound: Bound | None, absolute: str) -> Figure:
    return Figure("drafted_families", name, "", rounds, bound, absolute)


def run(num_rounds: int) -> list[Figure]:
    """Where there is a fast BLAS; the drafts are like those of edits."""
    library = fast_library("auto")
    return [] if library is None else figures(measured(library, num_rounds, OF_EDITS), is_fast=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
