"""What a message weighs, when two of the model's writings are one, and a writing as a plain row.

It knows messages as values; not where they are kept, nor how a template writes them.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    Written,
)

type Row = dict[str, object]
"""A value of JSON: text, numbers, booleans, null, lists and objects only."""

VALUE_BYTES = 64
"""A frozen value with a few fields, roughly, as Python holds it."""

ID_BYTES = 36
"""One token id in a tuple: its place and its integer."""


def message_bytes(message: Message) -> int:
    """Bytes that Python holds for a message, its texts exactly, its structure roughly."""
    return VALUE_BYTES + sum(_block_bytes(block) for block in message.blocks)


def written_bytes(written: Written) -> int:
    """Bytes of a writing, its message included."""
    return VALUE_BYTES + message_bytes(written.message) + ID_BYTES * (len(written.ids) + len(written.prefix_ids))


def _block_bytes(block: Block) -> int:
    match block:
        case TextBlock(text):
            return VALUE_BYTES + sys.getsizeof(text)
        case ThinkingBlock(text, signature):
            return VALUE_BYTES + sys.getsizeof(text) + sys.getsizeof(signature)
        case ToolCallBlock(call_id, name, arguments):
            return VALUE_BYTES + sys.getsizeof(call_id) + sys.getsizeof(name) + sys.getsizeof(arguments)
        case ToolResultBlock(call_id, blocks):
            return VALUE_BYTES + sys.getsizeof(call_id) + sum(_block_bytes(inner) for inner in blocks)
        case ImageBlock(source):
            return VALUE_BYTES + sys.getsizeof(source)


def same_writing(one: Written, other: Written) -> bool:
    """Whether the model wrote the same thinking, text and raw calls. Call ids and signatures are not its words, and
    the same words may have been said with other tokens."""
    return one is other or _words(one.message) == _words(other.message)


def said_digest(written: Written) -> bytes:
    """Equal for the same writings (`same_writing`) and only for them."""
    return hashlib.sha256(repr(_words(written.message)).encode()).digest()


def _words(message: Message) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = []
    for block in message.blocks:
        match block:
            case TextBlock(text) if text:
                words.append(("text", text))
            case ThinkingBlock(text) if text:
                words.append(("thinking", text))
            case ToolCallBlock(_, name, arguments):
                words.append(("call", name, arguments))
    return words


def without_ids(message: Message) -> Message:
    """The message with its call ids and signatures blanked: what is left is what a model reads of it."""
    return replace(message, blocks=tuple(_without_ids(block) for block in message.blocks))


def _without_ids(block: Block) -> Block:
    match block:
        case ToolCallBlock() | ToolResultBlock():
            return replace(block, call_id="")
        case ThinkingBlock():
            return replace(block, signature=None)
    return block


def same_words(one: Message, other: Message) -> bool:
    """Whether two messages are equal but for their call ids and signatures."""
    return one is other or one == other or without_ids(one) == without_ids(other)


# --- rows ------------------------------------------------------------------------------------------------------------


def written_row(written: Written) -> Row:
    """A writing as plain values. Raises ValueError for blocks that a model cannot write."""
    return {
        "name": written.message.name,
        "blocks": [_block_row(block) for block in written.message.blocks],
        "prefix_ids": list(written.prefix_ids),
        "ids": list(written.ids),
        "opens_reasoning": written.opens_reasoning,
    }


def written_of(row: object) -> Written:
    """The writing of a row. Raises ValueError where the row is not of that form."""
    fields = _fields(row)
    blocks = tuple(_block(block) for block in _list(fields.get("blocks")))
    opens_reasoning = fields.get("opens_reasoning")
    if not isinstance(opens_reasoning, bool):
        raise ValueError(f"opens_reasoning is no boolean: {opens_reasoning!r}")
    message = Message("assistant", blocks, _optional_text(fields.get("name")))
    return Written(message, _ids(fields.get("prefix_ids")), _ids(fields.get("ids")), opens_reasoning)


def _block_row(block: Block) -> Row:
    match block:
        case TextBlock(text):
            return {"kind": "text", "text": text}
        case ThinkingBlock(text, signature):
            return {"kind": "thinking", "text": text, "signature": signature}
        case ToolCallBlock(call_id, name, arguments):
            return {"kind": "call", "call_id": call_id, "name": name, "arguments": arguments}
    raise ValueError(f"A model does not write a {type(block).__name__}.")


_BLOCKS: Mapping[object, Callable[[Row], Block]] = {
    "text": lambda row: TextBlock(_text(row.get("text"))),
    "thinking": lambda row: ThinkingBlock(_text(row.get("text")), _optional_text(row.get("signature"))),
    "call": lambda row: ToolCallBlock(_text(row.get("call_id")), _text(row.get("name")), _text(row.get("arguments"))),
}


def _block(row: object) -> Block:
    fields = _fields(row)
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise ValueError(f"unknown kind of block: {kind!r}")
    return _BLOCKS[kind](fields)


def _fields(value: object) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"no object: {value!r}")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"no list: {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"no text: {value!r}")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _ids(value: object) -> tuple[int, ...]:
    ids = tuple(_list(value))
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("not all are token ids")
    return ids  # type: ignore[return-value]
