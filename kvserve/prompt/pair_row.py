"""Derives how a template writes the arguments of a call as pairs of keys and values, from rendered calls.

It knows texts in which distinct names, keys and values stand, neither templates nor who reads them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvserve.core import CallRow, JsonObject, PairParts, Spelling, ToolSpec

KEYS, VALUES = ("zqkeya", "zqkeyb"), ("zqvaluea", "zqvalueb")
NUMBER = 902173
_BEGUN_TAG = re.compile(r"(<[^<>\s]*|\[/?[A-Z_]*)\Z")
_WORD = re.compile(r"\S+")
_LIST = [True, None, "zq"]
_OBJECT = {"zqlist": _LIST}
_SWAPPED = {"zqB": 1, "zqa": 2}


class Unlike(Exception):
    """A row cannot express what the template writes. It never leaves this package."""


def find_pairs(write: Callable[[JsonObject], str], name: str) -> PairParts:
    """How a call's arguments are written: `write` renders a call of `name` with these. Raises Unlike."""
    before_first, value, next_key, behind = _gaps(write(dict(zip(KEYS, VALUES, strict=True))), name)
    without = write({}).partition(name)[2]
    middle = _same_beginning(before_first, without)
    if not behind.endswith(rest := without[len(middle) :]):
        raise Unlike("it writes a call without arguments in another way")
    opening, closing = before_first[len(middle) :], behind[: len(behind) - len(rest)]
    if not (next_key.startswith(closing) and next_key.endswith(opening)) or len(next_key) < len(opening + closing):
        raise Unlike("it writes two arguments of a call in different ways")
    between = next_key[len(closing) : len(next_key) - len(opening)]
    if not value.strip() or not closing.strip():
        raise Unlike("nothing stands on either side of an argument's value")
    head, number = f"{before_first}{KEYS[0]}", write({KEYS[0]: NUMBER}).partition(name)[2]
    found = _marks(number, head, behind, value)
    if found is not None and closing.startswith(found[1]) and between.strip():
        lead, tail = value.removesuffix(found[0]), behind.removeprefix(found[1])
        spelling = _spelling(lambda said: _between(write({KEYS[0]: said}).partition(name)[2], head + lead, tail), found)
        spelling = replace(spelling, sorts_keys=_sorts_keys(write, is_own=spelling.is_own))
        return PairParts(opening, lead, closing.removeprefix(found[1]), between, None, spelling)
    other_value = _other_value(number, before_first, behind)
    head += other_value
    spelling = _spelling(lambda said: _between(write({KEYS[0]: said}).partition(name)[2], head, behind))
    spelling = replace(spelling, sorts_keys=_sorts_keys(write, is_own=False))
    return PairParts(opening, value, closing, between, None if other_value == value else other_value, spelling)


def _sorts_keys(write: Callable[[JsonObject], str], *, is_own: bool) -> bool:
    """Whether arguments, and the members of objects in a spelling of its own, stand in alphabetical order."""
    said: list[JsonObject] = [_SWAPPED, *([{KEYS[0]: _SWAPPED}] if is_own else [])]
    return all(-1 < text.find("zqa") < text.find("zqB") for text in map(write, said))


def _marks(text: str, head: str, behind: str, value: str) -> tuple[str, str] | None:
    """The marks around a string, of which a number has neither; None without both."""
    lead, found, tail = text.removeprefix(head).partition(str(NUMBER))
    if not (found and text.startswith(head) and value.startswith(lead) and behind.endswith(tail)):
        return None
    opening, closing = value[len(lead) :], behind[: len(behind) - len(tail)]
    return (opening, closing) if opening and closing and lead.strip() else None


def _gaps(text: str, name: str) -> tuple[str, str, str, str]:
    """What stands before the first key, before a value, between two pairs, and behind the last."""
    gaps, rest = [], text.partition(name)[2]
    for word in (KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        gap, found, rest = rest.partition(word)
        if not found:
            raise Unlike("its arguments are neither one JSON object nor pairs of keys and values")
        gaps.append(gap)
    if gaps[1] != gaps[3]:
        raise Unlike("it writes two arguments of a call in different ways")
    return gaps[0], gaps[1], gaps[2], rest


def _same_beginning(one: str, other: str) -> str:
    """What two texts begin with alike, up to a tag that only begins alike."""
    length = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    length = min(len(one), len(other)) if length is None else length
    begun = _BEGUN_TAG.search(one[:length])
    return one[: length if begun is None else begun.start()]


def _other_value(text: str, before_first: str, behind: str) -> str:
    """What stands between a key and a value that is no string."""
    between = _between(text, f"{before_first}{KEYS[0]}", f"{NUMBER}{behind}")
    if between is None:
        raise Unlike("it writes a number in another way than a string")
    if not between.strip():  # a key with a space in it would end there
        raise Unlike("nothing stands between a key and a number")
    return between


def _between(text: str, head: str, tail: str) -> str | None:
    """What stands between the two; None where the text is not made of them."""
    is_made = text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
    return text[len(head) : len(text) - len(tail)] if is_made else None


def _spelling(write: Callable[[object], str | None], marks: tuple[str, str] | None = None) -> Spelling:
    """How values are written; that all of them are is proved later. `marks` stand around strings. Raises Unlike."""
    true, false, null = words = [word or "" for word in map(write, (True, False, None))]
    if len(set(words)) < len(words) or not all(map(str.isalpha, words)):
        raise Unlike("it has no words for true, false and null")
    shown = write(_OBJECT)
    spelling = Spelling(true, false, null, is_python=shown == repr(_OBJECT))
    if marks is None:
        return spelling
    own = replace(spelling, marks=marks, is_own=True)
    if shown == own.written(_OBJECT):
        return own
    is_python = spelling.is_python or write(_LIST) == repr(_LIST)
    return replace(spelling, is_python=is_python, has_json_objects=is_python and not spelling.is_python, marks=marks)


# --- the proof --------------------------------------------------------------------------------------------------------


def behind_pairs(text: str, position: int, pairs: PairParts, arguments: Mapping[str, object]) -> int | None:
    """Where these arguments end that stand at `position` in the text; None if they are not written as pairs."""
    for index, (key, value) in enumerate(pairs.spelling.in_order(arguments).items()):
        lead = f"{pairs.between if index else ''}{pairs.opening}{key}{pairs.lead_of(value)}"
        if not text.startswith(lead, position):
            return None
        end = _behind_value(text, position + len(lead), value, pairs.spelling)
        if end is None or not text.startswith(pairs.closing, end):
            return None
        position = end + len(pairs.closing)
    return position


def _behind_value(text: str, position: int, value: object, spelling: Spelling) -> int | None:
    is_shown = spelling.is_own or (spelling.is_python and not (spelling.has_json_objects and isinstance(value, dict)))
    if value is None or isinstance(value, str | bool) or is_shown:
        said = spelling.written(value)
        return position + len(said) if text.startswith(said, position) else None
    try:
        found, end = json.JSONDecoder().raw_decode(text, position)
    except ValueError:
        return None
    return end if json.dumps(found) == json.dumps(value) else None


def hard_pairs(row: CallRow) -> JsonObject:
    """Arguments that every form of pairs must keep unchanged: what looks like JSON, or like a part of the form."""
    assert row.pairs is not None, "only such rows are asked"
    said = [row.pairs.opening, row.pairs.value, row.pairs.closing, *(row.pairs.spelling.marks or ())]
    said += [part for parts in (row.opening, row.between or (), row.closing) for part in parts if isinstance(part, str)]
    words = list(dict.fromkeys(word for text in said for word in _WORD.findall(text)))
    spelt = [row.pairs.spelling.written(value) for value in (True, False, None)]
    texts = [
        *(f"zq {word} zq" for word in words), *words, "", " ", "\n", "\n\n", "    zq:\n        zq\n", "\n  zq\n\n",
        'zq "quoted" \\ \\n é 日', "null", "true", "None", *spelt, "5", "-1.5e3",
        '{"zq": 1}', "[]", '"zq"', "{'zq': True}",
    ]  # fmt: skip
    others = [
        {"": {"zq": '{"\n'}, "zqlist": [1, 2.5, -3, True, False, None, {}, [], "", *words]}, [], [[], {}], {}, 0, 12,
        -3, 2.5, 1e21, True, False, None,
    ]  # fmt: skip
    # some write keys in their alphabetical order
    return {f"zqkey{index:03}": value for index, value in enumerate([*texts, *others])}


def typed_tools(names: Sequence[str], arguments: JsonObject) -> tuple[ToolSpec, ...]:
    """Tools of these names whose arguments have the types that these have."""
    properties = {key: {"type": _type(value)} for key, value in arguments.items()}
    schema: JsonObject = {"type": "object", "properties": properties}
    return tuple(ToolSpec(name, "", schema) for name in names)


def _type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case list():
            return "array"
        case dict():
            return "object"
    return "string"
