"""`python -m tests.mutation`: plant each fault of the table in a copy of the tree and see which tests notice it.

A mutant first meets the default tests that run its lines, cheap ones first, until one fails; a survivor meets the whole
default run; who survives that too meets the full run of its package. The table goes to `tests/mutation/results.md`.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.coverage_map import CoverageMap, in_running_order
from tests.mutation.mutants import Mutant, read_mutants
from tests.mutation.workspace import NO_END, ROOT, Workspace
from tests.schedule import read_durations

RESULTS = Path(__file__).with_name("results.md")
ONE_TEST_SECONDS, ONE_FULL_TEST_SECONDS = 60, 1200
READ_THE_SOURCE = ("tests/test_architecture.py",)
"""Tests that read the package instead of running it: no coverage leads to them."""
MAPPED_SECONDS, DEFAULT_SECONDS, FULL_SECONDS = 120.0, 1800.0, 3600.0
"""Where thousands of tests run a line, the whole default run on all workers decides sooner than all of them on one."""

BY = ("mapped", "default", "full", "nobody")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which run noticed a mutant, by which test, after how many seconds."""

    mutant: Mutant
    by: str
    test: str
    seconds: float


class Hunt:
    """The workspaces and what was measured in them; `say` is called from several threads."""

    def __init__(self, folder: Path, num_jobs: int) -> None:
        self._spaces = [Workspace(folder / str(job)) for job in range(num_jobs)]
        self._free: SimpleQueue[Workspace] = SimpleQueue()
        for space in self._spaces:
            self._free.put(space)
        self._seconds = read_durations("default")
        self._lock = threading.Lock()
        self._map: CoverageMap | None = None
        self._fails_anyway: tuple[str, ...] = ()

    def say(self, text: str) -> None:
        with self._lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def measure(self) -> None:
        """The default run with coverage, on the unchanged copy. Measuring makes tests slow: one that fails by its clock
        is told and left out."""
        space = self._spaces[0]
        data = space.root.parent / "coverage"
        os.environ["COVERAGE_FILE"] = str(data)
        outcome = space.run(["--cov=kvserve", "--cov-context=test", "--cov-report="], seconds=DEFAULT_SECONDS)
        if outcome.told:
            raise SystemExit(f"The default run could not be measured: {outcome.told}")
        for test in outcome.failed:
            self.say(f"fails without any fault and is left out: {test}")
        self._fails_anyway = outcome.failed
        self._map = CoverageMap(data, space.root)

    def near(self, mutant: Mutant) -> Verdict:
        """The default tests that run the mutant's lines."""
        assert self._map is not None
        tests = [*READ_THE_SOURCE, *in_running_order(self._map.tests_of(mutant), mutant.package, self._seconds)]
        space = self._free.get()
        started = time.monotonic()
        try:
            with space.planted(mutant):
                test = self._noticed(space, ["-n", "0"], tests, MAPPED_SECONDS)
            if test == NO_END:  # none of them hangs, for each has its own limit
                test = ""
        finally:
            self._free.put(space)
        return self._verdict(mutant, "mapped", test, started)

    def far(self, mutant: Mutant, by: str) -> Verdict:
        """The whole default run, or the full run of the mutant's package."""
        space, started = self._spaces[0], time.monotonic()
        with space.planted(mutant):
            if by == "default":
                test = self._noticed(space, [], (), DEFAULT_SECONDS)
            else:
                test = self._noticed(
                    space, ["-m", "not e2e"], _package_tests(space, mutant), FULL_SECONDS, is_full=True
                )
        return self._verdict(mutant, by, test, started)

    def _noticed(
        self, space: Workspace, arguments: list[str], tests: Sequence[str], seconds: float, *, is_full: bool = False
    ) -> str:
        """The test that fails, twice in a row: once may be the machine's mood. "" if none does."""
        limit = ["--timeout", str(ONE_FULL_TEST_SECONDS if is_full else ONE_TEST_SECONDS)]
        without = [each for test in self._fails_anyway for each in ("--deselect", test)]
        outcome = space.run(["-x", *limit, *without, *arguments], tests=tests, seconds=seconds, is_full=is_full)
        if not outcome.failed:
            return outcome.told
        first = outcome.failed[0]
        again = space.run(
            ["-n", "0", "-m", "not e2e", *limit],
            tests=[first],
            seconds=seconds,
            is_full=is_full,
        )
        if not again.is_green:
            return first
        self.say(f"  {first} failed once only, which does not count")
        rest = [*tests, *(() if tests else ["tests"])]
        return self._noticed(space, ["--deselect", first, *arguments], rest, seconds, is_full=is_full)

    def _verdict(self, mutant: Mutant, by: str, test: str, started: float) -> Verdict:
        verdict = Verdict(mutant, by if test else "nobody", test, time.monotonic() - started)
        self.say(f"{mutant.name}: {f'noticed by {test}' if test else f'{by} tests notice nothing'}")
        return verdict


def _package_tests(space: Workspace, mutant: Mutant) -> list[str]:
    """The package's own folder of tests; for what joins packages, the files beside the folders."""
    own = space.root / "tests" / mutant.package
    if mutant.package and own.is_dir():
        return [f"tests/{mutant.package}"]
    return sorted(f"tests/{path.name}" for path in (space.root / "tests").glob("test_*.py"))


def table(verdicts: Iterable[Verdict], seconds: float) -> str:
    """The results as they are kept: totals, then one line for each mutant."""
    verdicts = list(verdicts)
    counts = {by: sum(verdict.by == by for verdict in verdicts) for by in BY}
    in_default = counts["mapped"] + counts["default"]
    share = in_default / max(1, len(verdicts))
    rows = [
        " | ".join(["", each.mutant.name, each.mutant.edits[0].file, each.mutant.fault, each.by, each.test, ""]).strip()
        for each in verdicts
    ]
    summary = (
        f"`make mutants`: {len(verdicts)} faults in {seconds / 60:.0f} minutes. The default run notices {in_default} "
        f"({share:.0%}), {counts['mapped']} of them by tests that run the changed lines; the full run of the package "
        f"{counts['full']} more; nobody {counts['nobody']}."
    )
    heading = ("| mutant | file | what goes wrong | noticed by | test |", "|---|---|---|---|---|")
    return "\n".join(["# Planted faults and who notices them", "", summary, "", *heading, *rows, ""])


def keep(text: str, only: Sequence[str]) -> None:
    """The table of all mutants is kept in the repository; of some, nothing is."""
    if not only:
        RESULTS.write_text(text, "utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these mutants, and no table")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants are tried at once")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_mutants() if not chosen.only or mutant.name in chosen.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvserve-mutants-") as folder:
        hunt = Hunt(Path(folder), chosen.jobs)
        hunt.measure()
        hunt.say(f"The default run is measured; {len(mutants)} mutants.")
        with ThreadPoolExecutor(chosen.jobs) as pool:
            verdicts = {verdict.mutant.name: verdict for verdict in pool.map(hunt.near, mutants)}
        for by in ("default", "full"):
            for verdict in [verdict for verdict in verdicts.values() if verdict.by == "nobody"]:
                # What is known so far, should somebody stop this.
                keep(table(verdicts.values(), time.monotonic() - started), chosen.only)
                verdicts[verdict.mutant.name] = hunt.far(verdict.mutant, by)
    text = table(verdicts.values(), time.monotonic() - started)
    keep(text, chosen.only)
    print(text)
    return 1 if any(verdict.by == "nobody" for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
