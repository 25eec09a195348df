"""What BACKENDS says: each server's name, URL and key. It knows the text, and asks no server.

Standard library only, and every line must run under Python 3.9: `kinds.py` reads the setting by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

_BACKEND = re.compile(
    r"(?:([A-Za-z0-9._-]+)=)?(https?)://(?:([^@/\s]+)@)?((?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[1-9]\d{0,4})?)/?"
)


class BackendParts(NamedTuple):
    """One of BACKENDS: its name, its URL without a path, and the key that it asks for, None for none."""

    name: str
    url: str
    api_key: str | None


def backends_in(texts: Sequence[str]) -> tuple[BackendParts, ...]:
    """The servers that BACKENDS names. Raises ValueError for what is none, and for a name or a URL that comes twice."""
    found = []
    for text in texts:
        if not (match := _BACKEND.fullmatch(text)):
            raise ValueError(text)
        name, scheme, key, place = match.groups()
        found.append(BackendParts(name or place.lower(), f"{scheme}://{place.lower()}", unquote(key) if key else None))
    if any(len({part[column] for part in found}) < len(found) for column in (0, 1)):
        raise ValueError(texts)
    return tuple(found)
