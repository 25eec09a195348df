"""What came first and stays: the order of each set of tools, and each kind of telemetry, which clients put at the front
of their prompts. Prompts with the same first values share what follows. No value is a user's words.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvserve.core import ToolSpec
from kvserve.sessions.journal import UNWRITTEN, Journal, JournaledEntry, JournaledStore
from kvserve.sessions.message_rows import digest_of, dump, items, number, parse, seconds, text_of, tool_of, tool_row

MAX_VALUES = 64
MAX_CHARACTERS = 512
"""A longer text is no telemetry: it is rendered as it was sent."""

type _Key = tuple[bytes, tuple[str, ...]]


@dataclass(slots=True)
class _Order(JournaledEntry):
    tools: tuple[ToolSpec, ...]


class ToolOrders(JournaledStore[_Key, _Order]):
    """The first order of each set of tools; the one that was used last stays, however large it is."""

    def __init__(self, max_sets: int, max_bytes: int = 16 << 20, journal: Journal = UNWRITTEN) -> None:
        super().__init__("tools", journal, max_entries=max_sets, max_bytes=max_bytes, min_entries=1)

    def as_seen(self, digest: bytes, tools: Sequence[ToolSpec], until: float | None = None) -> tuple[ToolSpec, ...]:
        """The tools in their first order. The digest is not trusted alone: tools are compared as values. `until`: the
        row is kept so long at least; None: it is not written down."""
        key = _key(digest, tools)
        return self._first(key, _order(key, tuple(tools)), until).tools

    def _row_key(self, key: _Key) -> bytes:
        return hashlib.sha256(repr(key).encode("utf-8", "backslashreplace")).digest()

    def _row_body(self, key: _Key, entry: _Order, serial: int) -> Callable[[], bytes]:
        return partial(_body, key[0], entry.tools, entry.until, serial)

    def _stored(self, row_key: bytes, body: bytes) -> tuple[float, _Key, _Order]:
        row = parse(body)
        tools = tuple(map(tool_of, items(row.get("tools"))))
        key = _key(digest_of(row.get("digest")), tools)
        return number(row.get("serial")), key, _order(key, tools, seconds(row.get("until")))


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


def _key(digest: bytes, tools: Sequence[ToolSpec]) -> _Key:
    return digest, tuple(sorted(map(_spec_text, tools)))


def _order(key: _Key, tools: tuple[ToolSpec, ...], until: float | None = None) -> _Order:
    return _Order(tools, until=until, num_bytes=2 * sum(map(len, key[1])))  # the key's texts, and the tools themselves


def _body(digest: bytes, tools: tuple[ToolSpec, ...], until: float | None, serial: int) -> bytes:
    rows = [tool_row(tool) for tool in tools]
    return dump({"digest": digest.hex(), "tools": rows, "until": until, "serial": serial})


def _spec_text(tool: ToolSpec) -> str:
    """Equal for equal tools; unlike `==` it tells true, 1 and 1.0 apart."""
    value = [tool.name, tool.description, tool.parameters, tool.strict]
    return json.dumps(value, sort_keys=True, default=dict)
