"""Finds answers that stand in one piece with a tool's result, where a prompt ends otherwise than history goes on.

Such an answer has no header of its own: it begins behind what the template writes between a result and an answer. It
knows units and a reader of their content, which is handed in, no token ids.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.prompt.control import shown
from kvserve.prompt.token_replay import MessageParts, ReadsMessages, Unit
from kvserve.prompt.turn_layout import TurnLayout

MAX_UNITS = 8
"""How many units are looked at for one answer: they come in the order of the answers."""

MAX_PLACES = 8
NUM_FIRST_CHARS = 8
"""Of an answer, which stand behind the text between a result and it: what separates them may be a single bracket."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a model wrote: `tail` ended its prompt, from the start of a message on."""

    tail: str
    answer: str
    said: MessageParts


@dataclass(frozen=True, slots=True)
class Headless:
    """The unit with this number: `lead` stood before the tail of the answer's prompt, the answer is `text`."""

    unit: int
    lead: str
    text: str


def find_headless(
    units: Sequence[Unit], at_or_after: int, spoken: Spoken, layout: TurnLayout, says: ReadsMessages
) -> Headless | None:
    """Where the answer stands behind a result, from a unit on: it says the same, and what stands before it is what its
    prompt had there, but for the text between a result and an answer."""
    if not (spoken.said[1] or spoken.said[2]):
        return None
    for index in range(at_or_after, min(at_or_after + MAX_UNITS, len(units))):
        if units[index].header:
            continue
        text = units[index].text
        for tail, kept in layout.result_tails:
            for place in _places(text, kept, spoken.answer):
                lead = _lead(text[: place - len(kept)] + tail, spoken.tail)
                if lead is not None and says(text[place:]) == spoken.said:
                    return Headless(index, lead, text[place:])
    return None


def _places(text: str, kept: str, answer: str) -> Iterator[int]:
    """Where the answer may begin, the last place first."""
    first = answer.lstrip()[:NUM_FIRST_CHARS]
    found = [each.end() for each in re.finditer(f"{re.escape(kept)}(?=\\s*{re.escape(first)})", text)]
    return reversed(found[-MAX_PLACES:])


def _lead(before: str, tail: str) -> str | None:
    """What stood before the tail; None where something else did."""
    if before.endswith(tail):
        return before.removesuffix(tail)
    return "" if shown(before) == tail else None
