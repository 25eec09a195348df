"""Where a template parts two prompts of the same messages, as message, character and text. It compares tokens."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvserve.core import Message, ThinkingBlock
from kvserve.explain.difference import Difference, excerpts
from kvserve.sessions.seen import TurnRecord

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
    found = excerpts(decode(before.ids[window]), decode(ids[window]))
    char = len(decode(before.ids[start : window.start])) + found.char
    role = before.messages[index].role if index is not None else "template"
    return Difference(index, role, char, found.before, found.after)


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
