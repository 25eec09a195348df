"""Reads whether and how hard the model shall think, from every field that sets it. This file knows no templates.

Precedence, tested row by row:

1. Places, most specific first: the body, its `chat_template_kwargs`, `extra_body`, `extra_body.chat_template_kwargs`,
   `metadata`, `extra_body.metadata`. For each of enabled, effort and preserve the first place with a value counts.
2. A switch (on, off, true, false, none, {"type": ...}) beats a level (low, high, ...) of any place: a level only sets
   the amount. Without any switch a level switches thinking on.
3. A budget limits the thinking. Alone, a budget above zero switches it on, and zero off.
4. Two switches, levels or budgets of the *same* place that disagree are refused with 400, which names the second one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvserve.core import JsonObject, ThinkingChoice
from kvserve.errors import BadRequest
from kvserve.protocols.fields import MAX_TOKEN_COUNT, Fields, integer, mapping, mistyped, places, stated

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES: Mapping[str, bool] = {
    **dict.fromkeys(("off", "none", "false", "disabled"), False),
    **dict.fromkeys(("on", "true", "enabled", "adaptive", "between_tools", "auto"), True),
}
_EXPECTED = "true, false or one of " + ", ".join(f'"{word}"' for word in (*SWITCHES, *LEVELS))


@dataclass(frozen=True, slots=True)
class _Statement:
    """What one field sets, and its path."""

    path: str
    enabled: bool | None = None
    effort: str | None = None
    preserve: bool | None = None
    max_num_tokens: int | None = None


type _Reader = Callable[[object, str], list[_Statement]]


def _read_word(value: object, path: str) -> list[_Statement]:
    if isinstance(value, bool):
        return [_Statement(path, enabled=value)]
    name = value.lower() if isinstance(value, str) else ""
    if name in SWITCHES:
        return [_Statement(path, enabled=SWITCHES[name])]
    if name in LEVELS:
        return [_Statement(path, effort=name)]
    raise mistyped(path, _EXPECTED, value)


def _read_preserve(value: object, path: str) -> list[_Statement]:
    return [_Statement(path, preserve=_read_switch(value, path))]


def _read_clear(value: object, path: str) -> list[_Statement]:
    return [_Statement(path, preserve=not _read_switch(value, path))]


def _read_switch(value: object, path: str) -> bool:
    for statement in _read_word(value, path):
        if statement.enabled is not None:
            return statement.enabled
    raise mistyped(path, "true or false", value)


def _read_word_or_object(value: object, path: str) -> list[_Statement]:
    if not isinstance(value, Mapping):
        return _read_word(value, path)
    return _read_fields(mapping(value, path), _INNER)


_token_count = integer(0, MAX_TOKEN_COUNT)


def _read_budget(value: object, path: str) -> list[_Statement]:
    return [_Statement(path, max_num_tokens=_token_count(value, path))]


_INNER: Mapping[str, _Reader] = {
    "enabled": _read_word,
    "type": _read_word,
    "effort": _read_word,
    "level": _read_word,
    "clear_thinking": _read_clear,
    "budget_tokens": _read_budget,
    "max_tokens": _read_budget,
}

SWITCH_FIELDS: Mapping[str, _Reader] = {
    "enable_thinking": _read_word,
    "thinking": _read_word_or_object,
    "reasoning": _read_word_or_object,
    "reasoning_effort": _read_word,
    "preserve_thinking": _read_preserve,
    "clear_thinking": _read_clear,
}

BUDGET_FIELDS: Mapping[str, _Reader] = {"thinking_budget": _read_budget, "thinking_token_budget": _read_budget}
"""These are not switches: a chat template that reads such an argument still gets it."""

PLACES = (
    (),
    ("chat_template_kwargs",),
    ("extra_body",),
    ("extra_body", "chat_template_kwargs"),
    ("metadata",),
    ("extra_body", "metadata"),
)


def read_thinking(body: JsonObject) -> ThinkingChoice:
    """The body's thinking choice; all None if it has none. Raises BadRequest for unknown words."""
    found = [_read_fields(place, {**SWITCH_FIELDS, **BUDGET_FIELDS}) for place in places(body, *PLACES)]
    enabled = _first_agreed(found, lambda statement: statement.enabled)
    effort = _first_agreed(found, lambda statement: statement.effort)
    preserve = _first_agreed(found, lambda statement: statement.preserve)
    budget = _first_agreed(found, lambda statement: statement.max_num_tokens)
    if enabled is None and (effort is not None or budget is not None):
        enabled = effort is not None or budget != 0
    if enabled is False:
        return ThinkingChoice(enabled=False, preserve=preserve)
    return ThinkingChoice(True if effort is not None else enabled, effort, preserve, budget)


def _read_fields(place: Fields, table: Mapping[str, _Reader]) -> list[_Statement]:
    statements: list[_Statement] = []
    for name, reader in table.items():
        statements += stated(place, name, reader) or []
    return statements


def _first_agreed[T](found: list[list[_Statement]], get: Callable[[_Statement], T | None]) -> T | None:
    """The value of the first place that has one. Raises BadRequest if any place contradicts itself."""
    first: T | None = None
    for statements in found:
        said = [(value, statement.path) for statement in statements if (value := get(statement)) is not None]
        for value, path in said[1:]:
            if value != said[0][0]:
                raise BadRequest(f"{path} contradicts {said[0][1]}: give one of them.", param=path)
        if said and first is None:
            first = said[0][0]
    return first
