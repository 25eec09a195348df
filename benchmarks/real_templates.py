"""The chat templates that people run against this server, as a table.

    python -m benchmarks.real_templates [NAME ...] [--loops] [--save]

Every real template of shared/templates in a folder of its own, with the control tokens of the real tokenizer and no
weights, and five with their real tokenizers. It joins the columns of the matrix with the closed loops.
"""

import argparse
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.template_folders import TEMPLATES, WHOLE_VOCABULARIES, template_folder
from benchmarks.template_loops import cells_of
from benchmarks.template_matrix import COLUMNS, LOOPS, Row, details, row_of, table

RESULTS = Path(__file__).parent / "results" / "templates.md"


def row_of_template(name: str, columns: Collection[str] = tuple(COLUMNS)) -> Row:
    """The cells of a real template."""
    wanted = [column for column in columns if column in COLUMNS]
    with tempfile.TemporaryDirectory(prefix="kvserve-template-") as scratch:
        row = row_of(name, template_folder(name, Path(scratch)), wanted)
    return replace(row, cells=(*row.cells, *cells_of(name))) if LOOPS in columns else row


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    reasons = "\n\n".join("\n".join((f"### {row.name}", "", *details(row))) for row in rows if any(details(row)))
    return f"""# Real chat templates

`python -m benchmarks.real_templates --save`: {len(TEMPLATES)} templates of models that people run, each with a small
vocabulary that has the control tokens of the real tokenizer, and {len(WHOLE_VOCABULARIES)} with a real one.
The judge is transformers' `apply_chat_template`.

- load: what is found out about the template before it is used.
- render: text and ids are those of transformers; a client's spelling of a control token is text.
- calls: what the template writes of a call is read back from random pieces, each value exactly.
- replay: turns that a model wrote in odd tokens stand in the next prompt with their own ids.
- loops: six turns over HTTP with a tiny real model whose draws are led; from the second on all that was read and
  written before is found again. A loop ends where a call is not read.

`a/b` are the cases that came out right of those that count; `+ n` are turns of which the template itself drops or
changes something later. What transformers refuses or writes with a loss is not counted.

{chr(10).join(table(rows, (*COLUMNS, LOOPS)))}

## Why

{reasons}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 for a miss."""
    parser = argparse.ArgumentParser(prog="benchmarks.real_templates", description="Real chat templates, judged.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these templates")
    parser.add_argument("--loops", action="store_true", help="closed loops over HTTP too")
    parser.add_argument("--save", action="store_true", help="write the table of all to results/templates.md")
    given = parser.parse_args(arguments)
    if not TEMPLATES:
        parser.exit(2, "The real templates (shared/templates, in or beside the repository) are not here.\n")
    columns = (*COLUMNS, LOOPS) if given.loops or given.save else tuple(COLUMNS)
    rows = [row_of_template(name, columns) for name in given.names or (*TEMPLATES, *WHOLE_VOCABULARIES)]
    print("\n".join(table(rows, columns)))
    for row in rows if given.names else ():
        print("\n".join(("", row.name, *details(row))))
    if given.save and not given.names:
        RESULTS.write_text(report(rows), encoding="utf-8")
    return 1 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
