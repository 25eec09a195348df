"""Writes grammar rules for a call's arguments in the forms that write each as a key and a value.

A text ends at what closes a value with the next key's opening or the call's end behind it. It may hold either alone;
both together, in whatever white space, cannot be written. So its reader ends it there too: a key always follows such an
opening. The reader alone knows a text that holds both and no key behind them. Arguments come in the schema's order, and
a text's inside is free, except in enumerations.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import JSON_SPELLING, Spelling
from kvserve.output.choices import OF_SCHEMAS, ONLY_TYPES, UNSAID_OF_OBJECTS, Choices, enumerated
from kvserve.output.enforced import Enforced, allowed, allows_any_text, enforced
from kvserve.output.lark import SPACES, Lark, quote
from kvserve.output.tool_parsers.arguments import (
    JSON_TYPES,
    STRING,
    read_argument,
    type_names,
    types_of,
    write_argument,
)
from kvserve.output.tool_parsers.form import Chain

ANY_VALUE = Enforced({"type": sorted(JSON_TYPES - STRING)}, is_strict=True)
"""Whatever is no string."""

_PROBES: tuple[object, ...] = (0, -7, 1234567, 0.5, True, False, None, [], [None, {"q": []}], {}, {"q": [1]})
"""Values of every type but strings; what a schema says of one besides its type forbids some of them."""


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

    def holds(self, text: str) -> bool:
        """Whether the reader takes no part of a value's text for its end."""
        ends = ((SPACES.join(map(re.escape, end)), f"{text}{''.join(end)}") for end in self.ends)
        return not any((found := re.search(pattern, said)) and found.start() < len(text) for pattern, said in ends)

    def behind(self, *tags: str) -> Chain:
        """What closes a value, with these tags behind it: one text where nothing may stand between them."""
        return (self.closing, *filter(None, tags)) if self.gap else ("".join((self.closing, *tags)),)


@dataclass(frozen=True, slots=True)
class _Argument:
    """The rule of a key, and its values: whether it may be any text, the texts of which it may be one, strings and no
    strings, and rules of values that are no strings."""

    key: str
    is_text: bool = False
    strings: tuple[str, ...] = ()
    no_strings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def has_value(self) -> bool:
        """Whether there is any value that it may have."""
        return self.is_text or bool(self.strings or self.no_strings or self.others)


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
        for keyword in (*UNSAID_OF_OBJECTS, *OF_SCHEMAS):
            if keyword in schema and keyword not in self._parameters.left_out:
                self._lose(keyword)
        properties = schema.get("properties")
        schemas = dict(properties) if isinstance(properties, Mapping) else {}
        required = _strings(schema.get("required"))
        schemas = {**schemas, **{key: {} for key in required if key not in schemas}}
        schemas = self._form.spelling.in_order(schemas)
        rest = schema.get("additionalProperties", True)
        if not schemas and rest is not False:
            some = self._any_arguments(rest if isinstance(rest, Mapping) else {})
            return self._lark.rule(" | ".join([*([self._opened(some)] if some else []), self._ended()]))
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

    def _any_arguments(self, schema: Mapping[str, object]) -> str:
        """The same of any keys with values of this schema; nothing if there are none."""
        key = self._lark.key(self._form.stops, self._form.ends[0])
        argument = self._typed(key, "additionalProperties", schema) if schema else self._any_value(key)
        if not argument.has_value:
            return ""
        again = self._lark.reserved()
        return self._lark.fill(again, self._argument(argument, again, may_end=True))

    def _argument(self, argument: _Argument, following: str | None, *, may_end: bool) -> str:
        """One argument behind its opening, up to behind the next one's opening or to the call's end."""
        form, lark = self._form, self._lark
        behind = _any(self._behind(following, may_end))
        strings = [f"{value} {behind}" for value in lark.one_of(argument.strings, form.closing)]
        strings += self._texts(following, may_end) if argument.is_text else []
        others = [f"{value} {behind}" for value in lark.one_of(argument.no_strings, form.closing)]
        others += [f"{value} {lark.tag(form.closing)} {behind}" for value in argument.others]
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
            schema = own if isinstance(own, Mapping) else {}
            argument = self._typed(quote(key), f"properties.{key}", schema, is_required=key in required)
            if argument.has_value:
                yield argument

    def _typed(self, key: str, place: str, own: Mapping[str, object], *, is_required: bool = False) -> _Argument:
        form, root, is_strict = self._form, self._parameters.schema, self._parameters.is_strict
        choices = enumerated(own, root)
        types = types_of(own, root)
        if choices is not None:
            told = list(self._told(choices, place, types))
            strings, no_strings = (
                tuple(write_argument(each, form.spelling) for each in told if isinstance(each, str) is kind)
                for kind in (True, False)
            )
            return _Argument(key, False, strings, no_strings, is_required=is_required)
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        others = types - STRING if form.tells_strings else types
        value = enforced({**shared, **own}, self._path, strict=is_strict)
        is_text = "string" in types
        if is_text:
            if not (allows_any_text(value) and (form.tells_strings or _allows_any_other(value, types))):
                self._lose(f"{place}, as the model's form of calls leaves a text's inside free")
            if not (form.tells_strings and others):
                return _Argument(key, is_text, is_required=is_required)
            value = enforced({**shared, **own, "type": sorted(others)}, self._path, strict=is_strict)
        words = self._words(own, others)
        rest = others - {"boolean", "null"} if words else others
        if words and rest:
            value = enforced({**shared, **own, "type": sorted(rest)}, self._path, strict=is_strict)
        new = (each for each in value.left_out if each not in self._parameters.left_out)
        self.left_out += (f"{place}.{each}" for each in new)
        return _Argument(key, is_text, (), (), (*words, *([self._lark.json(value)] if rest else [])), is_required)

    def _any_value(self, key: str) -> _Argument:
        """What nothing is said of. No schema is tried for it, as most tools of a request are no strict ones."""
        return _Argument(key, True, others=(self._lark.json(ANY_VALUE),) if self._form.tells_strings else ())

    def _told(self, choices: Choices, place: str, types: frozenset[str]) -> Iterator[object]:
        """Those of an enumeration that are read back as they are written; the others are noted."""
        form = self._form
        for keyword in choices.untried:
            self._lose(f"{place}.{keyword}")
        texts = frozenset(write_argument(each, form.spelling) for each in choices.values)
        for value in choices.values:
            text, said = write_argument(value, form.spelling), types
            if form.tells_strings:
                said = STRING if isinstance(value, str) else types - STRING
            read = read_argument(text, said, form.spelling)
            is_same = json.dumps(read, sort_keys=True) == json.dumps(value, sort_keys=True)
            if is_same and form.holds(text) and not self._hides(text, texts):
                yield value
            else:
                self._lose(f"{place}: {value!r}, which the model's form of calls cannot write")

    def _hides(self, text: str, texts: Collection[str]) -> bool:
        """Whether a text goes on like another one and what closes that: a lexer, which never goes back, could not end
        the other one there."""
        form, whole = self._form, text + self._form.closing
        if self._lark.has_tokens(form.closing):
            return False
        firsts = {"\n" * bool(form.gap), (form.between + form.opening)[:1], form.end[:1]}
        starts = (found.start() for found in re.finditer(f"(?={re.escape(form.closing)})", whole))
        others = (start for start in starts if start < len(text) and text[:start] in texts)
        return any(whole[start + len(form.closing)] in firsts for start in others)

    def _words(self, schema: Mapping[str, object], types: frozenset[str]) -> tuple[str, ...]:
        """The form's own words for true, false and null, where these are no JSON and a type alone says that they are
        allowed; none where the schema says more, which is enforced as JSON."""
        spelling = self._form.spelling
        if spelling == JSON_SPELLING or not schema.keys() <= ONLY_TYPES:
            return ()
        return tuple(quote(spelling.written(value)) for value in (True, False, None) if type_names(value) & types)


def _allows_any_other(schema: Enforced, types: frozenset[str]) -> bool:
    """Whether a schema allows any value of these types that is no string."""
    probes = [each for each in _PROBES if type_names(each) & types]
    return not probes or allowed(schema, probes) == probes


def _any(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
