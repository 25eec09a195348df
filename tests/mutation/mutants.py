"""The table of planted faults: what each changes, and the text replacement that plants it. It runs nothing."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "mutants"


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement: `old` stands exactly once in `file`, a path from the root of the repository."""

    file: str
    old: str
    new: str

    def lines(self, text: str) -> range:
        """The half-open range of lines, counted from 1, that `old` covers in the file's text."""
        first = text[: text.index(self.old)].count("\n") + 1
        return range(first, first + max(1, self.old.rstrip("\n").count("\n") + 1))

    def applied(self, text: str) -> str:
        """The text with the fault in it.

        Raises:
            ValueError: `old` does not stand there exactly once: the code has moved on, and the table must follow.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: this text stands there {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault. `origin` is "code" (chosen without a look at the tests) or the negative control that plants the same."""

    name: str
    fault: str
    origin: str
    edits: tuple[Edit, ...]

    @property
    def package(self) -> str:
        """The room of the first edit: `engine`, or "" for a file directly in the package."""
        parts = Path(self.edits[0].file).parts
        return parts[1] if len(parts) > 2 else ""


def read_mutants() -> list[Mutant]:
    """All planted faults, in the order of the files."""
    rows = [row for path in sorted(FOLDER.glob("*.toml")) for row in tomllib.loads(path.read_text("utf-8"))["mutant"]]
    return [_mutant(row) for row in rows]


def _mutant(row: dict[str, Any]) -> Mutant:
    edits = row["edits"] if "edits" in row else [{key: row[key] for key in ("file", "old", "new")}]
    return Mutant(row["name"], row["fault"], row["origin"], tuple(Edit(**edit) for edit in edits))
