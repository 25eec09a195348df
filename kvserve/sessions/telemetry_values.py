"""The first telemetry text of each kind. Clients put telemetry at the front of their prompts; prompts that show the
same text share what follows. This file knows texts, no rules; none of them is a user's words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvserve.sessions.journal import UNWRITTEN, Journal
from kvserve.sessions.journaled_store import JournaledEntry, JournaledStore
from kvserve.sessions.message_rows import dump, number, parse, seconds, text_of

MAX_VALUES = 64
MAX_CHARACTERS = 512
"""A longer text is no telemetry: it is rendered as it was sent."""


@dataclass(slots=True)
class _First(JournaledEntry):
    text: str


class TelemetryValues(JournaledStore[str, _First]):
    """The first text of each key, which is the telemetry without its values."""

    def __init__(self, max_values: int = MAX_VALUES, journal: Journal = UNWRITTEN) -> None:
        super().__init__("telemetry", journal, max_entries=max_values)

    def first(self, key: str, text: str, until: float | None = None) -> str:
        """The first text of this key. `until`: its row is kept so long at least; None: it is not written down."""
        if len(key) + len(text) > MAX_CHARACTERS:
            return text
        return self._first(key, _First(text), until).text

    def _row_key(self, key: str) -> bytes:
        return key.encode("utf-8", "surrogatepass")

    def _row_body(self, key: str, entry: _First, serial: int) -> Callable[[], bytes]:
        return partial(dump, {"text": entry.text, "until": entry.until, "serial": serial})

    def _stored(self, row_key: bytes, body: bytes) -> tuple[float, str, _First]:
        row = parse(body)
        first = _First(text_of(row.get("text")), until=seconds(row.get("until")))
        return number(row.get("serial")), row_key.decode("utf-8", "surrogatepass"), first
