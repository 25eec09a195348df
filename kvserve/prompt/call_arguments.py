"""Reads the JSON of a call's arguments where a template can have its values without a loss. It knows no messages."""

import json
import math
from decimal import Decimal
from typing import NoReturn


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
    return value if isinstance(value, dict) else None


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
