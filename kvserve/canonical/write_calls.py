"""The optional exception to rendering what was sent: the contents that past `write` calls wrote become digests.

Apply it last, to the messages that are rendered: what is put back from the past may hold the contents again.
"""

import hashlib
import json
import re
from collections.abc import Sequence

from kvserve.core import Block, Message, ToolCallBlock

WRITE_TOOLS = frozenset({"write", "Write", "write_file", "WriteFile", "writeFile", "create_file"})
CONTENT_KEY = "content"

_PLACEHOLDER = re.compile(r"\[\d+ characters, sha256 [0-9a-f]{16}\]")


def with_write_content_digested(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with `content` of every write call replaced by its length and digest. Calls whose arguments are
    not a JSON object with text under that key stay as they are. Changes nothing in place; doing it twice is doing it
    once."""
    return tuple(_digested_message(message) for message in messages)


def _digested_message(message: Message) -> Message:
    if message.role != "assistant" or not any(map(_is_write, message.blocks)):
        return message
    return Message(message.role, tuple(map(_digested_block, message.blocks)), message.name)


def _is_write(block: Block) -> bool:
    return isinstance(block, ToolCallBlock) and block.name in WRITE_TOOLS


def _digested_block(block: Block) -> Block:
    if not isinstance(block, ToolCallBlock) or block.name not in WRITE_TOOLS:
        return block
    try:
        arguments = json.loads(block.arguments)
    except (ValueError, RecursionError):
        return block
    content = arguments.get(CONTENT_KEY) if isinstance(arguments, dict) else None
    if not isinstance(content, str) or _PLACEHOLDER.fullmatch(content):
        return block
    arguments[CONTENT_KEY] = _placeholder(content)
    return ToolCallBlock(block.call_id, block.name, json.dumps(arguments, ensure_ascii=False))


def _placeholder(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return f"[{len(content)} characters, sha256 {digest[:16]}]"
