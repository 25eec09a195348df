"""Messages as JSON for the database, and back. It knows the nouns of `core/` by their fields, none by its name: a new
kind of block needs no line here.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kvserve.core import Block, Message

_KIND = "kind"
_BLOCKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Block.__value__)}


def encode_messages(messages: Sequence[Message]) -> str:
    """One line of JSON."""
    return json.dumps([_plain(message) for message in messages], ensure_ascii=False, separators=(",", ":"))


def decode_messages(text: str) -> tuple[Message, ...]:
    """The messages that `encode_messages` wrote. Raises ValueError for what it cannot have written."""
    try:
        return tuple(
            Message(row["role"], tuple(_block(block) for block in row["blocks"]), row.get("name"))
            for row in json.loads(text)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a list of messages: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields if isinstance(value, Message) else {_KIND: type(value).__name__, **fields}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _block(row: Mapping[str, Any]) -> Any:
    """A block, and the blocks inside it: everything that is a list is a tuple of blocks."""
    fields = {
        name: tuple(_block(item) for item in value) if isinstance(value, list) else value
        for name, value in row.items()
        if name != _KIND
    }
    return _BLOCKS[row[_KIND]](**fields)
