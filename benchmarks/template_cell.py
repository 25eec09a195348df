"""One cell of the template matrix: a column's case, and how it came out. It knows no column."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.template_reference import NotRendered

type Verdict = Literal["ok", "miss", "dropped", "not counted"]
"""`dropped`: the template itself leaves something of the turn out, and all before it is kept."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What the template leaves out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cell:
    """How a case came out, and why where it did not come out well."""

    column: str
    case: str
    verdict: Verdict
    reason: str = ""


type Judged = str | NotRendered | Dropped | None
"""None: it is right. A text: why it is a miss."""


def judged(column: str, case: str, judge: Callable[[], Judged]) -> Cell:
    """The cell of a judgement; whatever it raises is a miss."""
    try:
        found = judge()
    except Exception as error:  # noqa: BLE001  # a case that fails must not hide the others
        return Cell(column, case, "miss", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    match found:
        case None:
            return Cell(column, case, "ok")
        case NotRendered(reason):
            return Cell(column, case, "not counted", reason)
        case Dropped(reason):
            return Cell(column, case, "dropped", reason)
        case _:
            return Cell(column, case, "miss", found)
