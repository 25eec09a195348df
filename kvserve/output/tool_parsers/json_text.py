"""Reads JSON as models write it, with an incremental scanner that stops at the first impossible character, and
strictly.

Literal line ends and tabs inside strings are accepted: models write them, and their meaning is clear. A scanner with a
draft writes to it what it reads, in the spelling of `write_json`.
"""

import json
import math
import re
from collections.abc import Callable

from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import END, SPACE, NotACall, Reader

MAX_DEPTH = 100
MAX_SCALAR_CHARS = 400

_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_SCALAR_CHARS = frozenset("+-.0123456789eEtrufalsn")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE_CHARS = len("\\u0000")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_SURROGATES = re.compile("[\ud800-\udfff]")
_OPENERS = {"{": "first key", "[": "first value"}
_CLOSERS = {"}": "{", "]": "["}
_SPELT = {":": ": ", ",": ", "}
_VALUE = frozenset({"value", "first value"})
_KEY = frozenset({"key", "first key"})


def json_container(
    char: str, draft: CallDraft | None = None, stops_at: Callable[[str], bool] = lambda _: False
) -> Reader[str]:
    """The text of the object or array that starts with `char`, up to its own closing bracket.

    `draft` gets all of it but that bracket, without equal keys. At an object that is a member's value, `stops_at` gets
    the text before it; if it returns True, that text is the result.
    """
    text: list[str] = []
    stack: list[str] = []
    keys: list[set[str]] = []
    expected = "value"
    if char not in _OPENERS:
        raise NotACall("no JSON object")
    while True:
        if char in _SCALAR_CHARS and expected in _VALUE:
            char = yield from _scalar(char, text, draft)
            expected = "comma"
            continue
        text.append(char)
        if char in SPACE:
            pass
        elif char == '"' and expected in _VALUE:
            yield from (_string(text) if draft is None else _written_string(text, draft))
            expected = "comma"
        elif char == '"' and expected in _KEY:
            yield from _key(text, keys[-1], draft)
            expected = "colon"
        elif char in _OPENERS and expected in _VALUE and len(stack) < MAX_DEPTH:
            if char == "{" and stack == ["{"] and stops_at("".join(text[:-1])):
                return "".join(text[:-1])
            stack.append(char)
            keys.append(set())
            expected = _OPENERS[char]
        elif char in _CLOSERS and _CLOSERS[char] == stack[-1] and expected in ("comma", _OPENERS[stack[-1]]):
            stack.pop()
            keys.pop()
            expected = "comma"
            if not stack:
                return "".join(text)
        elif char == ":" and expected == "colon":
            expected = "value"
        elif char == "," and expected == "comma":
            expected = "key" if stack[-1] == "{" else "value"
        else:
            raise NotACall(f"unexpected {char!r} in JSON")
        if draft is not None and char != '"':
            draft.write("" if char in SPACE else _SPELT.get(char, char))
        char = yield


def _string(text: list[str]) -> Reader[None]:
    while True:
        char = yield
        text.append(char)
        if char == '"':
            return
        if char == "\\":
            yield from _escape(text)
        elif char == END:
            raise NotACall("JSON string is not finished")


def _escape(text: list[str]) -> Reader[str]:
    """The character of an escape, or half of a surrogate pair."""
    char = yield
    text.append(char)
    if char in _ESCAPED:
        return _ESCAPED[char]
    if char != "u":
        raise NotACall("bad escape in JSON")
    digits = ""
    while len(digits) < 4:
        char = yield
        text.append(char)
        if char not in _HEX_DIGITS:
            raise NotACall("bad escape in JSON")
        digits += char
    return chr(int(digits, 16))


def _written_string(text: list[str], draft: CallDraft) -> Reader[None]:
    """A string whose characters go to the draft one by one; a half of a surrogate pair waits for the other half."""
    draft.write('"')
    half = ""
    while True:
        char = yield
        text.append(char)
        if char == END:
            draft.write(escaped(half))
            raise NotACall("JSON string is not finished")
        is_escape, is_end = char == "\\", char == '"'
        if is_escape:
            char = yield from _escape(text)
        if half and is_escape and "\udc00" <= char <= "\udfff":
            half, char = "", (half + char).encode("utf-16", "surrogatepass").decode("utf-16")
        elif half:
            draft.write(escaped(half), num_ahead=_ESCAPE_CHARS if is_escape else 1)
            half = ""
        if is_end:
            draft.write('"')
            return
        if is_escape and "\ud800" <= char <= "\udbff":
            half = char
        else:
            draft.write(escaped(char))


def _key(text: list[str], known: set[str], draft: CallDraft | None) -> Reader[None]:
    """A key, written to the draft as a whole."""
    start = len(text) - 1
    yield from _string(text)
    if draft is None:
        return
    key = json.loads("".join(text[start:]), strict=False)
    if key in known:
        raise NotACall("a key occurs twice")
    known.add(key)
    draft.write(write_json(key))


def _scalar(char: str, text: list[str], draft: CallDraft | None) -> Reader[str]:
    scalar: list[str] = []
    while char in _SCALAR_CHARS:
        if len(scalar) == MAX_SCALAR_CHARS:
            raise NotACall("number too long")
        scalar.append(char)
        char = yield
    if not _SCALAR.fullmatch("".join(scalar)):
        raise NotACall("bad JSON value")
    text.extend(scalar)
    if draft is not None:
        draft.write(_respelt("".join(scalar)), num_ahead=1)
    return char


def _respelt(scalar: str) -> str:
    try:
        return write_json(read_json(scalar))
    except ValueError as error:
        raise NotACall(str(error)) from error


def read_json(text: str) -> object:
    """The value of `text`.

    Raises:
        ValueError: not JSON, equal keys in one object, a number that JSON cannot express, or nested too deeply.
    """
    try:
        return json.loads(
            text, strict=False, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: object) -> str:
    """`value` as JSON, readable where it can be encoded; a lone surrogate keeps its escape."""
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def escaped(text: str) -> str:
    """`text` escaped for a JSON string."""
    return text if text.isalnum() else write_json(text)[1:-1]


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
