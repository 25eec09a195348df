"""Reads typed values from a body's bytes; each error names its field, also one that is raised behind the protocols.
This file knows JSON, not what a field means.

A reader is a function of (value, path) that returns the typed value or raises `BadRequest` with that path as `param`,
written as `messages[3].content[0].text`. JSON null equals a missing key.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from kvserve.core import JsonObject
from kvserve.errors import BadRequest, RequestError

type Reader[T] = Callable[[object, str], T]

MAX_NESTING = 128
"""Levels of arrays and objects in a body; code that walks the values may recurse without running out of stack."""

MAX_INTEGER = 2**63 - 1
MAX_TOKEN_COUNT = 2**31 - 1

_MAX_SHOWN_CHARACTERS = 40
_OBJECT_SIGNS = tuple(
    map(
        re.compile,
        (
            rb'"tool_use"',
            rb'"input_examples"',
            rb'"arguments"\s*:\s*\{',
            rb'"(?:parameters|input_schema|schema)"\s*:\s*\{',
        ),
    )
)
"""Only bodies that may hold arguments as objects, or schemas, are searched for equal keys: the search costs a third of
the parsing (0.1 ms of a recorded body of 117 kB)."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


# --- bodies ----------------------------------------------------------------------------------------------------------


def decode_body(raw: bytes) -> JsonObject:
    """The JSON object in `raw` (UTF-8).

    Of equal keys the last one counts; `single_keys` refuses them where nothing may be lost. A lone surrogate becomes
    U+FFFD: clients that cut text by UTF-16 units send halves of emoji in the middle of long sessions. Raises BadRequest
    for anything else that is not a JSON object: empty, not UTF-8, broken, NaN or Infinity, a number beyond a double,
    too many levels.
    """
    if not raw.strip():
        raise BadRequest("The request has no body; expected a JSON object.")
    try:
        value: object = json.loads(
            raw.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_noting_equal_keys if any(sign.search(raw) for sign in _OBJECT_SIGNS) else None,
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise BadRequest("The body contains a number that is too large.") from error
    _check_nesting(value)
    if _ESCAPED_SURROGATE.search(raw):
        value = _mend_surrogates(value)
    if not isinstance(value, dict):
        raise BadRequest(f"The body must be a JSON object, got {_describe(value)}.")
    return value


class EqualKeys(dict[str, object]):
    """An object that names a key more than once; it holds the last value."""


def _noting_equal_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else EqualKeys(value)


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"The body contains {name}, which is not JSON.")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequest(f"The body contains a number that is too large: {digits[:_MAX_SHOWN_CHARACTERS]}.")
    return value


def _check_nesting(value: object) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in children(parent) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def children(value: object) -> Iterator[object]:
    """The values in an object or array; none in any other value."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested too deeply: at most {MAX_NESTING} levels of arrays and objects are read.")


def _mend_surrogates(value: object) -> object:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return type(value)({_mend_surrogates(key): _mend_surrogates(child) for key, child in value.items()})
    if isinstance(value, list):
        return [_mend_surrogates(child) for child in value]
    return value


# --- objects ---------------------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    """A JSON object with its path. Missing keys are looked up in `fallback`, if there is one.

    A request makes one or more per message of its history; a tuple takes half the time of a frozen dataclass.
    """

    values: JsonObject
    path: str = ""
    fallback: "Fields | None" = None

    def locate(self, key: str) -> tuple[object, str]:
        """The value under `key` (None where it is missing or null) and its path."""
        value = self.values.get(key)
        if value is None and self.fallback is not None:
            found, path = self.fallback.locate(key)
            if found is not None:
                return found, path
        return value, child_path(self.path, key)

    def optional[T](self, key: str, reader: Reader[T]) -> T | None:
        """The value under `key`, or None where it is missing or null. Raises BadRequest as the reader does."""
        value = self.values.get(key)
        if value is not None:
            return reader(value, child_path(self.path, key))
        if self.fallback is None:
            return None  # most fields of most messages: they need no path
        value, path = self.locate(key)
        return None if value is None else reader(value, path)

    def required[T](self, key: str, reader: Reader[T]) -> T:
        """The value under `key`. Raises BadRequest where it is missing or null, and as the reader does."""
        value, path = self.locate(key)
        if value is None:
            raise BadRequest(f"{path} is required.", param=path)
        return reader(value, path)


def child_path(path: str, key: str) -> str:
    """`path.key`, with a key of unreasonable length cut."""
    key = key if len(key) <= _MAX_SHOWN_CHARACTERS else key[:_MAX_SHOWN_CHARACTERS] + "..."
    return f"{path}.{key}" if path else key


def with_extra_body(body: JsonObject) -> Fields:
    """The body's fields; missing ones are taken from its `extra_body`, where SDK users nest them."""
    top = Fields(body)
    return Fields(body, fallback=top.optional("extra_body", mapping))


def stated[T](place: Fields, key: str, reader: Reader[T]) -> T | None:
    """As `place.optional`, for fields that may also be in `metadata`, where an application's own text under the same
    key is ignored. Raises BadRequest."""
    try:
        return place.optional(key, reader)
    except BadRequest:
        if place.path.rpartition(".")[2] == "metadata" and isinstance(place.values.get(key), str):
            return None
        raise


def places(body: JsonObject, *paths: tuple[str, ...]) -> tuple[Fields, ...]:
    """The objects in `body` under these key paths; () is the body. Raises BadRequest for other types."""
    found: list[Fields] = []
    for path in paths:
        place: Fields | None = Fields(body)
        for key in path:
            place = place and place.optional(key, mapping)
        if place is not None:
            found.append(place)
    return tuple(found)


# --- readers ---------------------------------------------------------------------------------------------------------


def mistyped(path: str, expected: str, value: object) -> BadRequest:
    """The error for a value of the wrong type or outside its range."""
    return BadRequest(f"{path}: expected {expected}, got {_describe(value)}.", param=path)


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER.bit_length():
        return "a number that is too large"
    shown = json.dumps(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"{shown[:_MAX_SHOWN_CHARACTERS]}..."


def text(value: object, path: str) -> str:
    """A string, empty or not."""
    if not isinstance(value, str):
        raise mistyped(path, "a string", value)
    return value


def filled_text(value: object, path: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise mistyped(path, "a string that is not empty", value)
    return value


def flag(value: object, path: str) -> bool:
    """true or false; neither 0 nor "true"."""
    if not isinstance(value, bool):
        raise mistyped(path, "true or false", value)
    return value


def mapping(value: object, path: str) -> Fields:
    """A JSON object."""
    if not isinstance(value, (dict, Mapping)):  # the check of a dict is fast, that of the abstract class is not
        raise mistyped(path, "an object", value)
    return Fields(value, path)


def single_keys(value: object, path: str) -> Fields:
    """A JSON object without equal keys in it: of two values one would be lost."""
    refuse_equal_keys(value, path)
    return mapping(value, path)


def refuse_equal_keys(value: object, path: str) -> None:
    """Raises BadRequest where an object in `value` names a key twice."""
    level = [value]
    while level:
        if any(isinstance(child, EqualKeys) for child in level):
            raise BadRequest(f"{path}: a key is named twice in one object; give each key once.", param=path)
        level = [child for parent in level for child in children(parent)]


def word(*words: str) -> Reader[str]:
    """One of `words`."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise mistyped(path, "one of " + ", ".join(f'"{known}"' for known in words), value)
        return value

    return read


def integer(low: int = -MAX_INTEGER - 1, high: int = MAX_INTEGER) -> Reader[int]:
    """A whole number in [low, high]; 1.0 is one, true and "1" are not."""

    def read(value: object, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise mistyped(path, f"an integer from {low} to {high}", value)
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader[float]:
    """A finite number in [low, high], or in (low, high] where `above` is set."""
    span = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"

    def read(value: object, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise mistyped(path, span, value)
        if not low <= value <= high or (above and value == low):  # NaN fails the first comparison
            raise mistyped(path, span, value)
        return float(value)

    return read


def list_of[T](reader: Reader[T]) -> Reader[list[T]]:
    """An array whose items `reader` reads, each under its own index."""

    def read(value: object, path: str) -> list[T]:
        if not isinstance(value, list | tuple):
            raise mistyped(path, "an array", value)
        return [reader(item, f"{path}[{index}]") for index, item in enumerate(value)]

    return read


def page_limit(query: Mapping[str, str], usual: int, most: int) -> int:
    """The number of entries that a query asks for, from 1 to `most`. Raises BadRequest."""
    said = query.get("limit", str(usual))
    if not (said.isascii() and said.isdigit() and len(said) < 9 and 1 <= int(said) <= most):
        raise BadRequest(f"limit: expected an integer from 1 to {most}.", param="limit")
    return int(said)


# --- names of fields in later errors ---------------------------------------------------------------------------------
#
# A schema that no grammar can enforce, or a prompt that is too long, is found in code that does not know the protocol:
# there fields have chat/completions' names.


_SCHEMA = "response_format.json_schema.schema"
_PARAMETERS = re.compile(r"tools\[([0-9]+)\]\.function\.parameters")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A request's own names of its messages, of its content's schema, and of the schema of each tool of its turn."""

    messages: str = "messages"
    schema: str = _SCHEMA
    parameters: Sequence[str] = ()

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Gives a passing RequestError the client's name of its field."""
        try:
            yield
        except RequestError as error:
            name = self._name_of(error.param or "")
            if error.param is not None and name is not None:
                error.message, error.param = error.message.replace(error.param, name), name
            raise

    def _name_of(self, param: str) -> str | None:
        if param == "messages":
            return self.messages
        if param == _SCHEMA:
            return self.schema
        tool = _PARAMETERS.fullmatch(param)
        return self.parameters[int(tool[1])] if tool is not None and int(tool[1]) < len(self.parameters) else None
