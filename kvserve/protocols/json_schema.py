"""Checks that a JSON schema is well formed. This file knows the keywords' shapes; it compiles no grammar.

It refuses only what would mislead the model or break a grammar. Keywords outside the table pass, as does the boolean
`required` of old drafts, which tools still have.
"""

from collections.abc import Callable, Mapping

from kvserve.core import JsonObject
from kvserve.protocols.fields import child_path, mapping, mistyped, single_keys, text, word

type Check = Callable[[object, str], None]

_type_name = word("string", "number", "integer", "boolean", "object", "array", "null")


def read_schema(value: object, path: str) -> JsonObject:
    """The schema. Raises BadRequest naming the broken keyword, also for equal keys: one of them would be lost."""
    fields = single_keys(value, path)
    check_schema(value, path)
    return fields.values


def check_schema(value: object, path: str) -> None:
    """Raises BadRequest unless `value` is true, false or an object whose known keywords have the right shape."""
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise mistyped(path, "a JSON schema (an object)", value)
    for keyword, check in _KEYWORDS.items():
        if value.get(keyword) is not None:
            check(value[keyword], child_path(path, keyword))


def _check_type(value: object, path: str) -> None:
    if isinstance(value, list):
        for index, name in enumerate(value):
            _type_name(name, f"{path}[{index}]")
    else:
        _type_name(value, path)


def _check_map(value: object, path: str) -> None:
    for name, schema in mapping(value, path).values.items():
        check_schema(schema, child_path(path, name))


def _check_list(value: object, path: str) -> None:
    if not isinstance(value, list):
        raise mistyped(path, "an array of JSON schemas", value)
    for index, schema in enumerate(value):
        check_schema(schema, f"{path}[{index}]")


def _check_one_or_list(value: object, path: str) -> None:
    (_check_list if isinstance(value, list) else check_schema)(value, path)


def _check_required(value: object, path: str) -> None:
    if isinstance(value, bool):
        return
    if not isinstance(value, list):
        raise mistyped(path, "an array of property names", value)
    for index, name in enumerate(value):
        text(name, f"{path}[{index}]")


def _check_enum(value: object, path: str) -> None:
    if not isinstance(value, list):
        raise mistyped(path, "an array of values", value)


def _check_text(value: object, path: str) -> None:
    text(value, path)


_KEYWORDS: Mapping[str, Check] = {
    "type": _check_type,
    "properties": _check_map,
    "patternProperties": _check_map,
    "$defs": _check_map,
    "definitions": _check_map,
    "items": _check_one_or_list,
    "prefixItems": _check_list,
    "additionalProperties": check_schema,
    "anyOf": _check_list,
    "oneOf": _check_list,
    "allOf": _check_list,
    "not": check_schema,
    "required": _check_required,
    "enum": _check_enum,
    "description": _check_text,
    "$ref": _check_text,
    "pattern": _check_text,
}
