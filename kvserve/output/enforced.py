"""Finds how much of a JSON schema a grammar can enforce. It knows no keyword by name: it tries schemas on llguidance.

A strict schema is enforced whole or refused. Of any other schema only the parts that cannot be enforced are left out;
llguidance's lenient mode itself drops unknown keywords.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice

from llguidance import LLMatcher, LLTokenizer

from kvserve.core import JsonObject
from kvserve.errors import BadRequest

JSON_SPACE = r"[ \t\n\r]{1,20}"
"""White space inside JSON is bounded: a model without more to say can fill a form with it endlessly."""

MAX_TRIES = 200
"""Per schema; what is undecided by then is left out: a schema with hundreds of faults is hardly enforced anyway."""

MAX_NAMED = 6
"""The number of places that a note names."""

_KEYWORD = re.compile(r'"([^"]*)"')

type Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Enforced:
    """The enforced part of a schema, and in words what is left out of the client's."""

    schema: JsonObject
    is_strict: bool
    left_out: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The schema for `%json`."""
        return _text(self.schema, self.is_strict)


ANY_OBJECT = Enforced({"type": "object"}, is_strict=True)


def enforced(schema: object, field: str, *, strict: bool) -> Enforced:
    """The part of `schema` that can be enforced. Raises BadRequest naming `field` and the place for a strict schema
    that cannot be enforced whole."""
    if not isinstance(schema, Mapping):
        if strict:
            raise BadRequest(f"{field} must be a JSON schema: an object.", param=field)
        return Enforced({}, is_strict=False, left_out=() if schema is True else (_shown(()),))
    complaint, _ = _tried(schema, strict)
    if complaint is None:
        return Enforced(schema, strict, () if strict else _warnings(schema))
    kept, left_out = _reduced(schema, lambda part: _tried(part, strict)[0] is None, max_faults=1 if strict else None)
    if strict:
        raise BadRequest(f"{field} cannot be enforced: {_shown(left_out[0])}: {complaint}", param=field)
    return Enforced(kept, strict, (*map(_shown, left_out), *_warnings(kept)))


def allows_any_text(schema: Enforced) -> bool:
    """Whether the schema allows a string with any text."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(schema.text), log_level=0)
    if matcher.is_error():
        return False
    probes = (json.dumps(text, ensure_ascii=False) for text in ("", "~", "Two words,\n漢字 <b> 1", "z" * 300))
    return all(_accepts(matcher.deep_copy(), probe) for probe in probes)


def allowed(schema: Enforced, values: Iterable[object]) -> list[object] | None:
    """Those of the values that obey the schema; None where it cannot be tried."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(schema.text), log_level=0)
    if matcher.is_error():
        return None
    texts = ((each, json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f")) for each in values)
    return [each for each, text in texts if _accepts(matcher.deep_copy(), text)]


def described(label: str, left_out: Iterable[str]) -> tuple[str, ...]:
    """The note on what is not enforced of a schema, if anything."""
    places = list(dict.fromkeys(left_out))
    if not places:
        return ()
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return (f"not enforced of {label}: {', '.join(places[:MAX_NAMED])}{more}",)


def _text(schema: object, strict: bool) -> str:
    # Replaces the client's own options, which could disable the checks.
    options = {"x-guidance": {"whitespace_pattern": JSON_SPACE, "lenient": not strict}}
    return json.dumps({**schema, **options} if isinstance(schema, Mapping) else schema)


def _tried(schema: object, strict: bool) -> tuple[str | None, list[str]]:
    """llguidance's error, or None and its warnings."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(_text(schema, strict)), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # shows that nothing at all can be written, e.g. of a schema that only holds itself
    if matcher.is_error():
        return matcher.get_error().strip() or "it is invalid", []
    if matcher.is_stopped() and not matcher.is_accepting():
        return "nothing obeys it", []
    return None, matcher.get_grammar_warnings()


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _accepts(matcher: LLMatcher, text: str) -> bool:
    ids = _bytes().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _warnings(schema: object) -> tuple[str, ...]:
    """What lenient mode drops, in plain words: the keywords if the warning names them, else the warning."""
    said: list[str] = []
    for warning in _tried(schema, strict=False)[1]:
        said += _KEYWORD.findall(warning) if warning.startswith("Unimplemented keys") else warning.splitlines()[:1]
    return tuple(dict.fromkeys(said))


# --- what to leave out ------------------------------------------------------------------------------------------------


def _reduced(
    schema: JsonObject, accepts: Callable[[object], bool], max_faults: int | None = None
) -> tuple[JsonObject, list[Path]]:
    """As much of `schema` as llguidance accepts, and the places left out; the empty schema is accepted.

    Keys are added in order; where the schema is refused, a bisection finds the key at fault.
    """
    rest, kept, left_out, num_tries = _keys(schema, accepts), set[Path](), list[Path](), 0

    def is_accepted(some: Iterable[Path]) -> bool:
        nonlocal num_tries
        num_tries += 1
        return accepts(_part(schema, kept.union(some)))

    while rest and not is_accepted(rest):
        if num_tries > MAX_TRIES:
            left_out += [path for path in rest if path[:-1] in kept or not path[:-1]]
            rest = []
            break
        low, high = 0, len(rest)  # with rest[:low] it is accepted, with rest[:high] it is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_accepted(rest[:middle]) else (low, middle)
        kept.update(rest[:low])
        fault = rest[low]
        left_out.append(fault)
        if len(left_out) == max_faults:
            break
        rest = [path for path in rest[high:] if path[: len(fault)] != fault]
    kept.update(rest)
    part = _part(schema, kept)
    return part if isinstance(part, dict) else {}, left_out


def _keys(schema: JsonObject, accepts: Callable[[object], bool]) -> list[Path]:
    """Every key of every object in the schema, outermost first. Keys of objects precede all others: a definition exists
    before it is filled and before a reference to it. Keys that are refused even alone are last: they are more likely at
    fault than the keys that they are refused with."""
    alone: dict[str, bool] = {}

    def rank(path: Path, value: object) -> tuple[int, int]:
        if isinstance(value, Mapping) or value is True or _holds_objects(value):
            return 0, len(path)
        part = {str(path[-1]): value}
        if (text := json.dumps(part)) not in alone:
            alone[text] = len(alone) >= MAX_TRIES or accepts(part)
        return (1 if alone[text] else 2), len(path)

    return [path for path, _ in sorted(_walk(schema, ()), key=lambda item: rank(*item))]


def _walk(value: object, path: Path) -> Iterable[tuple[Path, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, key), inner
            yield from _walk(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, index))


def _holds_objects(value: object) -> bool:
    """Whether a list has objects in it, at any depth."""
    return isinstance(value, list) and any(isinstance(inner, Mapping) or _holds_objects(inner) for inner in value)


def _part(value: object, kept: set[Path], path: Path = ()) -> object:
    """The value with the kept keys only."""
    if isinstance(value, Mapping):
        inner = ((key, (*path, key)) for key in value)
        return {key: _part(value[key], kept, place) for key, place in inner if place in kept}
    if isinstance(value, list):
        return [_part(inner, kept, (*path, index)) for index, inner in enumerate(value)]
    return value


def _shown(path: Path) -> str:
    return ".".join(str(step) for step in islice(path, 12)) or "all of it"
