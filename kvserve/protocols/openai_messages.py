"""Parses OpenAI chat messages. This file knows the wire's roles and content parts, not what a template makes of them.

Messages keep their order and number, whatever agents send: system messages in the middle, two user messages in a row,
results without a call, empty content, an assistant message last. Empty text makes no block, so that "", null, [] and a
missing `content` are the same message. Only the text of a reasoning field is kept, not its name.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from kvserve.errors import BadRequest
from kvserve.protocols.fields import (
    Fields,
    Reader,
    child_path,
    filled_text,
    list_of,
    mapping,
    mistyped,
    single_keys,
    text,
    word,
)
from kvserve.protocols.placeholders import NOT_HEARD, NOT_READ, words, words_of_unknown

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")

_FILE_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_ELSEWHERE = ("file_id", "file_url")

type PlainBlock = TextBlock | ImageBlock


# --- content ---------------------------------------------------------------------------------------------------------


def _read_text_part(part: Fields) -> TextBlock:
    return TextBlock(part.required("text", text))


def _read_refusal_part(part: Fields) -> TextBlock:
    return TextBlock(part.required("refusal", text))


def _read_image_part(part: Fields) -> PlainBlock:
    """`image_url` is an address or {"url": address}; an image uploaded to another server becomes words."""
    if part.values.get("image_url") is None and part.optional("file_id", filled_text) is not None:
        return TextBlock(words(part, NOT_READ), is_ours=True)

    def read(value: object, path: str) -> str:
        if isinstance(value, Mapping):
            return mapping(value, path).required("url", filled_text)
        return filled_text(value, path)

    return ImageBlock(part.required("image_url", read))


def _read_audio_part(part: Fields) -> TextBlock:
    """Words: no model here hears audio."""
    return TextBlock(words(Fields({"type": part.values["type"]}, part.path), NOT_HEARD), is_ours=True)


def _read_thinking_part(part: Fields) -> ThinkingBlock:
    return ThinkingBlock(part.required("thinking", text), part.optional("signature", text))


def _read_file_part(part: Fields) -> TextBlock:
    """The file of a `file` part, as chat/completions has it. Raises BadRequest."""
    return _read_input_file(part.required("file", mapping))


def _read_input_file(part: Fields) -> TextBlock:
    """The text in `file_data` (a data URL or plain base64) below `filename`, if there is one. A file on another server
    or without text becomes words: other documents would be guessed at. Raises BadRequest."""
    name = part.optional("filename", text)
    if part.values.get("file_data") is None and any(part.optional(place, text) for place in _ELSEWHERE):
        return _unread_file(part)
    said = _FILE_DATA_URL.sub("", part.required("file_data", filled_text), count=1)
    try:
        content = base64.b64decode(said, validate=True).decode("utf-8-sig")
    except UnicodeDecodeError:
        return _unread_file(part)
    except ValueError as error:  # binascii.Error included
        path = child_path(part.path, "file_data")
        raise BadRequest(f"{path}: expected base64 or a data URL with it ({error}).", param=path) from error
    if "\0" in content:
        return _unread_file(part)
    return TextBlock("\n".join(line for line in (name, content) if line), is_ours=True)


def _unread_file(part: Fields) -> TextBlock:
    told = {name: part.values.get(name) for name in ("filename", "file_url")}
    return TextBlock(words(Fields({"type": "file", **told}, part.path), NOT_READ), is_ours=True)


PLAIN_PARTS: Mapping[str, Callable[[Fields], PlainBlock]] = {
    "text": _read_text_part,
    "input_text": _read_text_part,
    "output_text": _read_text_part,
    "refusal": _read_refusal_part,
    "image_url": _read_image_part,
    "input_image": _read_image_part,
    "computer_screenshot": _read_image_part,
    "input_audio": _read_audio_part,
    "file": _read_file_part,
    "input_file": _read_input_file,
}
ASSISTANT_PARTS: Mapping[str, Callable[[Fields], PlainBlock | ThinkingBlock]] = {
    **PLAIN_PARTS,
    "thinking": _read_thinking_part,
}


def content_reader[T: PlainBlock | ThinkingBlock](
    parts: Mapping[str, Callable[[Fields], T]],
    *,
    in_messages: bool = True,
) -> Reader[list[T | TextBlock]]:
    """A reader of `content`: a string, or an array of the allowed `parts`. In messages, which a client cannot repair,
    unknown parts become words if they can be read."""

    def read_part(value: object, path: str) -> T | TextBlock:
        part = mapping(value, path)
        kind = part.required("type", text)
        if kind in parts:
            return parts[kind](part)
        if kind in ASSISTANT_PARTS or not in_messages:  # a known part in the wrong place
            raise mistyped(f"{path}.type", "one of " + ", ".join(f'"{known}"' for known in parts), kind)
        return TextBlock(words_of_unknown(part, tuple(parts)), is_ours=True)

    def read(value: object, path: str) -> list[T | TextBlock]:
        if isinstance(value, str):
            return [TextBlock(value)] if value else []
        if not isinstance(value, list | tuple):
            raise mistyped(path, "a string or an array of parts", value)
        blocks = list_of(read_part)(value, path)
        return [block for block in blocks if isinstance(block, ImageBlock) or block.text]

    return read


_read_plain_content = content_reader(PLAIN_PARTS)
_read_assistant_content = content_reader(ASSISTANT_PARTS)
_read_text_content = content_reader({"text": _read_text_part}, in_messages=False)


# --- tool calls ------------------------------------------------------------------------------------------------------


def _read_arguments(value: object, path: str) -> str:
    """The JSON text as received; an object, which some clients send, becomes compact JSON."""
    if isinstance(value, Mapping):
        return json.dumps(single_keys(value, path).values, ensure_ascii=False, separators=(",", ":"))
    return text(value, path)


def _read_function(fields: Fields, call_id: str | None) -> ToolCallBlock:
    name = fields.required("name", filled_text)
    arguments = fields.optional("arguments", _read_arguments)
    # calls of the legacy form have no ids: the function's name stands for it, here and in the result
    return ToolCallBlock(name if call_id is None else call_id, name, "{}" if arguments is None else arguments)


def _read_call(value: object, path: str) -> ToolCallBlock:
    call = mapping(value, path)
    kind = call.optional("type", text) or "function"
    if kind != "function":
        raise mistyped(f"{path}.type", '"function"', kind)
    return _read_function(call.required("function", mapping), call.optional("id", text) or "")


_read_call_list = list_of(_read_call)


def _read_calls(fields: Fields) -> list[ToolCallBlock]:
    calls = fields.optional("tool_calls", _read_call_list) or []
    legacy = fields.optional("function_call", mapping)
    if legacy is None:
        return calls
    if calls:
        raise BadRequest(f"{legacy.path} and tool_calls are both given: give one of them.", param=legacy.path)
    return [_read_function(legacy, None)]


# --- messages --------------------------------------------------------------------------------------------------------


def read_message(value: object, path: str) -> Message:
    """One wire message. Raises BadRequest naming the field."""
    fields = mapping(value, path)
    wire_role = fields.required("role", text)
    if wire_role not in ROLES:
        raise mistyped(f"{path}.role", "one of " + ", ".join(f'"{role}"' for role in ROLES), wire_role)
    role = ROLES[wire_role]
    name = fields.optional("name", text) or None
    if role == "assistant":
        return Message(role, tuple(_read_assistant_blocks(fields)), name)
    content = tuple(fields.optional("content", _read_plain_content) or ())
    if role == "tool":
        call_id = fields.optional("tool_call_id", text) or (name if wire_role == "function" else None) or ""
        return Message(role, (ToolResultBlock(call_id, content),), name)
    return Message(role, content, name)


def _read_assistant_blocks(fields: Fields) -> list[Block]:
    reasoning = [fields.optional(key, text) for key in REASONING_FIELDS]
    thinking = [ThinkingBlock(said) for said in reasoning if said][:1]
    content = fields.optional("content", _read_assistant_content) or []
    refusal = fields.optional("refusal", text)
    refused = [TextBlock(refusal)] if refusal else []
    return [*thinking, *content, *refused, *_read_calls(fields)]


def read_prediction(value: object, path: str) -> str:
    """The text of `prediction`, which the answer may resemble. Raises BadRequest."""
    said = mapping(value, path)
    said.required("type", word("content"))
    return "".join(block.text for block in said.required("content", _read_text_content) if isinstance(block, TextBlock))


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """`messages`, at least one. Raises BadRequest."""
    messages = fields.required("messages", list_of(read_message))
    if not messages:
        raise BadRequest("messages must not be empty.", param="messages")
    return tuple(messages)
