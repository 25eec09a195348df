"""An explanation in sentences: what happened, and what would have mended it. The words are those of the table of
causes; it fills in what they leave open.
"""

from kvserve.explain.causes import NO_MISS, ROW_OF
from kvserve.explain.explanation import Explanation


def summary(explanation: Explanation) -> str:
    """What happened, in one sentence."""
    return _filled(ROW_OF[explanation.cause].summary, explanation)


def remedy(explanation: Explanation) -> str | None:
    """What would have mended it, in one sentence; None where nothing is to be mended."""
    text = ROW_OF[explanation.cause].remedy
    return None if text is None else _filled(text, explanation)


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
