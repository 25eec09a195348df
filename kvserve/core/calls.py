"""How a template writes the calls of a message: parts that are always the same, and slots. It knows neither a template
nor a parser."""

from dataclasses import dataclass
from enum import Enum


class CallSlot(Enum):
    """What stands at a place of a written call and is another in each: its id, or its number."""

    ID = "id"
    NUMBER = "number"


type CallParts = tuple[str | CallSlot, ...]
"""Text that is always the same, and slots, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """How a template writes the calls of a message, where a call's arguments are one JSON object:

        opening NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* closing

    `between` None: it writes one call in a message. `has_short_ids`: it takes ids of nine letters and digits only.
    """

    opening: CallParts
    middle: CallParts
    between: CallParts | None
    closing: CallParts
    has_short_ids: bool = False
