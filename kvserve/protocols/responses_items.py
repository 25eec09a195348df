"""Parses items of `/v1/responses`, and encodes pages of them. This file knows the items' fields, not what a template
makes of them.

The wire has one item for the reasoning, the text and each call of an answer; together they become one assistant
message, as in `/v1/chat/completions`. An item's id tells only which answer the item belongs to.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvserve.core import (
    Block,
    ImageBlock,
    JsonObject,
    Message,
    RequestId,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, filled_text, list_of, mapping, mistyped, page_limit, text
from kvserve.protocols.openai_messages import PLAIN_PARTS, content_reader
from kvserve.protocols.placeholders import read as read_words
from kvserve.protocols.placeholders import words, words_of_unknown
from kvserve.protocols.responses_tools import custom_arguments, model_name
from kvserve.protocols.sealed_thinking import unseal_reasoning

MAX_LIMIT = 100
_DEFAULT_LIMIT = 20

ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# LiteLLM and other clients of several protocols also send `text` and `image_url` parts: they mean the same.
_read_content = content_reader(PLAIN_PARTS)
_OWN_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_(req[0-9a-f]{24})_[0-9]+")


def item_id(kind: str, request_id: RequestId, position: int) -> str:
    """The id of an item of this server; `kind` is its prefix, such as `msg`."""
    return f"{kind}_{request_id}_{position}"


def answer_of_item(wire_id: str) -> RequestId | None:
    """The request whose answer an item belongs to; None for a foreign id."""
    match = _OWN_ITEM.fullmatch(wire_id)
    return RequestId(match[1]) if match else None


# --- what an item says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    """A part of an assistant's answer."""

    kind: Literal["reasoning", "text", "call", "aside"]
    blocks: tuple[Block, ...]


type _Item = Message | _Said


def _read_message(item: Fields) -> _Item:
    wire_role = item.required("role", text)
    if wire_role not in ROLES:
        raise mistyped(f"{item.path}.role", "one of " + ", ".join(f'"{role}"' for role in ROLES), wire_role)
    content = tuple(item.optional("content", _read_content) or ())
    role = ROLES[wire_role]
    return _Said("text", content) if role == "assistant" else Message(role, content)


def _read_reasoning(item: Fields) -> _Item:
    """The whole thoughts, or their summary if the thoughts are missing."""
    thoughts = "".join(item.optional("content", list_of(_read_reasoning_part)) or [])
    sealed = item.optional("encrypted_content", text)
    summary = "\n\n".join(item.optional("summary", list_of(_read_reasoning_part)) or [])
    said = thoughts or (unseal_reasoning(sealed) if sealed else "") or summary
    return _Said("reasoning", (ThinkingBlock(said),) if said else ())


def _read_reasoning_part(value: object, path: str) -> str:
    return mapping(value, path).required("text", text)


def _read_function_call(item: Fields) -> _Item:
    name = model_name(item.required("name", filled_text), item.optional("namespace", filled_text))
    arguments = item.optional("arguments", text)
    call = ToolCallBlock(item.required("call_id", text), name, "{}" if arguments is None else arguments)
    return _Said("call", (call,))


def _read_custom_call(item: Fields) -> _Item:
    name = model_name(item.required("name", filled_text), item.optional("namespace", filled_text))
    said = item.required("input", text)
    return _Said("call", (ToolCallBlock(item.required("call_id", text), name, custom_arguments(said)),))


def _read_output(item: Fields) -> _Item:
    call_id = item.required("call_id", text)
    blocks: tuple[TextBlock | ImageBlock, ...] = tuple(item.required("output", _read_content))
    return Message("tool", (ToolResultBlock(call_id, blocks),))


def _read_client_call(item: Fields) -> _Item:
    """A call of one of OpenAI's own tools that the client ran, such as a shell; it becomes an ordinary call."""
    name = item.required("type", text).removesuffix("_call")
    given = {key: value for key, value in item.values.items() if key not in _NO_ARGUMENTS}
    arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return _Said("call", (ToolCallBlock(item.required("call_id", text), name, arguments),))


def _read_client_output(item: Fields) -> _Item:
    """The output of such a call: a text, a picture of a screen, or an object, which becomes words."""
    # a local shell's output has its call's id under another name
    named = "id" if item.values["type"] == "local_shell_call_output" and "call_id" not in item.values else "call_id"
    call_id = item.required(named, text)
    output = item.values.get("output")
    if isinstance(output, Mapping) and output.get("type") == "computer_screenshot":
        output = [output]
    if isinstance(output, str) or (isinstance(output, list) and all(map(_is_part, output))):
        return Message("tool", (ToolResultBlock(call_id, tuple(_read_content(output, f"{item.path}.output"))),))
    lines = read_words({key: item.values.get(key) for key in ("status", "output")}).lines
    said = (TextBlock("\n".join(lines), is_ours=True),) if lines else ()
    return Message("tool", (ToolResultBlock(call_id, said),))


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") in PLAIN_PARTS


def _read_separately(item: Fields) -> _Item:
    """A server's work between the assistant's words, on its own lines, apart from the assistant's text."""
    return _Said("aside", (TextBlock(f"\n{words(item)}\n", is_ours=True),))


def _read_unknown(item: Fields) -> _Item:
    """An unknown item that can be read; it is the assistant's unless it names another role."""
    said = words_of_unknown(item, tuple(_ITEMS))
    role = ROLES.get(str(item.values.get("role")), "assistant")
    if role == "assistant":
        return _Said("aside", (TextBlock(f"\n{said}\n", is_ours=True),))
    return Message(role, (TextBlock(said, is_ours=True),))


def _read_answer_to_server(item: Fields) -> _Item:
    """The user's reply to a server."""
    return Message("user", (TextBlock(words(item), is_ours=True),))


_CLIENT_TOOLS = ("local_shell", "shell", "apply_patch", "computer")
_NO_ARGUMENTS = frozenset(
    ("type", "id", "call_id", "status", "caller", "created_by", "environment", "pending_safety_checks")
)
_OF_A_SERVER = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request"),
    *("compaction", "compaction_summary", "compaction_trigger", "program", "program_output"),
)
_ITEMS: Mapping[str, Callable[[Fields], _Item]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_function_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    **dict.fromkeys((f"{tool}_call" for tool in _CLIENT_TOOLS), _read_client_call),
    **dict.fromkeys((f"{tool}_call_output" for tool in _CLIENT_TOOLS), _read_client_output),
    **dict.fromkeys(_OF_A_SERVER, _read_separately),
    "mcp_approval_response": _read_answer_to_server,
}


def _read_item(value: object, path: str) -> tuple[_Item, RequestId | None]:
    """An item's content, and the request whose answer it belongs to."""
    item = mapping(value, path)
    kind = item.optional("type", text) or ("message" if "role" in item.values else None)
    if kind is None:
        raise BadRequest(f"{path}.type is required.", param=f"{path}.type")
    wire_id = item.optional("id", text)
    return _ITEMS.get(kind, _read_unknown)(item), answer_of_item(wire_id) if wire_id else None


# --- messages --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Answer:
    """The assistant's message that is being joined from items."""

    request_id: RequestId | None
    kinds: set[str] = field(default_factory=set)
    blocks: list[Block] = field(default_factory=list)

    def takes(self, said: _Said, request_id: RequestId | None) -> bool:
        """Whether an item belongs to this answer. Without ids: text ends an answer, except for calls behind it, and
        what follows calls without their results belongs to the calls."""
        if request_id is not None and self.request_id is not None:
            return request_id == self.request_id
        return said.kind == "call" or "text" not in self.kinds or "call" in self.kinds

    def add(self, said: _Said) -> None:
        """Add an item."""
        self.kinds.add(said.kind)
        self.blocks += said.blocks

    @property
    def messages(self) -> tuple[Message, ...]:
        """The message; none if the answer holds only unreadable thoughts."""
        return (Message("assistant", tuple(self.blocks)),) if self.blocks or "text" in self.kinds else ()


def read_items(items: Sequence[object], path: str) -> tuple[Message, ...]:
    """The messages in items. Raises BadRequest naming the field."""
    messages: list[Message] = []
    answer: _Answer | None = None
    for index, value in enumerate(items):
        item, request_id = _read_item(value, f"{path}[{index}]")
        if isinstance(item, _Said) and answer is not None and answer.takes(item, request_id):
            answer.add(item)
            continue
        messages += answer.messages if answer is not None else ()
        answer = None
        if isinstance(item, Message):
            messages.append(item)
        else:
            answer = _Answer(request_id)
            answer.add(item)
    return (*messages, *(answer.messages if answer is not None else ()))


def input_items(fields: Fields, request_id: RequestId) -> list[JsonObject]:
    """`input` as wire items, each with an id; `read_items` reads them. Raises BadRequest."""

    def read(value: object, path: str) -> list[JsonObject]:
        if isinstance(value, str):
            part = {"type": "input_text", "text": value}
            return [{"type": "message", "role": "user", "content": [part]}]
        if not isinstance(value, list | tuple):
            raise mistyped(path, "a string or an array of items", value)
        return [item.values for item in list_of(mapping)(value, path)]

    items = fields.optional("input", read) or []
    return [
        item if item.get("id") or _is_reference(item) else {**item, "id": item_id("in", request_id, index)}
        for index, item in enumerate(items)
    ]


def _is_reference(item: JsonObject) -> bool:
    return item.get("type") == "item_reference"


def resolve_references(items: Sequence[JsonObject], find: Callable[[str], JsonObject]) -> list[JsonObject]:
    """The items, with each reference replaced by the item that it names. Raises BadRequest, and as `find` does."""
    return [
        find(Fields(item, f"input[{index}]").required("id", filled_text)) if _is_reference(item) else item
        for index, item in enumerate(items)
    ]


# --- pages -----------------------------------------------------------------------------------------------------------


def list_items(items: Sequence[JsonObject], query: Mapping[str, str]) -> dict[str, object]:
    """A page of `items` (oldest first): `order`, `limit` and `after` are as in the query. Raises BadRequest."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest('order: expected "asc" or "desc".', param="order")
    limit = page_limit(query, _DEFAULT_LIMIT, MAX_LIMIT)
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item.get("id") for item in ordered]
    if after is not None:
        if after not in ids:
            raise BadRequest(f"after: there is no item {after!r}.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": len(page) < len(ordered),
    }
