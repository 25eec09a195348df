"""Reads the lines of trace files back: what the package only writes, and tests look at."""

import json
from typing import NamedTuple

from kvserve.observe.trace import format_line


class Event(NamedTuple):
    """A line's event: its name and its fields."""

    name: str
    fields: dict[str, object]

    @property
    def line(self) -> str:
        """As the package writes it."""
        return format_line(self.name, **self.fields)


def parse_line(line: str) -> Event:
    """The event of a line that `format_line` wrote, with or without its newline. Raises ValueError for another line."""
    name, _, rest = line.rstrip("\n").partition(" ")
    fields: dict[str, object] = {}
    decoder = json.JSONDecoder()
    while rest:
        key, _, rest = rest.partition("=")
        if key in fields:
            raise ValueError(f"the field {key!r} stands twice")
        fields[key], end = decoder.raw_decode(rest)
        if rest[end : end + 1] not in ("", " "):
            raise ValueError(f"text after the value of {key!r}")
        rest = rest[end + 1 :]
    event = Event(name, fields)
    format_line(name, **fields)  # raises ValueError for what cannot name an event or a field
    return event
