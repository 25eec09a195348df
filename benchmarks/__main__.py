"""Runs the benchmarks, prints their table and exits with 1 when a bound is missed.

python -m benchmarks [--only NAME] [--rounds N] [--save [NAME]]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    checkpoint_budget,
    closed_loop,
    disk,
    draft_replay,
    drafted_families,
    evicting,
    eviction_simulator,
    first_token,
    image_memory,
    known_prefix,
    known_weights,
    kv_passes,
    memory,
    mixed_lengths,
    nothing_drafted,
    open_loop,
    own_time,
    own_turn,
    paused_loop,
    real_loop,
    real_text,
    real_vocabularies,
    restore,
    reuse,
    same_text,
    seeing,
    sharing,
    speculation,
    splitting,
    stall,
    taking_turns,
    throughput,
    tree_costs,
    vision,
    vocabulary_loops,
    warm_turn,
    warming,
    written,
)
from benchmarks.client import BenchmarkError
from benchmarks.figure import Figure, markdown_table
from benchmarks.machine import machine

BENCHMARKS: Mapping[str, tuple[Callable[[int], list[Figure]], int]] = {
    "throughput": (throughput.run, 7),
    "own_time": (own_time.run, 5),
    "first_token": (first_token.run, 5),
    "stall": (stall.run, 3),
    "taking_turns": (taking_turns.run, 5),
    "mixed_lengths": (mixed_lengths.run, 5),
    "warm_turn": (warm_turn.run, 7),
    "warming": (warming.run, 10),
    "known_prefix": (known_prefix.run, 9),
    "known_weights": (known_weights.run, 9),
    "own_turn": (own_turn.run, 9),
    "splitting": (splitting.run, 5),
    "seeing": (seeing.run, 41),
    "restore": (restore.run, 25),
    "tree_costs": (tree_costs.run, 9),
    "kv_passes": (kv_passes.run, 3),
    "disk": (disk.run, 3),
    "written": (written.run, 1),
    "sharing": (sharing.run, 3),
    "memory": (memory.run, 1),
    "image_memory": (image_memory.run, 1),
    "reuse": (reuse.run, 1),
    "vision": (vision.run, 9),
    "open_loop": (open_loop.run, 1),
    "real_loop": (real_loop.run, 1),
    "real_vocabularies": (real_vocabularies.run, 1),
    "vocabulary_loops": (vocabulary_loops.run, 1),
    "paused_loop": (paused_loop.run, 1),
    "closed_loop": (closed_loop.run, 1),
    "checkpoint_budget": (checkpoint_budget.run, 1),
    "real_text": (real_text.run, 1),
    "same_text": (same_text.run, 1),
    "speculation": (speculation.run, 1),
    "drafted_families": (drafted_families.run, 3),
    "nothing_drafted": (nothing_drafted.run, 5),
    "evicting": (evicting.run, 3),
    "drafts": (draft_replay.run, 1),
    "eviction": (eviction_simulator.run, 1),
}
"""Every benchmark with its usual number of rounds."""

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 when a bound was missed or a measurement failed."""
    arguments = _parse(argv)
    load_before = os.getloadavg()
    figures: list[Figure] = []
    failed: list[str] = []
    for name in arguments.only or BENCHMARKS:
        run, usual_rounds = BENCHMARKS[name]
        started = time.monotonic()
        try:
            figures += run(arguments.rounds or usual_rounds)
        except BenchmarkError as error:
            failed.append(f"{name}: {error}")
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    text = f"{machine(load_before)}\n\n{markdown_table(figures)}"
    print(text)
    if arguments.save is not None:
        _save(text, arguments.save, argv)
    for line in failed:
        print(f"\nfailed: {line}")
    missed = [f"{figure.benchmark}: {figure.name}" for figure in figures if figure.is_missed]
    if missed:
        print(f"\n{len(missed)} of {len(figures)} missed: {'; '.join(missed)}")
    return 1 if missed or failed else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="How much of bare MLX's speed arrives over HTTP.")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each figure; their median counts")
    parser.add_argument(
        "--save",
        nargs="?",
        const=time.strftime("%Y-%m-%d"),
        metavar="NAME",
        help="write the table to benchmarks/results/NAME.md; without a name under today's date",
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def _save(text: str, name: str, argv: Sequence[str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.md"
    command = f"`python -m benchmarks {' '.join(argv)}`"
    file.write_text(f"# Benchmarks, {name}\n\n{command}\n\n{text}\n", encoding="utf-8")
    print(f"saved as {file.relative_to(RESULTS.parent.parent)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
