"""Chat templates that people run against this server: what is loaded, rendered, read and replayed as it must be.

    python -m benchmarks.template_matrix [NAME ...] [--save]

Every real template of shared/templates in a folder of its own, with the control tokens of the real tokenizer and no
weights; the judge is transformers. `scripts/check_template.py` prints the same of any model's folder.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.template_calls import call_cells
from benchmarks.template_cell import Cell
from benchmarks.template_folders import TEMPLATES, template_folder
from benchmarks.template_load import load_cells
from benchmarks.template_model import Model, load_model
from benchmarks.template_reference import Reference
from benchmarks.template_render import render_cells
from benchmarks.template_replay import replay_cells

COLUMNS: Mapping[str, Callable[[Model, Reference], Iterator[Cell]]] = {
    "load": load_cells,
    "render": render_cells,
    "calls": call_cells,
    "replay": replay_cells,
}
RESULTS = Path(__file__).parent / "results" / "templates.md"


@dataclass(frozen=True, slots=True)
class Row:
    """All cells of one template."""

    name: str
    cells: tuple[Cell, ...]

    def of(self, column: str) -> list[Cell]:
        """Those of a column."""
        return [cell for cell in self.cells if cell.column == column]

    @property
    def misses(self) -> list[Cell]:
        """Those that should have come out otherwise."""
        return [cell for cell in self.cells if cell.verdict == "miss"]


def row_of(name: str, folder: Path, columns: Iterable[str] = COLUMNS) -> Row:
    """The cells of a folder. A folder that cannot be loaded has one, which says why."""
    try:
        model, reference = load_model(folder), Reference(folder)
    except Exception as error:  # noqa: BLE001  # the reason is the result
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Row(name, (Cell("load", "template", "miss", reason),))
    return Row(name, tuple(cell for column in columns for cell in COLUMNS[column](model, reference)))


def row_of_template(name: str, columns: Iterable[str] = COLUMNS) -> Row:
    """The cells of a real template."""
    with tempfile.TemporaryDirectory(prefix="kvserve-template-") as scratch:
        return row_of(name, template_folder(name, Path(scratch)), columns)


# --- tables ----------------------------------------------------------------------------------------------------------


def count(cells: Sequence[Cell]) -> str:
    """How many of those that count are right, and how many turns the template itself changes."""
    verdicts = Counter(cell.verdict for cell in cells)
    counted = len(cells) - verdicts["not counted"] - verdicts["dropped"]
    if not counted and not verdicts["dropped"]:
        return "none"
    return f"{verdicts['ok']}/{counted}" + (f" + {verdicts['dropped']}" if verdicts["dropped"] else "")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each template, with its cells by column."""
    yield f"| template | {' | '.join(COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for row in rows:
        yield f"| {row.name} | {' | '.join(count(row.of(column)) for column in COLUMNS)} |"


def details(row: Row) -> Iterator[str]:
    """Each miss with its reason, then what is not counted, by reason."""
    for cell in row.misses:
        yield f"- {cell.column}, {cell.case}: {_plain(cell.reason)}"
    for column in COLUMNS:
        others: dict[tuple[str, str], list[str]] = {}
        for cell in row.of(column):
            if cell.verdict in ("dropped", "not counted"):
                others.setdefault((cell.verdict, cell.reason), []).append(cell.case)
        for (verdict, reason), cases in others.items():
            yield f"- {column}, {verdict} ({', '.join(cases)}): {_plain(reason)}"


def _plain(reason: str) -> str:
    return f"`{reason.replace('`', chr(39))}`" if any(mark in reason for mark in "<>[]|*_") else reason


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    reasons = "\n\n".join("\n".join((f"### {row.name}", "", *details(row))) for row in rows if any(details(row)))
    return f"""# Real chat templates

`python -m benchmarks.template_matrix --save`: {len(rows)} templates of models that people run, each with a small
vocabulary that has the control tokens of the real tokenizer. The judge is transformers' `apply_chat_template`.

- load: what is found out about the template before it is used.
- render: text and ids are those of transformers; a client's spelling of a control token is text.
- calls: what the template writes of a call is read back from random pieces, each value exactly.
- replay: turns that a model wrote in odd tokens stand in the next prompt with their own ids.

`a/b` are the cases that came out right of those that count; `+ n` are turns of which the template itself drops or
changes something later. What transformers refuses or writes with a loss is not counted.

{chr(10).join(table(rows))}

## Why

{reasons}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 for a miss."""
    parser = argparse.ArgumentParser(prog="benchmarks.template_matrix", description="Real chat templates, judged.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these templates")
    parser.add_argument("--save", action="store_true", help="write the table of all templates to results/templates.md")
    given = parser.parse_args(arguments)
    if not TEMPLATES:
        parser.exit(2, "The real templates (shared/templates, in or beside the repository) are not here.\n")
    rows = [row_of_template(name) for name in given.names or TEMPLATES]
    print("\n".join(table(rows)))
    for row in rows if given.names else ():
        print("\n".join(("", row.name, *details(row))))
    if given.save and not given.names:
        RESULTS.write_text(report(rows), encoding="utf-8")
    return 1 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
