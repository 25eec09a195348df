"""Where two conversations or two prompts part, in a form that a person can read: by their messages, by their text, or,
where a template parts two prompts of the same messages, by their tokens. It compares; it knows no causes."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Literal

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
    tool_blocks,
)
from kvserve.sessions.seen import TurnRecord
from kvserve.sessions.written_messages import same_words, without_ids

MAX_EXCERPT_CHARACTERS = 80
_CHARACTERS_BEFORE = 24
_PIECE_CHARACTERS = 4_096


@dataclass(frozen=True, slots=True)
class Difference:
    """The first message that differs: its index, its role (as it is now; where it is gone, as it was), the first
    character that differs in its text form, and what stands around there in both: at most 80 characters each.

    A difference in the list of tools has the role `tools`, no index and the name of the tool, and its character is one
    of that tool's JSON. Where messages differ only in a tool that they bring in, `tool` names it. One that only the
    template made has the role `template` where its message is not known. One in a raw prompt has the role `prompt`, and
    its character is one of the whole text.
    """

    message_index: int | None
    role: Role | Literal["tools", "template", "prompt"]
    char: int
    before: str
    after: str
    tool: str | None = None


def first_difference(before: Sequence[Message], after: Sequence[Message]) -> Difference | None:
    """Where `after` is no continuation of `before`; None where it is one. Call ids and signatures do not count."""
    for index, was in enumerate(before):
        now = after[index] if index < len(after) else None
        if now is None:
            return Difference(index, was.role, 0, text_form(was)[:MAX_EXCERPT_CHARACTERS], "")
        if same_words(was, now):
            continue
        was_text, now_text = text_form(was), text_form(now)
        char = shown = common_length(was_text, now_text)
        if was_text == now_text:  # they differ in who speaks, in their name or in how the text is cut into blocks
            was_text, now_text, char = repr(without_ids(was)), repr(without_ids(now)), 0
            shown = common_length(was_text, now_text)
        tool = _changed_tool(was, now)
        return Difference(index, now.role, char, excerpt(was_text, shown), excerpt(now_text, shown), tool)
    return None


def _changed_tool(was: Message, now: Message) -> str | None:
    """The first tool that two messages change differently; None where they differ in anything else."""
    if not same_words(_without_tools(was), _without_tools(now)):
        return None
    pairs = zip_longest(tool_blocks([was]), tool_blocks([now]))
    return next((block.name for pair in pairs if pair[0] != pair[1] for block in pair if block is not None), None)


def _without_tools(message: Message) -> Message:
    return replace(message, blocks=tuple(map(_without_tool, message.blocks)))


def _without_tool(block: Block) -> Block:
    if isinstance(block, ToolResultBlock):
        inner = tuple(TextBlock("") if isinstance(each, ToolBlock) else each for each in block.blocks)
        return replace(block, blocks=inner)
    return TextBlock("") if isinstance(block, ToolBlock) else block


def first_tool_difference(before: Sequence[ToolSpec], after: Sequence[ToolSpec]) -> Difference | None:
    """The first tool that is another one now, is new or is gone, whatever their order; None for an equal set."""
    was, now = ({tool.name: _tool_form(tool) for tool in tools} for tools in (before, after))
    for name in was | now:
        was_text, now_text = was.get(name, ""), now.get(name, "")
        if was_text != now_text:
            char = common_length(was_text, now_text)
            return Difference(None, "tools", char, excerpt(was_text, char), excerpt(now_text, char), name)
    return None


def text_form(message: Message) -> str:
    """A message as one text: its blocks one after the other, each that is no plain text with a mark before it."""
    return "\n".join(_block_form(block) for block in message.blocks)


def _tool_form(tool: ToolSpec) -> str:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return json.dumps(fields, ensure_ascii=False, default=dict)


def _block_form(block: Block) -> str:
    match block:
        case TextBlock(text):
            return text
        case ThinkingBlock(text):
            return f"[thinking] {text}"
        case ToolCallBlock(_, name, arguments):
            return f"[call] {name} {arguments}"
        case ToolResultBlock(_, blocks, is_error):
            mark = "[error]" if is_error else "[result]"
            return "\n".join((mark, *(_block_form(inner) for inner in blocks)))
        case ToolBlock(name, is_removed=is_removed):
            return f"[{'removed' if is_removed else 'tool'}] {name}{_definition_form(block)}"
        case ImageBlock(source):
            return f"[image] {hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _definition_form(block: ToolBlock) -> str:
    return "".join(f" {part}" for part in (block.description, block.parameters) if part is not None)


def common_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    start, limit = 0, min(len(one), len(other))
    while start < limit and one[start : start + _PIECE_CHARACTERS] == other[start : start + _PIECE_CHARACTERS]:
        start += _PIECE_CHARACTERS
    end = min(start + _PIECE_CHARACTERS, limit)
    for place in range(start, end):
        if one[place] != other[place]:
            return place
    return limit if start >= limit else end


def excerpt(text: str, char: int) -> str:
    """What stands around a character: at most 80 characters."""
    start = max(0, char - _CHARACTERS_BEFORE)
    return text[start : start + MAX_EXCERPT_CHARACTERS]


# --- by tokens --------------------------------------------------------------------------------------------------------

type Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

_NUM_TOKENS_AROUND = 48
"""Tokens on each side that are decoded to show a difference."""


def template_difference(
    before: TurnRecord, ids: Sequence[int], num_shared: int, decode: Decode | None
) -> Difference | None:
    """The place after `num_shared` common tokens of a request and the one before it; its character is one of the
    message as the template writes it. None where one prompt is the beginning of the other."""
    if decode is None or num_shared >= min(len(before.ids), len(ids)):
        return None
    index, start = message_at(before, num_shared), message_start(before, num_shared)
    window = slice(max(start, num_shared - _NUM_TOKENS_AROUND), num_shared + _NUM_TOKENS_AROUND)
    was, now = decode(before.ids[window]), decode(ids[window])
    shared, char_before = common_length(was, now), len(decode(before.ids[start : window.start]))
    role = before.messages[index].role if index is not None else "template"
    return Difference(index, role, char_before + shared, excerpt(was, shared), excerpt(now, shared))


def message_start(before: TurnRecord, offset: int) -> int:
    """Where the message begins that holds this token of a request's prompt and answer."""
    place = bisect_right(before.starts, offset)
    return before.starts[place - 1] if place else 0


def message_at(before: TurnRecord, offset: int) -> int | None:
    """The message that holds this token of a request's prompt and answer; None where templates write several messages
    as one, so that it cannot be told."""
    has_answer = len(before.ids) > before.num_prompt_tokens
    num_messages = len(before.messages) - has_answer
    firsts = [0, *(index for index, pair in _pairs(before.messages[:num_messages]) if not _is_joined(*pair))]
    number = bisect_right(before.starts, offset) - 1
    for indices in (list(range(num_messages)), firsts):
        if len(before.starts) == len(indices) + 1 and number >= 0:  # the last one begins the answer
            return indices[number] if number < len(indices) else num_messages if has_answer else None
    return None


def _pairs(messages: Sequence[Message]) -> list[tuple[int, tuple[Message, Message]]]:
    return [(index, pair) for index, pair in enumerate(pairwise(messages), start=1)]


def _is_joined(one: Message, other: Message) -> bool:
    """Many templates write results that follow each other as one message."""
    return one.role == other.role == "tool"


def has_thinking(message: Message) -> bool:
    """Whether an assistant's message holds what it thought."""
    return any(isinstance(block, ThinkingBlock) and block.text for block in message.blocks)
