"""Takes a message apart: each block with its canonical form and its spans, for identity and replay."""

import json
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import NoReturn

from kvserve.canonical.rule import RuleSet
from kvserve.canonical.spans import RuleSpan, canonical_text, find_spans
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
)

_MAX_EXACT_INTEGER = 2**53
"""A double holds every smaller integer exactly: a client with doubles cannot distinguish 1.0 and 1."""


_WHITE_SPACE = " \t\r\n"

_MAX_MEMOISED_CHARS = 2_000
"""Longer calls, which write whole files, are not remembered."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block, its canonical form (None: it has none), the rules that made the difference, and the spans of a text."""

    block: Block
    canonical: Block | None
    fired: tuple[str, ...] = ()
    spans: tuple[RuleSpan, ...] = ()


type Layout = tuple[Part, ...]


def lay_out(message: Message, rules: RuleSet) -> Layout:
    """The blocks of `message` in order. Changes nothing."""
    names = rules.names[message.role]
    return tuple([_part(block, message.role, names, rules) for block in message.blocks])


def canonical_blocks(layout: Layout) -> tuple[Block, ...]:
    """The message's canonical blocks."""
    return tuple([part.canonical for part in layout if part.canonical is not None])


def trimmed(text: str) -> str:
    """An assistant's text without white space at its ends."""
    return text.strip(_WHITE_SPACE)


def is_dropped(message: Message, rules: RuleSet) -> str | None:
    """The name of the rule that takes the whole message out of identity, if one does."""
    if len(message.blocks) != 1 or not isinstance(block := message.blocks[0], TextBlock):
        return None
    for rule in rules.dropping_rules[message.role]:
        form = rule.form
        if form is not None and block.text.startswith(form.opener) and form.pattern.fullmatch(block.text):
            return rule.name
    return None


def _part(block: Block, role: Role, names: frozenset[str], rules: RuleSet) -> Part:
    if isinstance(block, TextBlock):
        return _text_part(block, role, names, rules)
    if isinstance(block, ThinkingBlock):
        if "thinking" in names:
            return Part(block, None, ("thinking",))
        return Part(block, ThinkingBlock(block.text))  # the signature is an echo of ours, not content
    if isinstance(block, ToolCallBlock):
        return _call_part(block, names)
    if isinstance(block, ImageBlock):
        return Part(block, block if rules.tells_images_apart else ImageBlock(""))
    if isinstance(block, ToolBlock):
        return Part(block, block)
    return _result_part(block, names, rules)


def _result_part(block: ToolResultBlock, names: frozenset[str], rules: RuleSet) -> Part:
    blocks = block.blocks
    if not rules.tells_images_apart:
        blocks = tuple(ImageBlock("") if isinstance(inner, ImageBlock) else inner for inner in blocks)
    if block.call_id and "call_ids" in names:
        return Part(block, ToolResultBlock("", blocks, block.is_error), ("call_ids",))
    return Part(block, block if blocks == block.blocks else ToolResultBlock(block.call_id, blocks, block.is_error))


def _text_part(block: TextBlock, role: Role, names: frozenset[str], rules: RuleSet) -> Part:
    spans = find_spans(block.text, role, rules)
    if spans:
        canonical = canonical_text(block.text, spans)
        return Part(block, replace(block, text=canonical) if canonical else None, _fired(spans), spans)
    text = trimmed(block.text) if "answer_edges" in names else block.text
    fired = ("answer_edges",) if text != block.text else ()
    if not text and "empty_content" in names:
        return Part(block, None, (*fired, "empty_content"))
    return Part(block, replace(block, text=text) if fired else block, fired)


def _fired(spans: tuple[RuleSpan, ...]) -> tuple[str, ...]:
    whole = [span.rule.name for span in spans if span.canonical != span.text]
    return (*whole, *(name for span in spans for name, moved in span.volatile if moved))


def _call_part(block: ToolCallBlock, names: frozenset[str]) -> Part:
    call_id = "" if "call_ids" in names else block.call_id
    arguments = canonical_arguments(block.arguments) if "call_arguments" in names else block.arguments
    fired = (
        *(("call_ids",) if call_id != block.call_id else ()),
        *(("call_arguments",) if arguments != block.arguments else ()),
    )
    return Part(block, ToolCallBlock(call_id, block.name, arguments), fired)


# --- arguments -------------------------------------------------------------------------------------------------------


def canonical_arguments(arguments: str) -> str:
    """The JSON text of a call's arguments in one spelling: spacing, escapes, order of keys, 1.0 for 1. Text that is not
    a JSON object, or has equal keys, is its own canonical form."""
    return _memoised(arguments) if len(arguments) <= _MAX_MEMOISED_CHARS else _canonical_json(arguments)


def _canonical_json(arguments: str) -> str:
    try:
        value = _DECODER.decode(arguments)
    except (ValueError, ArithmeticError, RecursionError):  # broken, or beyond what the parser takes
        return arguments
    return _ENCODER.encode(value) if isinstance(value, dict) else arguments


def same_arguments(one: str, other: str) -> bool:
    """Whether two calls' arguments are equal in canonical form."""
    return one == other or canonical_arguments(one) == canonical_arguments(other)


_memoised = lru_cache(maxsize=2_048)(_canonical_json)
"""Remembered because every request sends all calls of its history again."""


def forget_arguments() -> None:
    """Forget the calls that were sent before."""
    _memoised.cache_clear()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a key is named twice")
    return named


def _number(text: str) -> float | int:
    value, written = float(text), Decimal(text)
    if abs(value) < _MAX_EXACT_INTEGER and written == int(value):
        return int(value)
    if Decimal(repr(value)) != written:
        raise ValueError("two numbers that round to one double are two numbers")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number, parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=True, sort_keys=True, separators=(",", ":"))
