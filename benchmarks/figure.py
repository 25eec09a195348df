"""What a benchmark found and the table that shows it; it knows no server and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure must keep, with `limit` in the figure's unit."""

    direction: Literal["at least", "at most"]
    limit: float

    def holds(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        return value >= self.limit if self.direction == "at least" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, measured once per round; its median counts. `absolute` says of what it is the ratio, for a reader."""

    benchmark: str
    name: str
    unit: str
    rounds: tuple[float, ...]
    bound: Bound | None
    absolute: str

    @property
    def value(self) -> float:
        return median(self.rounds)

    @property
    def is_missed(self) -> bool:
        return self.bound is not None and not self.bound.holds(self.value)

    def cells(self) -> list[str]:
        """The row of the table."""
        bound, verdict = "none", "shown only"
        if self.bound is not None:
            bound = f"{'>=' if self.bound.direction == 'at least' else '<='} {self.bound.limit:g}"
            verdict = "MISSED" if self.is_missed else "pass"
        unit = f" {self.unit}" if self.unit else ""
        spread = f"{min(self.rounds):.3f} to {max(self.rounds):.3f} ({len(self.rounds)})"
        return [self.benchmark, self.name, f"{self.value:.3f}{unit}", spread, bound, verdict, self.absolute]


_HEADINGS = ["benchmark", "figure", "median", "spread (rounds)", "bound", "result", "absolute"]


def markdown_table(figures: Sequence[Figure]) -> str:
    """A markdown table with aligned columns, one row per figure."""
    rows = [_HEADINGS, *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
