"""Messages, outputs and tools as JSON values and back, without loss."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import cast, get_args

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
    Written,
)

type Row = dict[str, object]
"""A value of JSON: text, numbers, booleans, null, lists and objects only."""

_ROLES = frozenset(get_args(Role))


def dump(row: object) -> bytes:
    """JSON in UTF-8. Lone surrogates, which clients that cut text send, are kept."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=dict)
    return text.encode("utf-8", "surrogatepass")


def parse(body: bytes) -> Row:
    """The object of a dumped text. Raises ValueError for another text."""
    return fields(json.loads(body.decode("utf-8", "surrogatepass")))


# --- messages --------------------------------------------------------------------------------------------------------


def message_row(message: Message) -> Row:
    """A message as plain values."""
    return {"role": message.role, "name": message.name, "blocks": [_block_row(block) for block in message.blocks]}


def message_of(row: object) -> Message:
    """The message of a row. Raises ValueError where the row is not of that form."""
    values = fields(row)
    role = values.get("role")
    if role not in _ROLES:
        raise ValueError(f"unknown role: {role!r}")
    blocks = tuple(_block(block) for block in items(values.get("blocks")))
    return Message(cast(Role, role), blocks, optional_text(values.get("name")))


def _block_row(block: Block) -> Row:
    match block:
        case TextBlock(text, is_ours):
            return {"kind": "text", "text": text, **({"is_ours": True} if is_ours else {})}
        case ThinkingBlock(text, signature):
            return {"kind": "thinking", "text": text, "signature": signature}
        case ToolCallBlock(call_id, name, arguments):
            return {"kind": "call", "call_id": call_id, "name": name, "arguments": arguments}
        case ImageBlock(source):
            return {"kind": "image", "source": source}
        case ToolBlock():
            return {"kind": "tool", **asdict(block)}
        case ToolResultBlock(call_id, blocks, is_error):
            inner = [_block_row(each) for each in blocks]
            return {"kind": "result", "call_id": call_id, "is_error": is_error, "blocks": inner}


_BLOCKS: Mapping[object, Callable[[Row], Block]] = {
    "text": lambda row: TextBlock(text_of(row.get("text")), flag(row.get("is_ours", False))),
    "thinking": lambda row: ThinkingBlock(text_of(row.get("text")), optional_text(row.get("signature"))),
    "call": lambda row: ToolCallBlock(
        text_of(row.get("call_id")), text_of(row.get("name")), text_of(row.get("arguments"))
    ),
    "image": lambda row: ImageBlock(text_of(row.get("source"))),
    "tool": lambda row: ToolBlock(
        text_of(row.get("name")),
        optional_text(row.get("description")),
        optional_text(row.get("parameters")),
        optional_flag(row.get("strict")),
        flag(row.get("is_removed")),
    ),
    "result": lambda row: ToolResultBlock(
        text_of(row.get("call_id")),
        tuple(_inner_block(block) for block in items(row.get("blocks"))),
        flag(row.get("is_error")),
    ),
}


def _block(row: object) -> Block:
    values = fields(row)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise ValueError(f"unknown kind of block: {kind!r}")
    return _BLOCKS[kind](values)


def _inner_block(row: object) -> TextBlock | ImageBlock | ToolBlock:
    block = _block(row)
    if not isinstance(block, TextBlock | ImageBlock | ToolBlock):
        raise ValueError(f"no block of a tool's result: {type(block).__name__}")
    return block


# --- writings --------------------------------------------------------------------------------------------------------


_NOT_WRITTEN = ImageBlock | ToolResultBlock | ToolBlock


def written_row(written: Written) -> Row:
    """An output as plain values. Raises ValueError for blocks that a model cannot write."""
    message = written.message
    if strange := [block for block in message.blocks if isinstance(block, _NOT_WRITTEN)]:
        raise ValueError(f"A model does not write a {type(strange[0]).__name__}.")
    return {
        "name": message.name,
        "blocks": [_block_row(block) for block in message.blocks],
        "prefix_ids": list(written.prefix_ids),
        "ids": list(written.ids),
        "opens_reasoning": written.opens_reasoning,
    }


def written_of(row: object) -> Written:
    """The output of a row. Raises ValueError where the row is not of that form."""
    values = fields(row)
    blocks = tuple(_block(block) for block in items(values.get("blocks")))
    if any(isinstance(block, _NOT_WRITTEN) for block in blocks):
        raise ValueError("a block that a model does not write")
    message = Message("assistant", blocks, optional_text(values.get("name")))
    return Written(
        message, numbers(values.get("prefix_ids")), numbers(values.get("ids")), flag(values.get("opens_reasoning"))
    )


# --- tools -----------------------------------------------------------------------------------------------------------


def tool_row(tool: ToolSpec) -> Row:
    """A tool as plain values."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def tool_of(row: object) -> ToolSpec:
    """The tool of a row. Raises ValueError where the row is not of that form."""
    values = fields(row)
    return ToolSpec(
        text_of(values.get("name")),
        optional_text(values.get("description")),
        fields(values.get("parameters")),
        optional_flag(values.get("strict")),
    )


# --- values ----------------------------------------------------------------------------------------------------------


def fields(value: object) -> Row:
    """An object. Raises ValueError for another value, as the functions below do."""
    if not isinstance(value, dict):
        raise ValueError(f"no object: {value!r}")
    return value


def items(value: object) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"no list: {value!r}")
    return value


def text_of(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"no text: {value!r}")
    return value


def optional_text(value: object) -> str | None:
    """A text or null."""
    return None if value is None else text_of(value)


def flag(value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"no boolean: {value!r}")
    return value


def optional_flag(value: object) -> bool | None:
    """true, false or null."""
    return None if value is None else flag(value)


def number(value: object) -> int:
    """A whole number that is not negative."""
    if type(value) is not int or value < 0:
        raise ValueError(f"no number: {value!r}")
    return value


def seconds(value: object) -> float:
    """A number, whole or not."""
    if type(value) not in (int, float):
        raise ValueError(f"no number: {value!r}")
    return float(cast(float, value))


def numbers(value: object) -> tuple[int, ...]:
    """A list of whole numbers that are not negative."""
    ids = tuple(items(value))
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("not all are numbers")
    return cast(tuple[int, ...], ids)


def digest_of(value: object) -> bytes:
    """Bytes that were written as hexadecimal digits."""
    return bytes.fromhex(text_of(value))
