"""What the stores of conversations tell of their changes, so that somebody can write them down. It knows no file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

type Kind = Literal[
    "node", "read", "place", "record", "tools", "layouts", "healing", "branch", "counter", "beginning", "telemetry"
]
"""What a row is: a message as the model saw it; when it was last read; doubts about a place; a request; the first order
of a set of tools; where tools stood in a conversation; what the model wrote at a place; a branch of a session; a number
that is not given twice; a system prompt and how often prompts began with it; the telemetry that came first."""

type Rows = Mapping[Kind, Sequence[tuple[bytes, bytes]]]
"""Everything that was written down: (key, body) by kind."""


class Journal(Protocol):
    """Takes changes in their order, at once and without failing; called under the stores' locks."""

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """This row is now so. `body` is asked later, on another thread: it reads immutable values only."""

    def drop(self, kind: Kind, key: bytes) -> None:
        """This row is gone."""


class _Unwritten:
    """Nothing is written down."""

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Nothing."""

    def drop(self, kind: Kind, key: bytes) -> None:
        """Nothing."""


UNWRITTEN: Journal = _Unwritten()


class JournalSwitch:
    """A journal that leads to another one, and at another time to yet another."""

    def __init__(self, to: Journal = UNWRITTEN) -> None:
        self.to = to

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        """Passed on."""
        self.to.put(kind, key, body)

    def drop(self, kind: Kind, key: bytes) -> None:
        """Passed on."""
        self.to.drop(kind, key)


def number_key(number: int) -> bytes:
    """A number as a key: keys sort as their numbers do."""
    return number.to_bytes(8, "big")
