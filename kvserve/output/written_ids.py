"""Finds the ids, or numbers, that a model wrote for its calls, in text that was split before."""

import re
from collections.abc import Sequence
from itertools import accumulate

from kvserve.core import CallParts, CallRow, CallSlot, ToolCallEnd, ToolSpec
from kvserve.output.formats import OutputFormat
from kvserve.output.splitter import Splitter

_ID, _SHORT_ID = r"[A-Za-z0-9_.-]+", r"[A-Za-z0-9]{9}"
_NUMBER = r"\d+"
_WORDS = re.compile(r"\w+|[^\w\s]")


def has_ids(row: CallRow | None, slot: CallSlot = CallSlot.ID) -> bool:
    """Whether the form's calls have ids or numbers."""
    return row is not None and any(slot in parts for parts in (row.opening, row.middle, row.closing))


def written_ids(
    output_format: OutputFormat,
    text: str,
    names: Sequence[str],
    *,
    in_reasoning: bool = False,
    slot: CallSlot = CallSlot.ID,
) -> tuple[str, ...]:
    """For each call of an answer the id that the model wrote, "" without one that the template accepts; for `slot`
    NUMBER its number. `names` are the names of its calls; () if they are not found again, or if the form has no such
    slot."""
    row = output_format.row
    if row is None or not has_ids(row, slot) or not names:
        return ()
    tools = tuple(ToolSpec(name, None, {}) for name in dict.fromkeys(names))
    splitter = Splitter(output_format, starts_in_reasoning=in_reasoning, tools=tools, new_call_id=str)
    deltas = [*splitter.feed(text), *splitter.finish(cut=False)]
    pieces = splitter.pieces
    ends = list(accumulate(len(piece.text) for piece in pieces))
    spans = [(end - len(piece.text), end) for piece, end in zip(pieces, ends, strict=True) if piece.kind == "call"]
    called = [delta.call.name for delta in deltas if isinstance(delta, ToolCallEnd)]
    if called != list(names) or len(spans) != len(called):
        return ()
    behind = slot in row.closing
    return tuple(
        _behind(row, slot, text[end:]) if behind else _before(row, slot, text[start:end], name)
        for name, (start, end) in zip(called, spans, strict=True)
    )


def _before(row: CallRow, slot: CallSlot, source: str, name: str) -> str:
    """The slot's text before a call's arguments."""
    for lead in (row.opening, row.between or ()):
        head = _pattern(row, slot, (*lead, name, *row.middle))
        if lead and (found := re.match(head, source)) is not None:
            return found.group(1)
    return ""


def _behind(row: CallRow, slot: CallSlot, text: str) -> str:
    """The slot's text behind a call's arguments: between two calls, or in their closing text."""
    for parts in (row.between or (), row.closing):
        upto = parts[: parts.index(slot) + 2] if slot in parts else ()
        if upto and (found := re.match(_pattern(row, slot, upto), text)) is not None:
            return found.group(1)
    return ""


def _pattern(row: CallRow, slot: CallSlot, parts: CallParts) -> str:
    """The parts with optional white space where a reader accepts it, and a group for the slot."""
    slots = {CallSlot.ID: _SHORT_ID if row.has_short_ids else _ID, CallSlot.NUMBER: _NUMBER}
    slots[slot] = f"({slots[slot]})"
    patterns = [map(re.escape, _WORDS.findall(part)) if isinstance(part, str) else (slots[part],) for part in parts]
    return r"\s*" + r"\s*".join(word for words in patterns for word in words)
