"""A copy of the working tree in which a fault can be planted, and the test runs in it. The original stays as it is."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent

NO_END = "no end in time"
LEFT_OUT = ("--ignore", "tests/test_mutants.py")
"""The table's own test sees every planted fault, by its text."""

NO_TESTS_RAN = 5
"""pytest's exit code."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `failed` names the tests that failed; `told` says what else ended it."""

    failed: tuple[str, ...] = ()
    told: str = ""

    @property
    def is_green(self) -> bool:
        return not self.failed and not self.told


class Workspace:
    """One copy; one test run at a time in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "main"
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        shutil.copytree(ROOT / ".git", self.root / ".git")
        (self.root / ".venv").symlink_to(ROOT / ".venv")
        if (shared := ROOT.parent / "shared").exists():
            (folder / "shared").symlink_to(shared)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Meanwhile the copy has the fault."""
        before = {edit.file: (self.root / edit.file).read_text("utf-8") for edit in mutant.edits}
        try:
            for edit in mutant.edits:
                self._write(edit.file, edit.applied((self.root / edit.file).read_text("utf-8")))
            yield
        finally:
            for file, text in before.items():
                self._write(file, text)

    def _write(self, file: str, text: str) -> None:
        """Bytecode of the old text goes: a file of the same second and size would pass for the old one."""
        path = self.root / file
        path.write_text(text, "utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink(missing_ok=True)

    def run(
        self, arguments: Sequence[str], *, tests: Sequence[str] = (), seconds: float, is_full: bool = False
    ) -> Outcome:
        """Run pytest here until its first failure, for `seconds` at the most."""
        listed = self._folder / "tests.txt"
        listed.write_text("\n".join(tests), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            *LEFT_OUT,
            *arguments,
        ]
        environment = {**os.environ, "FULL_RUN": "1" if is_full else "0"}
        try:
            ended = subprocess.run(
                [*command, *([f"@{listed}"] if tests else [])],
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(told=NO_END)
        if ended.returncode in (0, NO_TESTS_RAN):
            return Outcome()
        failed = tuple(_failures(ended.stdout))
        return Outcome(failed, "" if failed else f"pytest ended with {ended.returncode}")


def _failures(output: str) -> Iterator[str]:
    """The node ids of the FAILED and ERROR lines of the summary."""
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and rest:
            yield rest.partition(" - ")[0]
