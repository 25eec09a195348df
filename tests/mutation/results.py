"""Who noticed each planted fault, as it is kept in `results.md`: read so that the next run begins with these tests."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

RESULTS = Path(__file__).with_name("results.md")
BY = ("mapped", "default", "full", "nobody")
_ROW = re.compile(rf"^\| ([\w-]+) \| .* \| ({'|'.join(BY)}) \| (.+) \|$", re.MULTILINE)
HEADING = ("| mutant | file | what goes wrong | noticed by | test |", "|---|---|---|---|---|")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which run noticed a mutant, by which test."""

    mutant: Mutant
    by: str
    test: str


def read_results(mutants: Iterable[Mutant], path: Path = RESULTS) -> dict[str, Verdict]:
    """What was found last time, by the mutants' names. Who was not tried, or not noticed, is missing."""
    by_name = {mutant.name: mutant for mutant in mutants}
    found: dict[str, Verdict] = {}
    for name, by, test in _ROW.findall(path.read_text("utf-8")) if path.exists() else ():
        if name in by_name:
            found[name] = Verdict(by_name[name], by, test)
    return found


def table(verdicts: Mapping[str, Verdict], num_known: int, seconds: float, *, is_tried_again: bool = True) -> str:
    """The results as they are kept: totals, then one line for each mutant. `num_known`: so many have the test that they
    had the last time; `is_tried_again`: it noticed them again, else it was not asked."""
    counts = {by: sum(verdict.by == by for verdict in verdicts.values()) for by in BY}
    in_default = counts["mapped"] + counts["default"]
    share = in_default / max(1, len(verdicts))
    known = "noticed again by the test of the last time" if is_tried_again else "as an earlier run found them"
    summary = (
        f"`make mutants`: {len(verdicts)} faults in {seconds / 60:.0f} minutes, {num_known} {known}. The default run "
        f"notices {in_default} ({share:.0%}), {counts['mapped']} of them by tests that run the changed lines; the full "
        f"run of the package {counts['full']} more; nobody {counts['nobody']}."
    )
    rows = map(_row, verdicts.values())
    return "\n".join(["# Planted faults and who notices them", "", summary, "", *HEADING, *rows, ""])


def _row(verdict: Verdict) -> str:
    cells = (verdict.mutant.name, verdict.mutant.edits[0].file, verdict.mutant.fault, verdict.by, verdict.test)
    return f"| {' | '.join(cells)} |"
