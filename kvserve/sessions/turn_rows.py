"""The turn store's rows: a message as the model saw it, conflicts at a chain, the record of a request.

A node names its parent by number; a message that its output or its record's path holds is written once.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import ImageSpan, RequestId, ToolSpec
from kvserve.sessions.message_rows import (
    Row,
    digest_of,
    dump,
    fields,
    flag,
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


@dataclass(frozen=True, slots=True)
class LastRead:
    """When a node was last read, by a count of requests, and until when its row is kept, in seconds since the epoch."""

    serial: int
    until: float


@dataclass(frozen=True, slots=True)
class Conflicts:
    """What a chain keeps of nodes that were dropped: see `ChainState`."""

    said: bytes | None
    is_doubtful: bool
    meaning: bytes | None
    is_contested: bool


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


def last_read_body(reading: LastRead) -> bytes:
    """The row of when a node was read."""
    return dump({"serial": reading.serial, "until": reading.until})


def last_read_of(body: bytes) -> LastRead:
    """When a row's node was read. Raises ValueError."""
    row = parse(body)
    return LastRead(number(row.get("serial")), seconds(row.get("until")))


def conflicts_body(conflicts: Conflicts) -> bytes:
    """The row of a chain's conflicts."""
    said, meaning = conflicts.said, conflicts.meaning
    return dump(
        {
            "said": None if said is None else said.hex(),
            "is_doubtful": conflicts.is_doubtful,
            "meaning": None if meaning is None else meaning.hex(),
            "is_contested": conflicts.is_contested,
        }
    )


def conflicts_of(body: bytes) -> Conflicts:
    """The conflicts of a row. Raises ValueError."""
    row = parse(body)
    said, meaning = (None if row.get(name) is None else digest_of(row[name]) for name in ("said", "meaning"))
    return Conflicts(said, flag(row.get("is_doubtful")), meaning, flag(row.get("is_contested")))


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
        tools=tools_of(row.get("tools")),
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


def tools_of(row: object) -> tuple[ToolSpec, ...]:
    """Tools from their rows. Raises ValueError."""
    return tuple(tool_of(tool) for tool in items(row))


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
