"""What this server makes of a model's chat template: needs the folder's tokenizer and template, no weights.

    python scripts/check_template.py MODEL_FOLDER [--template FILE] [--only COLUMN]

For each column how many cases came out right, and each miss with its reason: what is found out about the template,
whether prompts are those of transformers, whether the calls that the template writes are read back, and whether the
model's own turns keep their tokens. Exit code 1 where something missed. `--template` is for a file to which
CHAT_TEMPLATE may be set.

It is the one script that speaks no HTTP: no server is needed. It imports the benchmarks, which import the package.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.template_matrix import COLUMNS, details, row_of, table  # behind the path that finds it


def main() -> int:
    """Print what there is to say; returns the exit code."""
    parser = argparse.ArgumentParser(description="What kvserve makes of a model's chat template.")
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER", help="with tokenizer.json and a chat template")
    parser.add_argument("--template", type=Path, metavar="FILE", help="a chat template in the place of the folder's")
    parser.add_argument("--only", action="append", choices=COLUMNS, metavar="COLUMN", help=", ".join(COLUMNS))
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.exit(2, f"{arguments.folder} is not a folder.\n")
    file = arguments.template
    name = arguments.folder.name if file is None else f"{arguments.folder.name} with {file.name}"
    row = row_of(name, arguments.folder, arguments.only or COLUMNS, file)
    print("\n".join((*table([row]), "", *details(row))))
    return 1 if row.misses else 0


if __name__ == "__main__":
    sys.exit(main())
