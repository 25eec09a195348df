"""The model families of mlx-lm and mlx-vlm against this engine, as a table.

    python -m benchmarks.families [--library NAME] [FAMILY ...] [--save]

Every family of the libraries' own lists in a tiny configuration with random weights. It joins the tiny models with what
the engine makes of them.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest

from benchmarks.family_trial import NUM_PROMPT_TOKENS, Outcome, outcome_of
from benchmarks.plain_kernels import are_needed, plain_kernels
from benchmarks.tiny_families import LIBRARIES, Library, families, has_plain_kernels, left_out, why, write_model
from kvserve.engine import text_load

RESULTS = Path(__file__).parent / "results" / "families.md"

PLAIN = "Its Metal kernels stand here as plain arithmetic (`benchmarks/plain_kernels.py`)."


@dataclass(frozen=True, slots=True)
class Row:
    """A family of a library, and what became of it."""

    library: Library
    family: str
    outcome: Outcome

    @property
    def is_miss(self) -> bool:
        """Not served, or kept and wrong, or right by chance."""
        outcome = self.outcome
        kept = outcome.is_exact and outcome.are_faults_seen
        return bool(outcome.failure) or (outcome.keeping != "off" and not kept)


def row_of(library: Library, family: str) -> Row:
    """Build a family's tiny model and try it. What cannot be built is a failure too."""
    with tempfile.TemporaryDirectory(prefix="kvserve-family-") as scratch, only(library):
        mx.random.seed(1)
        try:
            folder = write_model(Path(scratch), library, family)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the reason is the result
            return Row(library, family, Outcome(f"not built: {type(error).__name__}: {' '.join(str(error).split())}"))
        with plain_kernels() if has_plain_kernels(library, family) else nullcontext():
            outcome = outcome_of(folder)
    mx.clear_cache()
    return Row(library, family, outcome)


def rows_apart(wanted: Iterable[tuple[Library, str]]) -> Iterator[Row]:
    """The same of many, in a process that is begun again where one of them ends it: kernels may not be there."""
    workers: list[ProcessPoolExecutor] = []
    for library, family in wanted:
        if not workers:
            workers.append(ProcessPoolExecutor(1, get_context("spawn")))
        try:
            yield workers[0].submit(row_of, library, family).result()
        except BrokenProcessPool:
            workers.pop()
            yield Row(library, family, Outcome("the process that computed it ended"))
    for worker in workers:
        worker.shutdown()


@contextmanager
def only(library: Library) -> Iterator[None]:
    """Let the engine know this library's families alone: many are in both."""
    with pytest.MonkeyPatch.context() as patch:
        if library == "mlx-vlm":
            patch.setattr(text_load, "is_for_mlx_lm", lambda _: False)
        yield


# --- the table -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each family."""
    yield "| family | from | streams | prefix cache | warm = cold | why |"
    yield "|---" * 6 + "|"
    for row in rows:
        outcome = row.outcome
        if outcome.failure:
            cells = ("-", "-", "-", " ".join((*_known(row), outcome.failure)))
        else:
            streams = "batched" if outcome.can_batch else "alone"
            keeping = {"cut": "cut anywhere", "checkpoints": "at checkpoints", "off": "off"}[outcome.keeping]
            cells = (
                streams,
                keeping,
                _verdict(outcome),
                " ".join((*_known(row), *outcome.notes)),
            )
        yield f"| {row.family} | {row.library} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _known(row: Row) -> Iterator[str]:
    """What is said of a family beside what became of it."""
    if has_plain_kernels(row.library, row.family) and are_needed():
        yield PLAIN
    if known := why(row.library, row.family):
        yield known


def _verdict(outcome: Outcome) -> str:
    if outcome.keeping == "off":
        return "-"
    if outcome.depends_on_cuts:
        return "as where a prefill is cut"
    if not outcome.is_exact:
        return f"no ({outcome.error:.1e})"
    return "yes" if outcome.are_faults_seen else f"not shown ({min(outcome.faults, default=0.0):.0e})"


def counts(rows: Sequence[Row]) -> Iterator[str]:
    """How many families of each library came out how."""
    for library in LIBRARIES:
        own = [row for row in rows if row.library == library]
        served = [row.outcome for row in own if not row.outcome.failure]
        kept = [outcome for outcome in served if outcome.is_exact and outcome.are_faults_seen]
        cut = sum(outcome.keeping == "cut" for outcome in kept)
        batched = sum(outcome.can_batch for outcome in served)
        off = sum(outcome.keeping == "off" for outcome in served)
        yield (
            f"{library} {version(library)}: {len(own)} families, {len(served)} served, {batched} batched; "
            f"{len(kept)} kept and exact ({cut} cut anywhere, {len(kept) - cut} at checkpoints), {off} off, "
            f"{sum(row.is_miss for row in own)} misses."
        )


def _with_plain_kernels(rows: Sequence[Row]) -> str:
    """Which families were tried with other code than a server on this machine runs."""
    if not are_needed():
        return ""
    names = {library: [row.family for row in rows if row.library == library] for library in LIBRARIES}
    tried = (
        f"{' and '.join(filter(partial(has_plain_kernels, library), names[library]))} of {library}" for library in names
    )
    return f"""

Some have no other code than kernels for Metal, and no server without Metal serves them. Here plain arithmetic that was
written from these kernels' sources stands in their place (`benchmarks/plain_kernels.py`), in the trial alone, so that
caches and attention were tried and the kernels were not: {", ".join(tried)}."""


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    out = "\n".join(f"| {name} | {library} | {why} |" for library in LIBRARIES for name, why in left_out(library))
    return f"""# Model families

`python -m benchmarks.families --save`: every family in the model lists of mlx-lm and mlx-vlm, each in a tiny
configuration with random weights, in float32 on a CPU. Where a family has kernels of its own for Metal, what ran here
is what it falls back to.{_with_plain_kernels(rows)}

- streams: rows decode in one batch, or take turns alone.
- prefix cache: a prompt's KV is cut anywhere, or continued from checkpoints, or not kept.
- warm = cold: a row of {NUM_PROMPT_TOKENS} tokens from what is kept has the tokens and logits of one that is computed
  anew, and three wrong records (another prompt's, one token short, one wrong layer) have others.

A family of both libraries is served from mlx-lm; mlx-vlm's own is tried here too. `-` with "not built" or with
parameters that are missing or left over: the tiny configuration of this trial, made from the library's defaults, fits
no model of the family; most of them are vision models. What such a family does with its own configuration was not
tried.

{chr(10).join(counts(rows))}

{chr(10).join(table(rows))}

## Left out

| module | of | what it is |
|---|---|---|
{out}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 for a miss."""
    parser = argparse.ArgumentParser(prog="benchmarks.families", description="Model families, tried.")
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="only these families")
    parser.add_argument("--library", choices=get_args(Library.__value__), help="only this library's")
    parser.add_argument("--save", action="store_true", help="write the table of all to results/families.md")
    given = parser.parse_args(arguments)
    wanted = [
        (library, family)
        for library in LIBRARIES
        if given.library in (None, library)
        for family in families(library)
        if not given.names or family in given.names
    ]
    rows = []
    for row in rows_apart(wanted):
        rows.append(row)
        print(list(table(rows[-1:]))[-1], flush=True)
    print("\n".join(counts(rows)))
    if given.save and not given.names and given.library is None:
        RESULTS.write_text(report(rows), encoding="utf-8")
    return 1 if any(row.is_miss for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
