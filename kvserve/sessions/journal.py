"""How the stores of conversations tell their changes, to be written down. This file knows no file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

type Kind = Literal[
    "node", "read", "place", "record", "tools", "layouts", "healing", "branch", "counter", "beginning", "telemetry"
]
"""What a row is: a message as the model saw it; when it was last read; conflicts at a chain; a request; the first order
of a set of tools; where tools stood in a conversation; what the model wrote at a place; a branch of a session; a
counter; a system prompt and how often prompts began with it; the telemetry that came first."""

type Rows = Mapping[Kind, Sequence[tuple[bytes, bytes]]]
"""All rows of a file: (key, body) by kind."""


class Journal(Protocol):
    """Takes changes in order, at once and without failing; called under the stores' locks."""

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Set a row. `body` is called later, on another thread: it reads immutable values only."""

    def drop(self, kind: Kind, key: bytes) -> None:
        """Delete a row."""


class _Unwritten:
    """Writes nothing."""

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Nothing."""

    def drop(self, kind: Kind, key: bytes) -> None:
        """Nothing."""


UNWRITTEN: Journal = _Unwritten()


class JournalSwitch:
    """A journal that passes changes on to another one, which can be replaced."""

    def __init__(self, to: Journal = UNWRITTEN) -> None:
        self.to = to

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Passed on."""
        self.to.put(kind, key, body)

    def drop(self, kind: Kind, key: bytes) -> None:
        """Passed on."""
        self.to.drop(kind, key)


def number_key(number: int) -> bytes:
    """A number as a key; keys sort as their numbers do."""
    return number.to_bytes(8, "big")
