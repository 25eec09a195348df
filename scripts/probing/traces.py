"""Trace files (LOG_ROOT/<date>/cache-session-*.log) as events. It knows their form, not what an event means."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from probing.wire import Json, ProbeError


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The files that the paths name. Raises ProbeError where there is none."""
    files = [file for path in paths for file in (sorted(path.glob("cache-session-*.log")) if path.is_dir() else [path])]
    if not files:
        raise ProbeError(f"no cache-session-*.log in {', '.join(map(str, paths))}")
    return files


def events(file: Path) -> Iterator[tuple[str, Json]]:
    """Name and fields of each event; a line that was cut is skipped and said. Raises ProbeError where the file cannot
    be read."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(f"{file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_line(line)
        except ValueError as error:
            print(f"{file}:{number}: not a whole event ({error})", file=sys.stderr)
            continue
        yield event


def parse_line(line: str) -> tuple[str, Json]:
    """An event's name and its fields. Raises ValueError for a line that holds none."""
    name, _, rest = line.rstrip("\n").partition(" ")
    fields: Json = {}
    decoder = json.JSONDecoder()
    while rest:
        key, _, rest = rest.partition("=")
        fields[key], end = decoder.raw_decode(rest)
        rest = rest[end + 1 :]
    return name, fields
