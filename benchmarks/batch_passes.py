"""What a pass of several rows with several tokens each takes: what drafts for rows beside one another stand on (0080).

    python -m benchmarks.batch_passes [--rounds N] [--bits N] [--library auto|off|FILE]

A model of SmolLM2's widths with few layers and random weights, one process, all passes in turns in each round; the
least processor time of each counts, which a busy machine changes least (with a fast BLAS set OPENBLAS_NUM_THREADS=1, as
its threads spin). Rows were cut one by one before passes of several tokens, and end at unequal slots. It knows bare MLX
and the caches of a batch, no server.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from benchmarks.blas import GEOMETRY
from benchmarks.machine import machine
from benchmarks.talking import fast_library
from kvserve.app.blas import active_blas, preloading
from kvserve.engine.kv_buffers import BatchKv, entering

NUM_ROWS = (1, 2, 4)
WIDTHS = (1, 2, 4, 8)
KNOWN_TOKENS, FEWER_TOKENS = 200, 7
"""Each row is so much shorter than the one before it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """`num_rows` rows with `width` tokens each. `is_uneven`: the rows were cut one by one before, and end at unequal
    slots; a row by itself has all tokens, as the pass that is measured at a start."""

    num_rows: int
    width: int
    is_uneven: bool = False

    @property
    def as_one_row(self) -> "Pass":
        return Pass(1, self.num_rows * self.width)


def all_passes() -> list[Pass]:
    """Every one that is compared, once."""
    found = [Pass(num_rows, width, num_rows > 1 and width > 1) for num_rows in NUM_ROWS for width in WIDTHS]
    found += [each.as_one_row for each in found]
    found += [Pass(num_rows, 1, is_uneven=True) for num_rows in NUM_ROWS if num_rows > 1]
    return list(dict.fromkeys(found))


def new_model(bits: int) -> Any:
    """A tenth of the layers and of the vocabulary; 0 bits are float32."""
    model = Model(ModelArgs(**{**GEOMETRY, "num_hidden_layers": 3, "vocab_size": 4915}))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def batch_of(model: Any, num_rows: int) -> list[BatchKv]:
    """Rows of unequal length, which share passes."""
    rows = []
    for row in range(num_rows):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.arange(KNOWN_TOKENS - FEWER_TOKENS * row)[None], cache=caches))
        rows.append(entering(caches))
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


def measured(model: Any, rounds: int) -> dict[Pass, float]:
    """The least seconds of each pass."""
    passes = all_passes()
    batches = {(each.num_rows, each.is_uneven): batch_of(model, each.num_rows) for each in passes}
    for (num_rows, is_uneven), batch in batches.items():
        if is_uneven:
            _pass(model, batch, num_rows, 4)
            _cut(batch, [row % 4 for row in range(num_rows)])
    found: dict[Pass, list[float]] = {each: [] for each in passes}
    for _ in range(rounds):
        for each in passes:
            batch = batches[each.num_rows, each.is_uneven]
            started = time.process_time()
            _pass(model, batch, each.num_rows, each.width)
            found[each].append(time.process_time() - started)
            _cut(batch, [each.width] * each.num_rows)
    return {each: min(seconds) for each, seconds in found.items()}


def _pass(model: Any, batch: Sequence[BatchKv], num_rows: int, width: int) -> None:
    tokens = (mx.arange(num_rows * width) * 37 % 900).reshape(num_rows, width)
    mx.eval(mx.argmax(model(tokens, cache=batch), axis=-1), [layer.rows for layer in batch])


def _cut(batch: Sequence[BatchKv], num_dropped: Sequence[int]) -> None:
    for layer in batch:
        layer.cut(num_dropped)


def table(found: dict[Pass, float]) -> Iterator[str]:
    """Each pass in milliseconds, as many times a plain step of as many rows, and beside what a start expects."""
    yield "| Rows | Tokens each | ms | : plain step | expected of one row : plain step |"
    yield "|---|---|---|---|---|"
    for each, seconds in found.items():
        if each.num_rows == 1 and each.width not in WIDTHS:
            continue
        plain, one, one_plain = (found[other] for other in (_plain(each), each.as_one_row, _plain(each).as_one_row))
        rows = f"{each.num_rows}, uneven" if each.is_uneven else str(each.num_rows)
        ratio, expected = seconds / plain, one / one_plain
        yield f"| {rows} | {each.width} | {seconds * 1000:.1f} | {ratio:.2f} | {expected:.2f} |"


def _plain(each: Pass) -> Pass:
    return Pass(each.num_rows, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--library", default="off")
    options = parser.parse_args()
    library = fast_library(options.library)
    if library is not None and active_blas() is None:
        again = [sys.executable, "-m", "benchmarks.batch_passes", *sys.argv[1:]]
        environ = {**os.environ, **preloading(library, os.environ)}
        raise SystemExit(subprocess.run(again, env=environ, check=False).returncode)
    blas = active_blas()
    precision = f"{options.bits} bits" if options.bits else "float32"
    print(
        f"{machine(os.getloadavg())} {blas.name if blas is not None else 'the BLAS of the wheel'}; {precision}",
        flush=True,
    )
    print("\n".join(table(measured(new_model(options.bits), options.rounds))))


if __name__ == "__main__":
    main()
