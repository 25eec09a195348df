"""Runs the benchmarks, prints their table and exits with 1 when a bound is missed.

python -m benchmarks [--only NAME] [--rounds N] [--save]
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import first_token, mixed_lengths, own_time, stall, throughput
from benchmarks.client import BenchmarkError
from benchmarks.figure import Figure, markdown_table

BENCHMARKS: Mapping[str, Callable[[int], list[Figure]]] = {
    "throughput": throughput.run,
    "own_time": own_time.run,
    "first_token": first_token.run,
    "stall": stall.run,
    "mixed_lengths": mixed_lengths.run,
}
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 when a bound was missed or a measurement failed."""
    arguments = _parse(argv)
    figures: list[Figure] = []
    machine = [_machine(), f"load average before: {_load()}"]
    try:
        for name in arguments.only or BENCHMARKS:
            started = time.monotonic()
            figures += BENCHMARKS[name](arguments.rounds)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    except BenchmarkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    machine.append(f"after: {_load()}")
    text = f"{'; '.join(machine)}\n\n{markdown_table(figures)}"
    print(text)
    if arguments.save:
        _save(text)
    missed = [f"{figure.benchmark}: {figure.name}" for figure in figures if figure.is_missed]
    if missed:
        print(f"\n{len(missed)} of {len(figures)} missed: {'; '.join(missed)}")
    return 1 if missed else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="How much of bare MLX's speed arrives over HTTP.")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each figure (5); medians count")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results, under today's date")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def _machine() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {versions}"


def _load() -> str:
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def _save(text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    today = time.strftime("%Y-%m-%d")
    file = RESULTS / f"{today}.md"
    file.write_text(f"# Benchmarks, {today}\n\n{text}\n", encoding="utf-8")
    print(f"saved as {file.relative_to(RESULTS.parent.parent)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
