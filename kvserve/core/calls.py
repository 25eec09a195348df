"""How a template writes the calls of a message: parts that are always the same, and slots. It knows neither a template
nor a parser."""

import json
import re
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

_BEGUN_TAG = re.compile(r"(<[^<>\s]*|\[/?[A-Z_]*)\Z")


class CallSlot(Enum):
    """What stands at a place of a written call and is another in each: its id, or its number."""

    ID = "id"
    NUMBER = "number"


type CallParts = tuple[str | CallSlot, ...]
"""Text that is always the same, and slots, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a template writes a value that is no string: its words for true, false and null; lists and objects are JSON
    or, with `is_python`, what Python shows of them."""

    true: str = "true"
    false: str = "false"
    null: str = "null"
    is_python: bool = False

    def written(self, value: object) -> str:
        """The text of a value of JSON that is no string."""
        if value is None or isinstance(value, bool):
            return self.null if value is None else self.true if value else self.false
        return repr(value) if self.is_python else json.dumps(value, ensure_ascii=False)


JSON_SPELLING = Spelling()
"""Everything is JSON."""


@dataclass(frozen=True, slots=True)
class PairParts:
    """How a template writes a call's arguments, if it writes each on its own, `between` standing between two of them:

        opening KEY value VALUE closing

    A string is written as it is, anything else in its `spelling`. `other_value` stands in the place of `value` before
    what is no string, where the template tells them apart.
    """

    opening: str
    value: str
    closing: str
    between: str = ""
    other_value: str | None = None
    spelling: Spelling = JSON_SPELLING

    def lead_of(self, value: object) -> str:
        """What stands between a key and this value."""
        return self.value if isinstance(value, str) or self.other_value is None else self.other_value


@dataclass(frozen=True, slots=True)
class CallRow:
    """How a template writes the calls of a message, where a call's arguments are one JSON object or, with `pairs`, keys
    and values:

        opening NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* closing

    `between` None: it writes one call in a message. `has_short_ids`: it takes ids of nine letters and digits only.
    """

    opening: CallParts
    middle: CallParts
    between: CallParts | None
    closing: CallParts
    has_short_ids: bool = False
    pairs: PairParts | None = None

    @property
    def call_end(self) -> str:
        """What stands behind a call's arguments whether another call follows or none: the text that ends each call
        where ids and numbers stand nowhere."""
        closing = "".join(part for part in self.closing if isinstance(part, str))
        if self.between is None:
            return closing
        between = "".join(part for part in self.between if isinstance(part, str))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(between, closing, strict=False))
        same = "".join(char for char, _ in alike)
        return same if same in (between, closing) else _BEGUN_TAG.sub("", same)
