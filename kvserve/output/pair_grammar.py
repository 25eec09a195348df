"""Writes grammar rules for a call's arguments in the forms that write each as a key and a value.

A text ends at what closes a value with the next key's opening or the call's end behind it. It may hold either alone;
both together, in whatever white space, cannot be written. So its reader ends it there too: a key always follows such an
opening. The reader alone knows a text that holds both and no key behind them. Arguments come in the schema's order, and
a text's inside is free, except in enumerations.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import JSON_SPELLING, Spelling
from kvserve.output.enforced import Enforced, allows_any_text, enforced
from kvserve.output.lark import Lark, quote
from kvserve.output.tool_parsers.arguments import (
    JSON_TYPES,
    STRING,
    choices_of,
    type_names,
    types_of,
    write_argument,
)
from kvserve.output.tool_parsers.form import Chain

ANY_VALUE = Enforced({"type": sorted(JSON_TYPES - STRING)}, is_strict=True)
"""Whatever is no string."""

_ONLY_TYPES = frozenset(("type", "title", "description", "default", "examples"))
"""Keywords of a schema that allows or forbids true, false and null by its type alone."""


@dataclass(frozen=True, slots=True)
class PairForm:
    """How a form writes arguments, between some of whose tags `gap` may stand, a regular expression:

        opening KEY lead VALUE closing (between opening KEY lead VALUE closing)* end

    `other` stands in the place of `lead` before what is no string, where the form tells them apart; such values are in
    `spelling`. A key holds none of the characters in `stops`. A value's reader ends it at the first of `ends`; the
    first of these stands before the next key.
    """

    opening: str
    lead: Chain
    closing: str
    end: str
    ends: tuple[Chain, ...]
    between: str = ""
    other: Chain | None = None
    stops: str = "<>"
    gap: str = ""
    spelling: Spelling = JSON_SPELLING

    @property
    def tells_strings(self) -> bool:
        """Whether an argument says if its value is a string."""
        return self.other is not None

    def divides(self, key: str) -> bool:
        """Whether the reader takes what `key` begins with for the value before it: of two openings the last counts."""
        tags = self.ends[0]
        return re.search(r"[ \t]*".join(map(re.escape, tags)), f"{''.join(tags)}{key}"[1:]) is not None

    def behind(self, *tags: str) -> Chain:
        """What closes a value, with these tags behind it: one text where nothing may stand between them."""
        return (self.closing, *filter(None, tags)) if self.gap else ("".join((self.closing, *tags)),)


@dataclass(frozen=True, slots=True)
class _Argument:
    """The rule of a key, whether it may have any text, and the rules of other values: strings, and no strings."""

    key: str
    is_text: bool
    strings: tuple[str, ...]
    others: tuple[str, ...]
    is_required: bool = False


class PairGrammar:
    """Writes the arguments of one tool into `lark`; `left_out` names what is not enforced of its schema."""

    def __init__(
        self, lark: Lark, form: PairForm, parameters: Enforced, path: str, lose: Callable[[str], None]
    ) -> None:
        """`path` is the schema's name; `lose` notes what the form cannot say, or raises BadRequest."""
        self._lark = lark
        self._form = form
        self._parameters = parameters
        self._path = path
        self._lose = lose
        self.left_out: list[str] = []

    def arguments(self) -> str:
        """A rule for the text from behind the call's name to what ends the call: arguments in the schema's order, or in
        that of the template, any if it names none."""
        schema = self._parameters.schema
        properties = schema.get("properties")
        schemas = dict(properties) if isinstance(properties, Mapping) else {}
        required = _strings(schema.get("required"))
        schemas = {**schemas, **{key: {} for key in required if key not in schemas}}
        schemas = self._form.spelling.in_order(schemas)
        if not schemas and schema.get("additionalProperties") is not False:
            return self._lark.rule(f"{self._opened(self._any_arguments())} | {self._ended()}")
        following, may_end = self._in_order([*self._known(schemas, frozenset(required))])
        ways = [self._opened(following)] if following is not None else []
        return self._lark.rule(" | ".join([*ways, *([self._ended()] if may_end else [])]))

    # --- rows of arguments --------------------------------------------------------------------------------------------

    def _in_order(self, arguments: Sequence[_Argument]) -> tuple[str | None, bool]:
        """The rule of these from behind the first one's opening to the call's end, None of none, and whether the call
        may also end without any."""
        following: str | None = None
        may_end = True
        for argument in reversed(arguments):
            own = self._lark.rule(self._argument(argument, following, may_end=may_end))
            is_skipped = following is not None and not argument.is_required
            following = self._lark.rule(f"{own} | {following}") if is_skipped else own
            may_end = may_end and not argument.is_required
        return following, may_end

    def _any_arguments(self) -> str:
        """The same of any keys with any values."""
        key = self._lark.key(self._form.stops, self._form.ends[0])
        others = (self._lark.json(ANY_VALUE),) if self._form.tells_strings else ()
        again = self._lark.reserved()
        return self._lark.fill(again, self._argument(_Argument(key, True, (), others), again, may_end=True))

    def _argument(self, argument: _Argument, following: str | None, *, may_end: bool) -> str:
        """One argument behind its opening, up to behind the next one's opening or to the call's end."""
        form, closing = self._form, self._lark.tags(self._form.behind(), self._form.gap)
        behind = _any(self._behind(following, may_end))
        strings = [f"{value} {closing} {behind}" for value in argument.strings]
        strings += self._texts(following, may_end) if argument.is_text else []
        others = [f"{value} {closing} {behind}" for value in argument.others]
        if form.other is None:
            return f"{argument.key} {self._lark.tags(form.lead, form.gap)} {_any([*strings, *others])}"
        ways = [(form.lead, strings), (form.other, others)]
        return _any([f"{argument.key} {self._lark.tags(lead, form.gap)} {_any(each)}" for lead, each in ways if each])

    def _texts(self, following: str | None, may_end: bool) -> list[str]:
        """Free text and all behind it."""
        form, lark = self._form, self._lark
        if lark.has_tokens(form.closing):
            closed = lark.text_up_to(form.behind(), form.gap, form.ends)
            return [f"{closed} {_any(self._behind(following, may_end))}"]
        more = form.behind(form.between, form.opening)
        found = [f"{lark.text_up_to(more, form.gap, form.ends)} {following}"] if following is not None else []
        return [*found, *([lark.text_up_to(form.behind(form.end), form.gap, form.ends)] if may_end else [])]

    def _behind(self, following: str | None, may_end: bool) -> list[str]:
        """What may stand behind a closed value."""
        more = [self._opened(following, self._form.between)] if following is not None else []
        return [*more, *([self._ended()] if may_end else [])]

    def _opened(self, following: str, between: str = "") -> str:
        return f"{self._gap()} {self._lark.tag(between + self._form.opening)} {following}"

    def _ended(self) -> str:
        return f"{self._gap()} {self._lark.tag(self._form.end)}"

    def _gap(self) -> str:
        return f"/{self._form.gap}/" if self._form.gap else ""

    # --- one argument -------------------------------------------------------------------------------------------------

    def _known(self, schemas: Mapping[str, object], required: frozenset[str]) -> Iterator[_Argument]:
        """The arguments that a schema names."""
        for key, own in schemas.items():
            if own is False:
                continue
            if not key or set(key) & {*self._form.stops, *"\r\n"} or self._form.divides(key):
                self._lose(f"the key {key!r}, which the model's form of calls cannot write")
                continue
            yield self._typed(key, own if isinstance(own, Mapping) else {}, is_required=key in required)

    def _typed(self, key: str, own: Mapping[str, object], *, is_required: bool) -> _Argument:
        form, root, is_strict = self._form, self._parameters.schema, self._parameters.is_strict
        choices = choices_of(own)
        if choices is not None:
            said = [(isinstance(choice, str), quote(write_argument(choice, form.spelling))) for choice in choices]
            strings, no_strings = (tuple(text for kind, text in said if kind is each) for each in (True, False))
            return _Argument(quote(key), False, strings, no_strings, is_required)
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        types = types_of(own, root)
        others = types - STRING if form.tells_strings else types
        value = enforced({**shared, **own}, self._path, strict=is_strict)
        is_text = "string" in types
        if is_text:
            if not allows_any_text(value):
                self._lose(f"properties.{key}, as the model's form of calls leaves a text's inside free")
            if not (form.tells_strings and others):
                return _Argument(quote(key), True, (), (), is_required)
            value = enforced({**shared, **own, "type": sorted(others)}, self._path, strict=is_strict)
        words = self._words(own, others)
        rest = others - {"boolean", "null"} if words else others
        if words and rest:
            value = enforced({**shared, **own, "type": sorted(rest)}, self._path, strict=is_strict)
        new = (place for place in value.left_out if place not in self._parameters.left_out)
        self.left_out += (f"properties.{key}.{place}" for place in new)
        return _Argument(quote(key), is_text, (), (*words, *([self._lark.json(value)] if rest else [])), is_required)

    def _words(self, schema: Mapping[str, object], types: frozenset[str]) -> tuple[str, ...]:
        """The form's own words for true, false and null, where these are no JSON and a type alone says that they are
        allowed; none where the schema says more, which is enforced as JSON."""
        spelling = self._form.spelling
        if spelling == JSON_SPELLING or not schema.keys() <= _ONLY_TYPES:
            return ()
        return tuple(quote(spelling.written(value)) for value in (True, False, None) if type_names(value) & types)


def _any(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
