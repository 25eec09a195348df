"""Which tools stood in front of a conversation, and at which of its messages others came in later.

This file knows digests of definitions only: the words of a tool always come from the request itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvserve.sessions.journal import UNWRITTEN, Journal, Rows
from kvserve.sessions.message_rows import Row, digest_of, dump, fields, items, parse

MAX_LAYOUTS = 8
"""Bound on the layouts of one message, the newest kept: a client may send another set at every request."""


@dataclass(frozen=True, slots=True)
class AddedTools:
    """The digests of tools, in order, that came in with the message whose chain is `place`."""

    place: bytes
    tools: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ToolLayout:
    """The digests of the tools in front, in order, and of those added since, the oldest first."""

    front: tuple[bytes, ...] = ()
    added: tuple[AddedTools, ...] = ()

    @property
    def tools(self) -> tuple[bytes, ...]:
        """All tools, in the order in which the model reads them."""
        return (*self.front, *(tool for each in self.added for tool in each.tools))

    def continues(self, before: "ToolLayout") -> bool:
        """Whether the model reads the same as under `before`, with nothing or more tools behind."""
        return self.front == before.front and self.added[: len(before.added)] == before.added

    def stages(self, anchor: bytes | None) -> Iterator[tuple[bytes, "ToolLayout"]]:
        """The layouts from the first to this one, each with the message from which on it holds: the front's is
        `anchor`."""
        if anchor is not None:
            yield anchor, replace(self, added=())
        for num, each in enumerate(self.added, start=1):
            yield each.place, replace(self, added=self.added[:num])


NO_TOOLS = ToolLayout()


class ToolLayouts:
    """The layouts that conversations were rendered with, by the chain of the message from which on each holds; at most
    `max_digests` in all, the least recently used message dropped first. The owner holds the lock."""

    def __init__(self, max_digests: int = 1 << 17, journal: Journal = UNWRITTEN) -> None:
        self._max_digests = max_digests
        self._journal = journal
        self._at: OrderedDict[bytes, dict[ToolLayout, None]] = OrderedDict()
        self._written: set[bytes] = set()
        self._num_digests = 0

    def at(self, chain: bytes) -> tuple[ToolLayout, ...]:
        """The layouts that hold from this message on, the newest first."""
        return tuple(reversed(self._at.get(chain, {})))

    def put(self, chain: bytes, layout: ToolLayout, *, is_lasting: bool) -> None:
        """A prompt was rendered with this layout, which holds from this message on. `is_lasting`: write it down."""
        layouts = self._at.setdefault(chain, {})
        self._at.move_to_end(chain)
        is_new = layout not in layouts
        layouts.pop(layout, None)
        layouts[layout] = None
        self._num_digests += len(layout.tools) if is_new else 0
        if len(layouts) > MAX_LAYOUTS:
            gone = next(iter(layouts))
            del layouts[gone]
            self._num_digests -= len(gone.tools)
        if is_lasting and (is_new or chain not in self._written):
            self._put(chain)
        while self._num_digests > self._max_digests and len(self._at) > 1:
            self.drop(next(iter(self._at)))

    def put_along(
        self, path: Sequence[bytes], answer: bytes | None, layout: ToolLayout, is_lasting: Callable[[bytes], bool]
    ) -> None:
        """A request read the messages of this path, the first answer among them, with this layout. Note it there, at
        the messages that brought tools in and, where another layout was in force after that, at the end."""
        for chain, stage in layout.stages(answer):
            if chain in path:
                self.put(chain, stage, is_lasting=is_lasting(chain))
        last = next((found[0] for chain in reversed(path) if (found := self.at(chain))), None)
        if last not in (None, layout):
            self.put(path[-1], layout, is_lasting=is_lasting(path[-1]))

    def drop(self, chain: bytes) -> None:
        """Drop the layouts of a message that is not kept any more."""
        self._num_digests -= sum(len(layout.tools) for layout in self._at.pop(chain, {}))
        self.drop_row(chain)

    def drop_row(self, chain: bytes) -> None:
        """Drop the row of a message's layouts."""
        if chain in self._written:
            self._written.remove(chain)
            self._journal.drop("layouts", chain)

    def clear(self) -> None:
        """Drop all layouts."""
        for chain in list(self._at):
            self.drop(chain)

    def put_all(self) -> None:
        """Tell the journal every layout that has a row."""
        for chain in self._written:
            self._put(chain)

    def load(self, rows: Rows, is_lasting: Callable[[bytes], bool]) -> None:
        """Take in the rows of messages that are `is_lasting`. Raises ValueError for rows of another form."""
        for chain, body in rows.get("layouts", ()):
            self._written.add(chain)
            for row in items(parse(body).get("layouts")):
                self.put(chain, layout_of(row), is_lasting=False)
            if not is_lasting(chain):
                self.drop(chain)

    def _put(self, chain: bytes) -> None:
        self._written.add(chain)
        self._journal.put("layouts", chain, partial(_body, tuple(self._at[chain])))


def layout_row(layout: ToolLayout) -> Row:
    """A layout as plain values."""
    added = [{"place": each.place.hex(), "tools": _texts(each.tools)} for each in layout.added]
    return {"front": _texts(layout.front), "added": added}


def layout_of(row: object) -> ToolLayout:
    """The layout of a row. Raises ValueError."""
    values = fields(row)
    added = [fields(each) for each in items(values.get("added"))]
    return ToolLayout(
        _digests(values.get("front")),
        tuple(AddedTools(digest_of(each.get("place")), _digests(each.get("tools"))) for each in added),
    )


def _body(layouts: Sequence[ToolLayout]) -> bytes:
    return dump({"layouts": [layout_row(layout) for layout in layouts]})


def _texts(digests: Sequence[bytes]) -> list[str]:
    return [digest.hex() for digest in digests]


def _digests(row: object) -> tuple[bytes, ...]:
    return tuple(map(digest_of, items(row)))
