"""Parses Anthropic's messages. This file knows the wire's roles and content blocks, not what a template makes of them.

One wire message can become several: each tool result of a user's message becomes its own message, as in OpenAI's form,
so that the model reads the same conversation from both APIs. The order stays: a system message in the middle stays in
the middle. Empty text makes no block.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvserve.core import (
    Block,
    ImageBlock,
    JsonObject,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from kvserve.errors import BadRequest
from kvserve.protocols.anthropic_tools import (
    read_compaction,
    read_tool_addition,
    read_tool_reference,
    read_tool_removal,
    read_tool_search_result,
)
from kvserve.protocols.fields import (
    Fields,
    Reader,
    filled_text,
    flag,
    list_of,
    mapping,
    mistyped,
    single_keys,
    text,
    word,
)
from kvserve.protocols.placeholders import NOT_READ, words, words_of_unknown
from kvserve.protocols.sealed_thinking import signed_text
from kvserve.protocols.thinking import LEVELS

type PlainBlock = TextBlock | ImageBlock | ToolBlock
type BlockReader = Callable[[Fields], Sequence[Block]]


# --- blocks ----------------------------------------------------------------------------------------------------------


def _read_text(block: Fields) -> list[TextBlock]:
    return _text_blocks(block.required("text", text))


def _text_blocks(said: str, *, is_ours: bool = False) -> list[TextBlock]:
    return [TextBlock(said, is_ours)] if said else []


def _read_image(block: Fields) -> Sequence[PlainBlock]:
    """The bytes in the block as a data URL, or the address. A file uploaded to another server becomes words."""
    source = block.required("source", mapping)
    match source.required("type", text):
        case "base64":
            kind, data = source.required("media_type", filled_text), source.required("data", filled_text)
            return [ImageBlock(f"data:{kind};base64,{data}")]
        case "url":
            return [ImageBlock(source.required("url", filled_text))]
        case "file":
            return [TextBlock(words(block, NOT_READ), is_ours=True)]
        case other:
            raise mistyped(f"{source.path}.type", '"base64", "url" or "file"', other)


def _read_document(block: Fields) -> Sequence[PlainBlock]:
    """The text of a plain-text document below its title and context; only the name of any other document."""
    source = block.required("source", mapping)
    heads = [said for key in ("title", "context") if (said := block.optional(key, text))]
    match source.required("type", text):
        case "text":
            return _text_blocks("\n".join([*heads, source.required("data", text)]), is_ours=True)
        case "content":
            body = source.required("content", _read_pages)
            if any(isinstance(page, ImageBlock) for page in body):
                pages = (*map(TextBlock, heads), *body)
                return [replace(page, is_ours=True) if isinstance(page, TextBlock) else page for page in pages]
            texts = (page.text for page in body if isinstance(page, TextBlock))
            return _text_blocks("\n".join([*heads, *texts]), is_ours=True)
        case "base64" | "url" | "file" as kind:
            name = {"base64": "data", "url": "url", "file": "file_id"}[kind]
            source.required(name, filled_text)
            return [TextBlock(words(block, NOT_READ), is_ours=True)]
        case other:
            raise mistyped(f"{source.path}.type", '"text", "content", "base64", "url" or "file"', other)


def _read_search_result(block: Fields) -> list[TextBlock]:
    heads = [block.required(key, text) for key in ("title", "source")]
    parts = (part.text for part in block.required("content", _read_texts))
    return _text_blocks("\n".join([*heads, *parts]), is_ours=True)


def _read_thinking(block: Fields) -> list[ThinkingBlock]:
    """The thinking, or the signature's copy of it if the client left the text out."""
    said = block.required("thinking", text)
    signature = block.optional("signature", text)
    if not said.strip() and signature:
        said = signed_text(signature) or said
    return [ThinkingBlock(said)] if said.strip() else []


def _read_redacted_thinking(block: Fields) -> list[ThinkingBlock]:
    """Thinking that this server sealed; other servers' sealed thinking cannot be read and is left out."""
    said = signed_text(block.required("data", text))
    return [ThinkingBlock(said)] if said else []


def _read_tool_use(block: Fields) -> list[ToolCallBlock]:
    arguments = json.dumps(block.required("input", single_keys).values, ensure_ascii=False, separators=(",", ":"))
    return [ToolCallBlock(block.required("id", text), block.required("name", filled_text), arguments)]


def _read_tool_result(block: Fields) -> list[ToolResultBlock]:
    content = block.optional("content", _read_result_content) or []
    is_error = block.optional("is_error", flag) or False
    return [ToolResultBlock(block.required("tool_use_id", text), tuple(content), is_error)]


def _is_of_a_server(kind: str) -> bool:
    """Whether a block type reports work of Anthropic's servers; future types are recognised by their ending."""
    return kind in _OF_A_SERVER or kind.endswith("_tool_result")


_OF_A_SERVER = frozenset(
    (
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_listing",
        "compaction",
        "container_upload",
        "fallback",
        "browser_state",
    )
)

_PLAIN: Mapping[str, Callable[[Fields], Sequence[PlainBlock]]] = {
    "text": _read_text,
    "image": _read_image,
    "document": _read_document,
    "search_result": _read_search_result,
    "tool_reference": read_tool_reference,
}
BLOCKS: Mapping[str, Mapping[str, BlockReader]] = {
    "user": {**_PLAIN, "tool_result": _read_tool_result},
    "assistant": {
        "text": _read_text,
        "thinking": _read_thinking,
        "redacted_thinking": _read_redacted_thinking,
        "tool_use": _read_tool_use,
        "tool_reference": read_tool_reference,
        "tool_search_tool_result": read_tool_search_result,
        "compaction": read_compaction,
    },
    "system": {
        "text": _read_text,
        "tool_reference": read_tool_reference,
        "tool_addition": read_tool_addition,
        "tool_removal": read_tool_removal,
    },
}
"""Which blocks a message of each role may hold."""


# --- content ---------------------------------------------------------------------------------------------------------


def content_reader[T: Block](
    blocks: Mapping[str, Callable[[Fields], Sequence[T]]], *, in_messages: bool = False, is_assistant: bool = False
) -> Reader[list[T | TextBlock]]:
    """A reader of `content`: a string, or an array of the allowed `blocks`. In messages, which a client cannot repair,
    a server's blocks and unknown blocks become words."""

    def read_block(value: object, path: str) -> Sequence[T | TextBlock]:
        block = mapping(value, path)
        kind = block.required("type", text)
        if kind in blocks:
            return blocks[kind](block)
        if kind in _KINDS or not in_messages:  # a known block in the wrong place
            raise mistyped(f"{path}.type", "one of " + ", ".join(f'"{known}"' for known in blocks), kind)
        said = words(block) if _is_of_a_server(kind) else words_of_unknown(block, tuple(blocks))
        return [TextBlock(f"\n{said}\n" if is_assistant else said, is_ours=True)]

    def read(value: object, path: str) -> list[T | TextBlock]:
        if isinstance(value, str):
            return [*_text_blocks(value)]
        if not isinstance(value, list | tuple):
            raise mistyped(path, "a string or an array of blocks", value)
        return [block for some in list_of(read_block)(value, path) for block in some]

    return read


_KINDS = frozenset(kind for blocks in BLOCKS.values() for kind in blocks)
_read_texts = content_reader({"text": _read_text})
_read_pages = content_reader({"text": _read_text, "image": _read_image})
_read_result_content = content_reader(_PLAIN, in_messages=True)
_READERS: Mapping[str, Reader[list[Block]]] = {
    role: content_reader(blocks, in_messages=True, is_assistant=role == "assistant") for role, blocks in BLOCKS.items()
}


def read_system(fields: Fields) -> tuple[Message, ...]:
    """The top-level `system`: no message if it is missing or empty. Raises BadRequest."""
    blocks = fields.optional("system", _read_texts) or []
    return (Message("system", tuple(blocks)),) if blocks else ()


def read_effort(value: object, path: str) -> str | None:
    """The effort of an `output_config`, of a request or of one message. Raises BadRequest."""
    return mapping(value, path).optional("effort", word(*LEVELS))


def read_message(value: object, path: str) -> tuple[Message, ...]:
    """The messages that one wire message becomes: none if a system message only sets the turn's effort.
    Raises BadRequest naming the field."""
    fields = mapping(value, path)
    role = fields.required("role", text)
    if role not in _READERS:
        raise mistyped(f"{path}.role", "one of " + ", ".join(f'"{known}"' for known in _READERS), role)
    effort = fields.optional("output_config", read_effort)
    if role == "system" and effort is not None and fields.values.get("content") is None:
        return ()
    blocks = fields.required("content", _READERS[role])
    if role == "user":
        return tuple(_with_results_apart(blocks))
    said: Role = "assistant" if role == "assistant" else "system"
    return (Message(said, tuple(blocks)),)


def _with_results_apart(blocks: Sequence[Block]) -> Iterator[Message]:
    """The user's words between the tool results, and each result as its own message; an empty message stays."""
    words: list[Block] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if words:
                yield Message("user", tuple(words))
                words = []
            yield Message("tool", (block,))
        else:
            words.append(block)
    if words or not blocks:
        yield Message("user", tuple(words))


def read_messages(fields: Fields) -> list[tuple[Message, ...]]:
    """The messages that each wire message becomes; at least one. Raises BadRequest."""
    messages = fields.required("messages", list_of(read_message))
    if not any(messages):
        raise BadRequest("messages must not be empty.", param="messages")
    return messages


def wire_blocks(value: object) -> Iterator[JsonObject]:
    """The blocks of a parsed content, those inside tool results included."""
    for block in value if isinstance(value, list | tuple) else ():
        yield block
        if block.get("type") == "tool_result":
            yield from wire_blocks(block.get("content"))
