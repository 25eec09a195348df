"""The order in which a set of tools first came. It knows when two tools are one as values, not how they are written."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvserve.core import ToolSpec
from kvserve.sessions.journal import UNWRITTEN, Journal, Rows
from kvserve.sessions.message_rows import digest_of, dump, items, number, parse, seconds, tool_of, tool_row

type _Key = tuple[bytes, tuple[str, ...]]

ROW_LIFE_SECONDS = 3_600.0
"""A set in use is written down again when its row would go so much earlier than it should, not at every request."""


@dataclass(slots=True)
class _Order:
    """A first order. `until` is when its row may go, in seconds since the epoch, None while it has none."""

    tools: tuple[ToolSpec, ...]
    num_bytes: int
    until: float | None = None


class ToolOrders:
    """The first order of at most `max_sets` sets in `max_bytes`, least recently used first. Its owner has the lock."""

    def __init__(self, max_sets: int, max_bytes: int = 16 << 20, journal: Journal = UNWRITTEN) -> None:
        self._max_sets = max_sets
        self._max_bytes = max_bytes
        self._journal = journal
        self._first: OrderedDict[_Key, _Order] = OrderedDict()
        self._num_bytes = 0
        self._num_written = 0

    def as_seen(self, digest: bytes, tools: Sequence[ToolSpec], until: float | None = None) -> tuple[ToolSpec, ...]:
        """The set as it first came. The digest is never trusted alone: the tools are compared as values. `until`: its
        row is kept so long at least; None: it is not written down."""
        key = digest, tuple(sorted(map(_spec_text, tools)))
        order = self._first.get(key)
        if order is None:
            order = self._take(key, tuple(tools))
        self._first.move_to_end(key)
        if until is not None and (order.until is None or until - order.until > ROW_LIFE_SECONDS):
            order.until = until
            self._put(key, order)
        while len(self._first) > self._max_sets or (self._num_bytes > self._max_bytes and len(self._first) > 1):
            self._forget(next(iter(self._first)))
        return order.tools

    def clear(self) -> None:
        """Forget all orders."""
        for key in list(self._first):
            self._forget(key)

    def expire(self, now: float) -> None:
        """Forget the orders whose rows nobody needs any more."""
        for key, order in list(self._first.items()):
            if order.until is not None and order.until < now:
                self._forget(key)

    def put_all(self) -> None:
        """Tell the journal everything that is to last."""
        for key, order in self._first.items():
            if order.until is not None:
                self._put(key, order)

    def load(self, rows: Rows) -> None:
        """Take in what was written down. Raises ValueError for rows of another form."""
        found = [parse(body) for _, body in rows.get("tools", ())]
        for row in sorted(found, key=lambda row: number(row.get("serial"))):
            tools = tuple(tool_of(tool) for tool in items(row.get("tools")))
            key = digest_of(row.get("digest")), tuple(sorted(map(_spec_text, tools)))
            self._take(key, tools).until = seconds(row.get("until"))
            self._num_written = number(row.get("serial")) + 1

    def _take(self, key: _Key, tools: tuple[ToolSpec, ...]) -> _Order:
        order = self._first[key] = _Order(tools, 2 * sum(map(len, key[1])))  # the key's texts, and the tools themselves
        self._num_bytes += order.num_bytes
        return order

    def _forget(self, key: _Key) -> None:
        order = self._first.pop(key)
        self._num_bytes -= order.num_bytes
        if order.until is not None:
            self._journal.drop("tools", _row_key(key))

    def _put(self, key: _Key, order: _Order) -> None:
        self._journal.put("tools", _row_key(key), partial(_body, key[0], order.tools, order.until, self._num_written))
        self._num_written += 1


def _row_key(key: _Key) -> bytes:
    return hashlib.sha256(repr(key).encode("utf-8", "backslashreplace")).digest()


def _body(digest: bytes, tools: tuple[ToolSpec, ...], until: float | None, serial: int) -> bytes:
    rows = [tool_row(tool) for tool in tools]
    return dump({"digest": digest.hex(), "tools": rows, "until": until, "serial": serial})


def _spec_text(tool: ToolSpec) -> str:
    """Equal for equal tools; unlike `==` it tells true, 1 and 1.0 apart."""
    value = [tool.name, tool.description, tool.parameters, tool.strict]
    return json.dumps(value, sort_keys=True, default=_as_dict)


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no value of JSON: {type(value).__name__}")
