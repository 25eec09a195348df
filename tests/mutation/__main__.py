"""`python -m tests.mutation`: plant each fault of the table in a copy of the tree and see which tests notice it.

A mutant first meets the test that noticed it the last time. Who survives that, or is new, meets the default tests that
run its lines, cheap ones first, until one fails; then the whole default run; then the full run of its package. The
table goes to `tests/mutation/results.md`. With `--new` only those that it does not have yet are tried.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.coverage_map import CoverageMap, in_running_order
from tests.mutation.mutants import Mutant, read_mutants
from tests.mutation.results import RESULTS, Verdict, read_results, table
from tests.mutation.workspace import NO_END, ROOT, Workspace
from tests.schedule import read_durations

ONE_TEST_SECONDS, ONE_FULL_TEST_SECONDS = 60, 1200
LIMIT = ("--timeout", str(ONE_FULL_TEST_SECONDS))
READ_THE_SOURCE = ("tests/test_architecture.py",)
"""Tests that read the package instead of running it: no coverage leads to them."""
MAPPED_SECONDS, DEFAULT_SECONDS, FULL_SECONDS = 120.0, 1800.0, 3600.0
"""Where thousands of tests run a line, the whole default run on all workers decides sooner than all of them on one."""


class Hunt:
    """The workspaces and what was measured in them; `say` is called from several threads."""

    def __init__(self, folder: Path, num_jobs: int) -> None:
        self._num_jobs = num_jobs
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

    def all_near(
        self, mutants: Sequence[Mutant], before: Mapping[str, Verdict], keep: Callable[[Mapping[str, Verdict]], object]
    ) -> dict[str, Verdict]:
        """What noticed each mutant the last time, or tests that run its lines. `keep` is called with what is known so
        far, should somebody stop this."""
        self._leave_out_what_fails({verdict.test for verdict in before.values()})
        again = [before[mutant.name] for mutant in mutants if mutant.name in before]
        with ThreadPoolExecutor(self._num_jobs) as pool:
            verdicts = {verdict.mutant.name: verdict for verdict in pool.map(self._again, again) if verdict}
        return self.rest_near(mutants, verdicts, keep)

    def rest_near(
        self, mutants: Sequence[Mutant], known: Mapping[str, Verdict], keep: Callable[[Mapping[str, Verdict]], object]
    ) -> dict[str, Verdict]:
        """Tests that run the lines of mutants which are not `known`, and those that are."""
        verdicts = dict(known)
        with ThreadPoolExecutor(self._num_jobs) as pool:
            rest = [mutant for mutant in mutants if mutant.name not in verdicts]
            if rest:
                self.measure()
                self.say(f"The default run is measured; {len(rest)} mutants.")
                keep(verdicts)
                for verdict in pool.map(self.near, rest):
                    verdicts[verdict.mutant.name] = verdict
                    keep(verdicts)
        return {mutant.name: verdicts[mutant.name] for mutant in mutants}

    def _leave_out_what_fails(self, tests: Iterable[str]) -> None:
        """A test that fails without a fault, or that is gone, shows nothing."""
        there = sorted(test for test in tests if (self._spaces[0].root / test.partition("::")[0]).is_file())
        outcome = self._spaces[0].run(["-m", "not e2e", *LIMIT], tests=there, seconds=DEFAULT_SECONDS, is_full=True)
        for test in outcome.failed:
            self.say(f"fails without any fault: {test}")
        self._fails_anyway = outcome.failed

    def _again(self, before: Verdict) -> Verdict | None:
        """Whether the test that noticed a mutant still does."""
        if before.test in self._fails_anyway:
            return None
        space = self._free.get()
        try:
            with space.planted(before.mutant):
                is_full = before.by == "full"
                limit = ONE_FULL_TEST_SECONDS if is_full else ONE_TEST_SECONDS  # a fault may show as a test without end
                arguments = ["-n", "0", "-m", "not e2e", "--timeout", str(limit)]
                outcome = space.run(arguments, tests=[before.test], seconds=DEFAULT_SECONDS, is_full=is_full)
        finally:
            self._free.put(space)
        if not outcome.failed:
            self.say(f"{before.mutant.name}: no longer noticed by {before.test}")
            return None
        self.say(f"{before.mutant.name}: noticed again by {before.test}")
        return before

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
        self._fails_anyway = (*self._fails_anyway, *outcome.failed)
        self._map = CoverageMap(data, space.root)

    def near(self, mutant: Mutant) -> Verdict:
        """The default tests that run the mutant's lines."""
        assert self._map is not None
        tests = [*READ_THE_SOURCE, *in_running_order(self._map.tests_of(mutant), mutant.package, self._seconds)]
        space = self._free.get()
        try:
            with space.planted(mutant):
                test = self._noticed(space, ["-n", "0"], tests, MAPPED_SECONDS)
            if test == NO_END:  # none of them hangs, for each has its own limit
                test = ""
        finally:
            self._free.put(space)
        return self._verdict(mutant, "mapped", test)

    def far(self, mutant: Mutant, by: str) -> Verdict:
        """The whole default run, or the full run of the mutant's package."""
        space = self._spaces[0]
        with space.planted(mutant):
            if by == "default":
                test = self._noticed(space, [], (), DEFAULT_SECONDS)
            else:
                test = self._noticed(
                    space, ["-m", "not e2e"], _package_tests(space, mutant), FULL_SECONDS, is_full=True
                )
        return self._verdict(mutant, by, test)

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

    def _verdict(self, mutant: Mutant, by: str, test: str) -> Verdict:
        verdict = Verdict(mutant, by if test else "nobody", test)
        self.say(f"{mutant.name}: {f'noticed by {test}' if test else f'{by} tests notice nothing'}")
        return verdict


def _package_tests(space: Workspace, mutant: Mutant) -> list[str]:
    """The package's own folder of tests; for what joins packages, the files beside the folders."""
    own = space.root / "tests" / mutant.package
    if mutant.package and own.is_dir():
        return [f"tests/{mutant.package}"]
    return sorted(f"tests/{path.name}" for path in (space.root / "tests").glob("test_*.py"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these mutants, and no table")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants are tried at once")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--anew", action="store_true", help="forget which test noticed which mutant")
    kept.add_argument("--new", action="store_true", help="only mutants that the table does not have, whose rows stay")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_mutants() if not chosen.only or mutant.name in chosen.only]
    started = time.monotonic()

    def keep(verdicts: Mapping[str, Verdict]) -> str:
        num_again = sum(before.get(name) == verdict for name, verdict in verdicts.items())
        text = table(verdicts, num_again, time.monotonic() - started, is_tried_again=not chosen.new)
        if not chosen.only:
            RESULTS.write_text(text, "utf-8")
        return text

    before = {} if chosen.anew else read_results(mutants)
    with tempfile.TemporaryDirectory(prefix="kvserve-mutants-") as folder:
        hunt = Hunt(Path(folder), chosen.jobs)
        verdicts = (hunt.rest_near if chosen.new else hunt.all_near)(mutants, before, keep)
        for by in ("default", "full"):
            for verdict in [verdict for verdict in verdicts.values() if verdict.by == "nobody"]:
                keep(verdicts)
                verdicts[verdict.mutant.name] = hunt.far(verdict.mutant, by)
        print(keep(verdicts))
    return 1 if any(verdict.by == "nobody" for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
