"""The turn store's rows: a message as the model saw it, when it was last read, conflicts at a chain, the record of a
request; and when the journal is told of them. The store holds the lock.

A node names its parent by number; a message that its output or its record's path holds is written once.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kvserve.core import ImageSpan, RequestId
from kvserve.sessions.journal import Journal, Rows, number_key
from kvserve.sessions.message_rows import (
    Row,
    digest_of,
    dump,
    fields,
    items,
    message_of,
    message_row,
    number,
    numbers,
    optional_text,
    parse,
    seconds,
    text_of,
    tool_of,
    tool_row,
    written_of,
    written_row,
)
from kvserve.sessions.seen import PACKED, PACKED_BYTES, PathNode, TurnRecord
from kvserve.sessions.tool_layouts import NO_TOOLS, layout_of, layout_row
from kvserve.sessions.turn_state import ChainState, NodeState, node_bytes

# --- nodes -----------------------------------------------------------------------------------------------------------


def node_body(parent: int | None, node: PathNode) -> bytes:
    """The row of a node; `parent` is its parent's number."""
    written = node.written
    is_shared = written is not None and node.message is written.message
    return dump(
        {
            "parent": parent,
            "owner": node.owner if parent is None else None,
            "chain": node.chain.hex(),
            "meaning": node.meaning.hex(),
            "message": None if is_shared else message_row(node.message),
            "written": None if written is None else written_row(written),
        }
    )


def node_of(body: bytes, nodes: Mapping[int, PathNode]) -> PathNode:
    """The node of a row, below one of `nodes`. Raises ValueError for another row, or where the parent is missing."""
    row = parse(body)
    parent = None
    if row.get("parent") is not None:
        parent = nodes.get(number(row.get("parent")))
        if parent is None:
            raise ValueError("a message without the one before it")
    written = written_of(row["written"]) if row.get("written") is not None else None
    if row.get("message") is not None:
        message = message_of(row["message"])
    elif written is not None:
        message = written.message
    else:
        raise ValueError("a node without a message")
    index, owner = (0, text_of(row.get("owner"))) if parent is None else (parent.index + 1, parent.owner)
    return PathNode(parent, digest_of(row.get("chain")), message, written, index, digest_of(row.get("meaning")), owner)


def nodes_of_rows(rows: Rows) -> dict[PathNode, NodeState]:
    """The nodes of these rows, each after its parent; their order of use is not set.

    Raises ValueError or KeyError where the rows do not fit together.
    """
    nodes: dict[int, PathNode] = {}
    for key, body in sorted(rows.get("node", ())):
        nodes[int.from_bytes(key)] = node_of(body, nodes)
    found = {node: NodeState(number, node_bytes(node), 0, until=0.0) for number, node in nodes.items()}
    for key, body in rows.get("read", ()):
        kept, row = found[nodes[int.from_bytes(key)]], parse(body)
        kept.last_read = number(row.get("serial"))
        kept.extend_life(seconds(row.get("until")))
    for node, kept in reversed(found.items()):
        if node.parent is not None:
            parent = found[node.parent]
            parent.num_children += 1
            parent.last_read = max(parent.last_read, kept.last_read)
            parent.extend_life(kept.until or 0.0)
    return found


# --- records ---------------------------------------------------------------------------------------------------------


def record_body(serial: int, record: TurnRecord) -> bytes:
    """A record as a line of JSON, followed by its packed token ids."""
    on_path = {id(node.message): node.index for node in record.leaf.ancestry()}
    messages = [on_path.get(id(message)) for message in record.messages]
    row: Row = {
        "serial": serial,
        "request_id": record.request_id,
        "session": record.session,
        "messages": [
            message_row(message) if index is None else index
            for message, index in zip(record.messages, messages, strict=True)
        ],
        "tools": [tool_row(tool) for tool in record.tools],
        "tools_digest": record.tools_digest.hex(),
        "num_prompt_tokens": record.num_prompt_tokens,
        "starts": list(record.starts),
        "template_arguments": _tagged(record.template_arguments),
        "fired": sorted(record.fired),
        "images": [[span.start, span.end, span.digest] for span in record.images],
        "num_computed_tokens": record.num_computed_tokens,
        "tool_layout": layout_row(record.tool_layout),
    }
    return dump(row) + b"\n" + _little_endian(record.packed_ids)


def record_of(body: bytes, leaf: PathNode) -> tuple[int, TurnRecord]:
    """The serial and the record of a row; `leaf` is the node in which it ends. Raises ValueError."""
    line, _, packed = body.partition(b"\n")  # JSON holds no line break as it is
    row = parse(line)
    path = leaf.path()
    if len(packed) % PACKED_BYTES:
        raise ValueError("half a token")
    record = TurnRecord(
        request_id=RequestId(text_of(row.get("request_id"))),
        session=optional_text(row.get("session")),
        leaf=leaf,
        messages=tuple(
            path[message].message if isinstance(message, int) else message_of(message)
            for message in items(row.get("messages"))
        ),
        tools=tuple(map(tool_of, items(row.get("tools")))),
        tools_digest=digest_of(row.get("tools_digest")),
        packed_ids=_little_endian(packed),
        num_prompt_tokens=number(row.get("num_prompt_tokens")),
        starts=numbers(row.get("starts")),
        template_arguments=_arguments(row.get("template_arguments")),
        fired=frozenset(text_of(rule) for rule in items(row.get("fired"))),
        images=tuple(_image(items(span)) for span in items(row.get("images"))),
        num_computed_tokens=None if row.get("num_computed_tokens") is None else number(row["num_computed_tokens"]),
        tool_layout=layout_of(row["tool_layout"]) if row.get("tool_layout") is not None else NO_TOOLS,
    )
    return number(row.get("serial")), record


def _image(span: Sequence[object]) -> ImageSpan:
    start, end, digest = span
    return ImageSpan(number(start), number(end), text_of(digest))


def _little_endian(packed: bytes) -> bytes:
    """From the machine's byte order to the file's, or back."""
    if sys.byteorder == "little":
        return packed
    ids = array(PACKED, packed)
    ids.byteswap()
    return ids.tobytes()


def _tagged(value: object) -> object:
    """Values of JSON in which tuples and lists stay apart: arguments are compared with those of the next request."""
    match value:
        case tuple():
            return {"tuple": [_tagged(inner) for inner in value]}
        case list():
            return [_tagged(inner) for inner in value]
        case Mapping():
            return {"object": {key: _tagged(inner) for key, inner in value.items()}}
        case _:
            return value


def _untagged(value: object) -> object:
    match value:
        case {"tuple": list(inner)}:
            return tuple(_untagged(each) for each in inner)
        case {"object": dict(inner)}:
            return {key: _untagged(each) for key, each in inner.items()}
        case list():
            return [_untagged(each) for each in value]
        case dict():
            raise ValueError("a value without its tag")
        case _:
            return value


def _arguments(row: object) -> Row:
    return fields(_untagged(row))


# --- when they are written --------------------------------------------------------------------------------------------


class PathJournal:
    """Reads the store's maps; of a chain it sets whether it has a row."""

    def __init__(
        self, journal: Journal, kept: Mapping[PathNode, NodeState], states: Mapping[bytes, ChainState]
    ) -> None:
        self._journal = journal
        self._kept = kept
        self._states = states

    def read(self, leaf: PathNode, until: float) -> None:
        """A request has read this path: all of it is written down from now on, until `until` at least."""
        new: list[PathNode] = []
        for node in leaf.ancestry():
            kept = self._kept[node]
            if kept.until is None:
                new.append(node)
            kept.extend_life(until)
        for node in reversed(new):
            self.put_node(node)
        self.put_reading(leaf)

    def put_node(self, node: PathNode) -> None:
        """Write the node, without when it was read."""
        parent = None if node.parent is None else self._kept[node.parent].number
        self._journal.put("node", number_key(self._kept[node].number), partial(node_body, parent, node))
        self.put_conflicts(node.chain)

    def put_reading(self, node: PathNode) -> None:
        """Write when the node was read; its parents were read then too and need no row for it."""
        kept = self._kept[node]
        row = {"serial": kept.last_read, "until": kept.until or 0.0}
        self._journal.put("read", number_key(kept.number), partial(dump, row))

    def node_gone(self, node: PathNode, kept: NodeState) -> None:
        """Drop the rows of a node. Its parent was read when the node was."""
        if kept.until is None:
            return
        self._journal.drop("read", number_key(kept.number))
        self._journal.drop("node", number_key(kept.number))
        if node.parent is not None:
            self.put_reading(node.parent)

    def put_conflicts(self, chain: bytes) -> None:
        """Write what the nodes of a chain do not say, as long as one of them has a row."""
        state = self._states[chain]
        row = state.row() if self.is_lasting(chain) else None
        if row is not None:
            self._journal.put("place", chain, partial(dump, row))
        elif state.has_row:
            self._journal.drop("place", chain)
        state.has_row = row is not None

    def is_lasting(self, chain: bytes) -> bool:
        """Whether a node of this chain has a row."""
        return chain in self._states and any(self._kept[node].until is not None for node in self._states[chain].nodes)

    def put_record(self, serial: int, record: TurnRecord) -> None:
        """Write the record of a request, if its path is written down."""
        kept = self._kept[record.leaf]
        if kept.until is not None:
            self._journal.put("record", number_key(kept.number), partial(record_body, serial, record))

    def record_gone(self, leaf: PathNode) -> None:
        """Drop the row of the record that ended here."""
        kept = self._kept.get(leaf)
        if kept is not None and kept.until is not None:
            self._journal.drop("record", number_key(kept.number))

    def all_gone(self) -> None:
        """Drop all rows."""
        for kept in self._kept.values():
            if kept.until is not None:
                for kind in ("record", "read", "node"):
                    self._journal.drop(kind, number_key(kept.number))
        for chain, state in self._states.items():
            if state.has_row:
                self._journal.drop("place", chain)

    def put_all(self, records: Iterable[tuple[int, TurnRecord]]) -> None:
        """Write everything that has a row."""
        lasting = [(kept.number, node) for node, kept in self._kept.items() if kept.until is not None]
        for _, node in sorted(lasting, key=lambda pair: pair[0]):
            self.put_node(node)
            self.put_reading(node)
        for serial, record in records:
            self.put_record(serial, record)
