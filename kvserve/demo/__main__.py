"""`python -m kvserve.demo FAMILY DIR [--slow]` builds one demo model; it knows only the command line."""

import argparse
import sys
from pathlib import Path

from kvserve.demo.build import ALL_FAMILIES, SLOW, TINY, build_model


def main() -> None:
    """Build the model and write the folder's path to standard output."""
    parser = argparse.ArgumentParser(prog="python -m kvserve.demo", description="Build a small random model.")
    parser.add_argument("family", choices=sorted(ALL_FAMILIES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slow", action="store_true", help="large enough for benchmarks of decoding")
    args = parser.parse_args()
    built = build_model(args.family, args.directory, scale=SLOW if args.slow else TINY)
    sys.stdout.write(f"{built}\n")


if __name__ == "__main__":
    main()
