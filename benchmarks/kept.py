"""Rows that are measured in parts and kept as JSON beside the table they make: a part replaces its own rows alone.

It knows no benchmark: a row is a dataclass of plain values, told apart by client, conversation and family.
"""

import fcntl
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from benchmarks.recordings import RECORDED_CLIENTS, Conversation
from benchmarks.reuse_oracle import PLAYED_FAMILIES

RESULTS = Path(__file__).parent / "results"

type Key = tuple[str, str, str]
"""Client, conversation, family."""


class Row(Protocol):
    """What a row is told apart by."""

    @property
    def client(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...


def key(row: Row) -> Key:
    """Which row it is."""
    return row.client, row.name, row.family


@dataclass(frozen=True, slots=True)
class Part:
    """What is played at once: all but `left_out`, begun until `end` (seconds of the monotonic clock)."""

    left_out: frozenset[Key] = frozenset()
    end: float = math.inf

    def of(self, talks: Iterable[Conversation], family: str) -> list[Conversation]:
        """Those that are not left out."""
        return [talk for talk in talks if (talk.client, talk.name, family) not in self.left_out]

    def is_over(self) -> bool:
        """Whether its time has passed."""
        return time.monotonic() >= self.end


WHOLE = Part()


class KeptRows[R: Row]:
    """The rows of one table in `results/NAME.json`, the table itself in `NAME.md`."""

    def __init__(self, name: str, kind: type[R], report: Callable[[Sequence[R]], str], folder: Path = RESULTS) -> None:
        """`report` writes the whole Markdown file from all rows."""
        self._rows_file = folder / f"{name}.json"
        self._table_file = folder / f"{name}.md"
        self._adapter: TypeAdapter[list[R]] = TypeAdapter(list[kind])  # type: ignore[valid-type]  # kind is R
        self._report = report

    def read(self) -> list[R]:
        """All rows, none where none were kept. Raises ValueError for a file of another form."""
        return self._adapter.validate_json(self._rows_file.read_bytes()) if self._rows_file.exists() else []

    def part(self, *, is_missing: bool, seconds: float) -> Part:
        """Everything or, with `is_missing`, what has no row yet; nothing begins when so many seconds have passed."""
        left_out = frozenset(map(key, self.read())) if is_missing else frozenset[Key]()
        return Part(left_out, time.monotonic() + seconds)

    def put(self, rows: Iterable[R]) -> list[R]:
        """Take these in, in place of what was there of the same name; returns all. Both files are written anew; parts
        that run at the same time wait for each other here."""
        with self._table_file.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = {key(row): row for row in self.read()} | {key(row): row for row in rows}
            merged = sorted(known.values(), key=_order)
            self._rows_file.write_bytes(self._adapter.dump_json(merged, indent=1) + b"\n")
            self._table_file.write_text(self._report(merged), encoding="utf-8")
        return merged


def _order(row: Row) -> tuple[int, str, int, str, str]:
    """Recorded clients first, as they are listed; a family's rows of a client together."""
    place = RECORDED_CLIENTS.index(row.client) if row.client in RECORDED_CLIENTS else len(RECORDED_CLIENTS)
    family = PLAYED_FAMILIES.index(row.family) if row.family in PLAYED_FAMILIES else len(PLAYED_FAMILIES)
    return place, row.client, family, row.family, row.name
