"""How a template writes the calls of a message: parts that are always the same, and slots. It knows neither a template
nor a parser."""

import json
import re
from collections.abc import Mapping
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
    """How a template writes values: its words for true, false and null; lists and objects are JSON or, with
    `is_python`, what Python shows of them, but for objects that are JSON with `has_json_objects`.

    A string stands between `marks`, if there are any, and else as it is. With `is_own` lists and objects hold values in
    this spelling, and keys as they are. With `sorts_keys` the arguments of a call and the members of such objects stand
    in the alphabetical order of their keys, whatever their case.
    """

    true: str = "true"
    false: str = "false"
    null: str = "null"
    is_python: bool = False
    has_json_objects: bool = False
    marks: tuple[str, str] | None = None
    is_own: bool = False
    sorts_keys: bool = False

    def in_order[T](self, members: Mapping[str, T]) -> dict[str, T]:
        """Members in the order in which they are written."""
        return dict(sorted(members.items(), key=lambda item: item[0].lower()) if self.sorts_keys else members)

    def written(self, value: object) -> str:
        """The text of a value of JSON."""
        match value:
            case str():
                return value if self.marks is None else value.join(self.marks)
            case None | bool():
                return self.null if value is None else self.true if value else self.false
            case list() if self.is_own:
                return f"[{','.join(map(self.written, value))}]"
            case dict() if self.is_own:
                return f"{{{','.join(f'{key}:{self.written(each)}' for key, each in self.in_order(value).items())}}}"
        is_json = self.has_json_objects and isinstance(value, dict)
        return repr(value) if self.is_python and not is_json else json.dumps(value, ensure_ascii=False)


JSON_SPELLING = Spelling()
"""Everything is JSON."""


@dataclass(frozen=True, slots=True)
class PairParts:
    """How a template writes a call's arguments, if it writes each on its own, `between` standing between two of them:

        opening KEY value VALUE closing

    A value is written in the `spelling`. `other_value` stands in the place of `value` before what is no string, where
    the template tells them apart there.
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
