"""Makes data of JSON, such as a call's arguments, that a template can have without a loss. It knows no messages."""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import NoReturn

from kvserve.prompt.control import MARK, keeping_marks


def parsed_arguments(text: str) -> dict[str, object] | None:
    """The JSON object in a call's arguments, {} for empty text, None for anything else.

    None also for an object that would lose something on the way to the template: one of two equal keys, or a number
    beyond a double (1e400, 0.10000000000000000001). Its text is then written as it was sent.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(
            text, object_pairs_hook=_single_keys, parse_float=_exact_float, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {keeping_marks(key): plain_data(item) for key, item in value.items()} if MARK in text else value


def plain_data(value: object) -> object:
    """The same JSON value of plain dicts and lists, which templates can iterate and dump, with marks that they keep."""
    if isinstance(value, str):
        return keeping_marks(value)
    if isinstance(value, Mapping):
        return {keeping_marks(str(key)): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return value


def _single_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def _exact_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value) or Decimal(digits) != Decimal(repr(value)):
        raise ValueError("no double is this number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
