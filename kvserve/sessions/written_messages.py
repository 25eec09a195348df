"""How large a message is, and when two outputs of the model are the same. Messages are values here."""

import hashlib
import sys
from dataclasses import replace

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    Written,
)

VALUE_BYTES = 64
"""A frozen value with a few fields, roughly, as Python holds it."""

ID_BYTES = 36
"""One token id in a tuple: its place and its integer."""


def message_bytes(message: Message) -> int:
    """Bytes that Python holds for a message: texts exactly, structure roughly."""
    return VALUE_BYTES + sum(_block_bytes(block) for block in message.blocks)


def written_bytes(written: Written) -> int:
    """Bytes of an output, its message included."""
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
        case ToolBlock(name, description, parameters):
            return VALUE_BYTES + sum(map(sys.getsizeof, (name, description, parameters)))


def same_writing(one: Written, other: Written) -> bool:
    """Whether the model wrote the same thinking, text and raw calls. Call ids, signatures and tokens may differ."""
    return one is other or _words(one.message) == _words(other.message)


def said_digest(written: Written) -> bytes:
    """A digest that is equal for the same outputs (`same_writing`) and only for them."""
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
    """The message without call ids and signatures: what a model reads of it."""
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
