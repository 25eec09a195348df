"""One event as one line of text, and back. It knows no file and no field's meaning.

    turn time="2026-11-21T12:31:07.123+01:00" request_id="a1b2c3" num_prompt_tokens=10432 stream=true

The line is the event's name, then ` key=value` for each field; every value is JSON without spaces around it. Whatever
is not printable is escaped, so that an event is one line and harmless in a terminal. A script that cannot import this
package reads a line in six of its own:

    name, _, rest = line.rstrip("\n").partition(" ")
    fields = {}
    while rest:
        key, _, rest = rest.partition("=")
        fields[key], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end + 1 :]
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True, init=False)
class Event:
    """Something that happened: a name and fields whose values are what JSON can say; others are written as text."""

    name: str
    fields: Mapping[str, object]

    def __init__(self, name: str, /, **fields: object) -> None:
        """Raises ValueError where the name or a key is not lower case letters, digits and underscores."""
        for word in (name, *fields):
            if not NAME.match(word):
                raise ValueError(f"{word!r} cannot name an event or a field")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "fields", fields)


def format_line(event: Event) -> str:
    """The event as one printable line without its newline."""
    return " ".join([event.name, *(f"{key}={_json(value)}" for key, value in event.fields.items())])


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
    return Event(name, **fields)


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return text if text.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    # Only strings hold such characters, and there JSON knows this escape (in pairs beyond the basic plane).
    return json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"
