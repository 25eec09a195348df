"""A turn that the model wrote, and what of it must agree with the prompt before it may stand there.

It knows texts and a reader of their content, which is handed in, no pieces of a prompt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core import Written
from kvserve.prompt.control import shown
from kvserve.prompt.piece_tokens import PieceTokens
from kvserve.prompt.steps import ThinkTags
from kvserve.prompt.token_replay import MessageParts, ReadsMessages, Unit
from kvserve.prompt.writing import open_tag


@dataclass(frozen=True, slots=True)
class Emitted:
    """A turn that the model wrote: its text with the prompt's `tail` before it, its content (None: it cannot be
    replayed), its ids. Where it `has_ended`, the model wrote the template's end behind it, which is in neither.
    """

    written: Written
    text: str
    tail: str
    said: MessageParts | None
    tokens: PieceTokens
    has_ended: bool


def names_alike(emitted: Emitted, turn: Sequence[Unit], says: ReadsMessages) -> bool:
    """Whether the calls in the prompt have the ids that the model wrote, which their results name. A call that it wrote
    without an id may have any."""
    if emitted.said is None or not emitted.said[2]:
        return True
    rendered = shown(turn[0].text if len(turn) == 1 else "".join(unit.text for unit in turn))
    if emitted.text.endswith(rendered):
        return True
    pairs = zip(says.ids(emitted.text, emitted.said), says.ids(rendered, emitted.said), strict=False)
    return all(mine in ("", theirs) for mine, theirs in pairs)


def closing_text(emitted: Emitted, last: Unit, says: ReadsMessages, tags: Sequence[ThinkTags]) -> str | None:
    """The template's closing text of an answer that was cut in its thinking, without which the model would continue the
    thinking later; "" for any other answer, None if it is unknown. `last` is the end of the turn with the same content.
    """
    reasoning, content, calls = emitted.said or ("", "", ())
    if content or calls:
        return ""
    opened = open_tag(emitted.text, tags)
    thought = reasoning or (opened[0] if opened is not None else "")
    if not thought or not emitted.text.rstrip().endswith(thought):
        return ""
    rendered = shown(last.text)
    # Of all places with these letters, the one where the thought ends: "h" is in "</think>", too.
    places = (found.start() + len(thought) for found in re.finditer(f"(?={re.escape(thought)})", rendered))
    end = next((place for place in places if says(rendered[:place])[0] == reasoning), None)
    if end is None:
        return None
    closing = rendered[end:]
    return closing.lstrip() if emitted.text[-1].isspace() or not closing.strip() else closing
