"""JSON as models write it: an incremental scanner that stops at the first impossible character, and strict reading.

Literal line ends and tabs inside strings are accepted, since models write them and they can only mean themselves.
"""

import json
import math
import re

from kvserve.output.tool_parsers.form import END, SPACE, NotACall, Reader

MAX_DEPTH = 100
MAX_SCALAR_CHARS = 400

_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_SCALAR_CHARS = frozenset("+-.0123456789eEtrufalsn")
_ESCAPES = frozenset('"\\/bfnrtu')
_OPENERS = {"{": "first key", "[": "first value"}
_CLOSERS = {"}": "{", "]": "["}
_VALUE = frozenset({"value", "first value"})
_KEY = frozenset({"key", "first key"})


def json_container(char: str) -> Reader[str]:
    """The text of the object or array that starts with `char`, up to its own closing bracket."""
    text: list[str] = []
    stack: list[str] = []
    expected = "value"
    if char not in _OPENERS:
        raise NotACall("no JSON object")
    while True:
        if char in _SCALAR_CHARS and expected in _VALUE:
            char = yield from _scalar(char, text)
            expected = "comma"
            continue
        text.append(char)
        if char in SPACE:
            pass
        elif char == '"' and (expected in _VALUE or expected in _KEY):
            yield from _string(text)
            expected = "comma" if expected in _VALUE else "colon"
        elif char in _OPENERS and expected in _VALUE and len(stack) < MAX_DEPTH:
            stack.append(char)
            expected = _OPENERS[char]
        elif char in _CLOSERS and _CLOSERS[char] == stack[-1] and expected in ("comma", _OPENERS[stack[-1]]):
            stack.pop()
            expected = "comma"
            if not stack:
                return "".join(text)
        elif char == ":" and expected == "colon":
            expected = "value"
        elif char == "," and expected == "comma":
            expected = "key" if stack[-1] == "{" else "value"
        else:
            raise NotACall(f"unexpected {char!r} in JSON")
        char = yield


def _string(text: list[str]) -> Reader[None]:
    while True:
        char = yield
        text.append(char)
        if char == '"':
            return
        if char == "\\":
            char = yield
            text.append(char)
            if char not in _ESCAPES:
                raise NotACall("bad escape in JSON")
        elif char == END:
            raise NotACall("JSON string is not finished")


def _scalar(char: str, text: list[str]) -> Reader[str]:
    scalar: list[str] = []
    while char in _SCALAR_CHARS:
        if len(scalar) == MAX_SCALAR_CHARS:
            raise NotACall("number too long")
        scalar.append(char)
        char = yield
    if not _SCALAR.fullmatch("".join(scalar)):
        raise NotACall("bad JSON value")
    text.extend(scalar)
    return char


def read_json(text: str) -> object:
    """The value of `text`.

    Raises:
        ValueError: not JSON, a key twice in one object, a number that no JSON can hold again, or nested too deeply.
    """
    try:
        return json.loads(
            text, strict=False, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: object) -> str:
    """`value` as JSON, readable where it can be encoded; a lone surrogate keeps its escape."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} does not fit into a number")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
