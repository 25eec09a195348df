"""Speed with and without a fast BLAS: one model in two processes, one with the library preloaded, that take turns.

python -m benchmarks.blas [MODEL_FOLDER] [--library FILE] [--rounds N] [--save]

Without a folder it is the geometry of SmolLM2-135M with random weights, in float32 and in 4 bits; the model of a folder
is measured as it is. It knows bare MLX and no server.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_model

from benchmarks.bare import BareAnswers
from benchmarks.client import BenchmarkError
from benchmarks.machine import machine
from kvserve.app.blas import active_blas, fault_of, preloading
from kvserve.settings.blas_files import library_files

RESULTS = Path(__file__).parent / "results"
GEOMETRY: Mapping[str, Any] = {
    **{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": 49152},
    **{"rope_theta": 100000.0, "rope_traditional": True, "tie_word_embeddings": True},
}
PRECISIONS = {"float32": 0, "4 bits": 4}
KNOWN_TOKENS, CHUNK_TOKENS, NUM_STEPS = 64, 512, 16

MEASUREMENTS = {
    "one token": ("pass", 1),
    "8 tokens": ("pass", 8),
    "64 tokens": ("pass", 64),
    "256 tokens": ("pass", 256),
    "prefill of 2,048 tokens": ("prefill", 2048),
    "a step of four streams": ("streams", 4),
}
ENOUGH_SECONDS = 20.0
"""What takes so long is measured once."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one measurement took, by the clock and of the processors' time, in seconds."""

    wall: float
    processor: float


# --- the process that measures ----------------------------------------------------------------------------------------


def answer_requests(folder: str, bits: int) -> None:
    """Read one request from each line of the input, write what it took; the first line written names the BLAS."""
    model = measured_model(folder, bits)
    blas = active_blas()
    print(blas.name if blas is not None else "", flush=True)
    measures = {"pass": one_pass, "prefill": prefill, "streams": streams}
    for line in sys.stdin:
        kind, number = json.loads(line)
        taken = measures[kind](model, number)
        print(json.dumps([taken.wall, taken.processor]), flush=True)


def measured_model(folder: str, bits: int) -> Any:
    """The folder's model, else the random one; 0 bits are float32."""
    if folder:
        return load_model(Path(folder))[0]
    model = Model(ModelArgs(**GEOMETRY))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def one_pass(model: Any, num_tokens: int) -> Taken:
    """So many tokens at once behind known ones, with the logits of all."""
    caches = make_prompt_cache(model)
    mx.eval(model(_tokens(KNOWN_TOKENS), cache=caches))
    if num_tokens < CHUNK_TOKENS // 8:  # the first pass of a shape asks for memory; a long one hardly notices
        mx.eval(model(_tokens(num_tokens), cache=caches))
        trim_prompt_cache(caches, num_tokens)
    return _timed(lambda: mx.eval(model(_tokens(num_tokens), cache=caches)))


def prefill(model: Any, num_tokens: int) -> Taken:
    """A prompt in chunks, without logits."""

    def call() -> None:
        caches = make_prompt_cache(model)
        for _ in range(0, num_tokens, CHUNK_TOKENS):
            model(_tokens(CHUNK_TOKENS), cache=caches)
            mx.eval([cache.state for cache in caches])

    return _timed(call)


def streams(model: Any, num_streams: int) -> Taken:
    """A step in which so many answers get a token each."""
    prompts = [[number + 1] * KNOWN_TOKENS for number in range(num_streams)]
    with BareAnswers(model, prompts, NUM_STEPS + 1) as answers:
        answers.run(None)  # the prompts and the first tokens
        taken = _timed(lambda: answers.run(3600))
    return Taken(taken.wall / NUM_STEPS, taken.processor / NUM_STEPS)


def _tokens(number: int) -> mx.array:
    return mx.arange(number)[None]


def _timed(call: Callable[[], object]) -> Taken:
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return Taken(time.perf_counter() - wall, time.process_time() - processor)


# --- the process that asks --------------------------------------------------------------------------------------------


class Side:
    """One of the two processes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.blas = self._line()

    def take(self, kind: str, number: int) -> Taken:
        """Ask for one measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, number]) + "\n")
        self._process.stdin.flush()
        return Taken(*json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"a process that measures ended with {self._process.wait()}")
        return line.strip()


@contextmanager
def side(folder: str, bits: int, environ: Mapping[str, str]) -> Iterator[Side]:
    """A process with the model, until the end of the block."""
    command = [sys.executable, "-m", "benchmarks.blas", folder, "--measure", str(bits)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=dict(environ), **pipes) as process:
        try:
            yield Side(process)
        finally:
            process.terminate()


def compared(folder: str, bits: int, library: Path, num_rounds: int) -> tuple[str, dict[str, list[Taken]]]:
    """The library's name and, of each measurement, the medians without and with it, in turns."""
    environ = os.environ
    with side(folder, bits, environ) as plain, side(folder, bits, {**environ, **preloading(library, environ)}) as fast:
        if plain.blas or not fast.blas:
            raise BenchmarkError(f"one of both should have a fast BLAS: {plain.blas!r}, {fast.blas!r}")
        found = {}
        for name, (kind, number) in MEASUREMENTS.items():
            taken: list[tuple[Taken, Taken]] = []
            begun = time.perf_counter()
            while len(taken) < num_rounds and (not taken or time.perf_counter() - begun < ENOUGH_SECONDS):
                taken.append((plain.take(kind, number), fast.take(kind, number)))
            found[name] = [_median(values) for values in zip(*taken, strict=True)]
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        return fast.blas, found


def _median(values: Sequence[Taken]) -> Taken:
    return Taken(median(each.wall for each in values), median(each.processor for each in values))


def table(blas: str, found: Mapping[str, Mapping[str, Sequence[Taken]]]) -> str:
    """A row for each measurement, per precision the milliseconds of both sides and how often the one goes into the
    other; in brackets of the processors' time."""
    heads = [f"{precision}, {what}" for precision in found for what in ("the wheel's", blas, "times faster")]
    lines = [f"| ms (of processor time) | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name in MEASUREMENTS:
        cells = []
        for measured in found.values():
            plain, fast = measured[name]
            cells += [_cell(plain), _cell(fast)]
            cells.append(f"{plain.wall / fast.wall:.1f} ({plain.processor / fast.processor:.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(taken: Taken) -> str:
    return f"{taken.wall * 1000:,.0f} ({taken.processor * 1000:,.0f})"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.blas", description="Speed with and without a fast BLAS.")
    parser.add_argument("folder", nargs="?", default="", help="a model's folder; otherwise a random model is measured")
    parser.add_argument("--library", default="auto", metavar="FILE", help="otherwise one is looked for")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each measurement; the median counts")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/blas.md")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.measure is not None:
        answer_requests(given.folder, given.measure)
        return 0
    load_before = os.getloadavg()
    wanted = "auto" if given.library == "auto" else Path(given.library)
    libraries = library_files(wanted, Path(sys.prefix))
    library = next((each for each in libraries if fault_of(each, os.environ) is None), None)
    if library is None:
        print("There is no fast BLAS here that works; --library FILE names one.", file=sys.stderr)
        return 1
    precisions = {"as it is": 0} if given.folder else PRECISIONS
    sides = {name: compared(given.folder, bits, library, given.rounds) for name, bits in precisions.items()}
    blas = next(iter(sides.values()))[0]
    threads = preloading(library, os.environ).get("OPENBLAS_NUM_THREADS", os.environ.get("OPENBLAS_NUM_THREADS"))
    head = f"{machine(load_before)} {blas}, {threads} threads; {given.folder or 'random weights'}."
    text = f"{head}\n\n{table(blas, {name: found for name, (_, found) in sides.items()})}"
    print(text)
    if given.save:
        (RESULTS / "blas.md").write_text(f"# Speed with and without a fast BLAS\n\n{text}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
