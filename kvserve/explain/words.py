"""An explanation in sentences: what happened, and what would have mended it. The words are those of the table of
causes; it fills in what they leave open.
"""

from kvserve.explain.causes import NO_MISS, ROW_OF, Cause
from kvserve.explain.explanation import Explanation
from kvserve.explain.looks import OTHER_ORDER

_MOVING: frozenset[Cause] = frozenset({"volatile value", "message changed", "prompt changed", "tools changed"})
"""With these the client sent another value than before; what it looks like says whether it moves by itself."""

_WHERE = {"system": "The system prompt", "developer": "The developer's message", "prompt": "The prompt"}


def summary(explanation: Explanation) -> str:
    """What happened, in one sentence, and in a second what the value looks like that has changed."""
    told = _filled(ROW_OF[explanation.cause].summary, explanation)
    if explanation.looks_like == OTHER_ORDER:
        return f"{told} They are the same tools in another order."
    if explanation.looks_like is None or explanation.cause not in _MOVING:
        return told
    return f"{told} It looks like {explanation.looks_like}."


def remedy(explanation: Explanation) -> str | None:
    """What would have mended it, in one sentence or two; None where nothing is to be mended. Where a value moves by
    itself it is named by its place and its look."""
    text, place, look = ROW_OF[explanation.cause].remedy, explanation.first_difference, explanation.looks_like
    if text is None:
        return None
    if look == OTHER_ORDER:
        return "Send the tools in one order, or leave CACHE_CANONICALIZE_TOOL_CONTEXT on, which makes theirs one."
    if look is None or place is None or explanation.cause not in _MOVING:
        return _filled(text, explanation)
    where = _WHERE.get(place.role) or f"Message {place.message_index} ({place.role})"
    if place.tool is not None:
        where = f"The tool {place.tool}"
    rest = f" {_filled(text, explanation)}" if explanation.cause == "volatile value" else ""
    return (
        f"{where} has {look} at character {place.char} that is another one than before: have the client leave it out, "
        f"keep it still within a conversation, or say it in the newest message.{rest}"
    )


def clause(explanation: Explanation) -> str | None:
    """The cause in a few words, for the request line; None where nothing was lost that could have been kept."""
    if explanation.cause in NO_MISS:
        return None
    rules = f" [{', '.join(explanation.rules)}]" if explanation.rules else ""
    decided_by = f": {explanation.decided_by}" if explanation.decided_by is not None else ""
    return f"{explanation.cause}{decided_by}{_place(explanation, short=True)}{rules}"


def _filled(text: str, explanation: Explanation) -> str:
    checkpoint = explanation.reuse.checkpoint
    return text.format(
        place=_place(explanation, short=False),
        rules=", ".join(explanation.rules) or "no rule",
        decided_by=explanation.decided_by or "",
        checkpoint=f", from the copy at the end of a {checkpoint} part" if checkpoint is not None else "",
    )


def _place(explanation: Explanation, *, short: bool) -> str:
    """Message and character of the first difference, without any of its text."""
    place = explanation.first_difference
    if place is None:
        return ""
    if place.tool is not None and place.message_index is not None:
        where = f"tool {place.tool} in message {place.message_index}, character {place.char}"
    elif place.tool is not None:
        where = f"tool {place.tool}, character {place.char}"
    elif place.role == "prompt":
        where = f"character {place.char}"
    elif place.message_index is None:
        where = f"character {place.char} of a message"
    else:
        where = f"message {place.message_index}{'' if short else f' ({place.role})'}, character {place.char}"
    return f" ({where})" if short else f" from {where} on"
