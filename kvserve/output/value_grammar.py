"""Writes grammar rules for values of a JSON schema as a template spells them where strings stand between marks.

It knows schemas and spellings, no form of calls. Members stand in the schema's order, or in that of the template; those
that it does not name only where it says that others are allowed, or names none. A text's inside is free, except in
enumerations. A lexeme ends at the same place in every alternative, as a lexer never goes back.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvserve.core import Spelling
from kvserve.output.choices import (
    OF_NUMBERS,
    OF_SCHEMAS,
    OF_TEXTS,
    RESTRICTING,
    UNSAID_OF_LISTS,
    UNSAID_OF_OBJECTS,
    enumerated,
)
from kvserve.output.enforced import Enforced, allows_any_text, enforced
from kvserve.output.lark import Lark, escaped, quote
from kvserve.output.tool_parsers.arguments import (
    JSON_TYPES,
    resolve,
    type_names,
    types_of,
)
from kvserve.output.tool_parsers.own_text import BEHIND_VALUE, is_bare_key

_ESCAPE = (
    r"\\[\\nrt]|\\x(0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f]|a0|ad)"
    r"|\\u(061c|1680|180e|20(0[0-9a-f]|2[89a-f]|5f|6[0-9a-f])|3000|feff|e[0-9a-f]{3}|f[0-8][0-9a-f]{2})"
)
"""What Python shows in the place of characters that it does not print."""

_IN_SINGLE, _IN_DOUBLE, _IN_BOTH = (
    rf"([^{sign}\\\p{{C}}\p{{Z}}]| |{_ESCAPE}{more})*"
    for sign, more in ((r"\x27", ""), (r"\x22", ""), (r"\x27", r"|\\\x27"))
)
_PYTHON_TEXTS = (
    rf"\x27{_IN_SINGLE}\x27",
    rf"\x22{_IN_DOUBLE}\x27{_IN_DOUBLE}\x22",
    rf"\x27{_IN_BOTH}\x22{_IN_BOTH}\x27",
)
"""What Python shows of a text: in double quotes where it holds single ones and no double ones."""

_NUMBERS = frozenset(("number", "integer"))


@dataclass(frozen=True, slots=True)
class MemberForm:
    """How the members of an object are written, each `opening KEY lead VALUE`, and `between` two of them.

    `key` gives a key as it is written, None for one that cannot be; `any_key` is a regular expression of those that no
    schema names, empty if there are none. `sorts_keys`: those that it names stand in the order of the spelling.
    """

    key: Callable[[str], str | None]
    any_key: str
    between: str
    lead: str
    opening: str = ""
    sorts_keys: bool = True

    def head(self, *, is_first: bool) -> str:
        """What stands before a key."""
        return self.opening if is_first else self.between + self.opening

    def before(self, key: str, *, is_first: bool) -> str:
        """What stands before the value of a key."""
        return f"{self.head(is_first=is_first)}{key}{self.lead}"


@dataclass(slots=True)
class ValueGrammar:
    """Writes the values of one schema into `lark`.

    `root` is the schema in which references are found, `path` its name. `lose` notes what cannot be said, or raises
    BadRequest. `tells` says of a value whether it is read back as an argument.
    """

    lark: Lark
    spelling: Spelling
    root: Enforced
    path: str
    lose: Callable[[str], None]
    tells: Callable[[object], bool]
    _known: dict[object, str] = field(default_factory=dict)

    def ways(self, schema: object, place: str, types: frozenset[str] = JSON_TYPES, *, text: str = "") -> list[str]:
        """Alternatives for a value that obeys `schema` and has one of these types; none if there is no such value.

        `text` is the rule of a string in an argument; without it the value is inside of a list or an object.
        """
        if not isinstance(schema, Mapping):
            return [] if schema is False else self._typed({}, place, types, text)
        types &= types_of(schema, self.root.schema)
        choices = enumerated(schema, self.root.schema)
        if choices is not None:
            self._lose_each(schema, f"{place}.", choices.untried)
            said = [each for each in choices.values if type_names(each) & types]
            told = [each for each in said if self._is_told(each, place, is_inner=not text)]
            return self._literals(told, is_inner=not text)
        return self._combined(schema, place, types, text)

    def members(self, schema: Mapping[str, object], place: str, form: MemberForm, close: str, *, text: str = "") -> str:
        """A rule for the members of an object from behind its opening up to and with `close`.

        All that stands before a value is one lexeme, so that no text before it goes on there.
        """
        self._lose_each(schema, place, (*UNSAID_OF_OBJECTS, *OF_SCHEMAS))
        found = schema.get("properties")
        named = dict(found) if isinstance(found, Mapping) else {}
        required = [key for key in _list_of(schema.get("required")) if isinstance(key, str)]
        rest = schema.get("additionalProperties", not named) if form.any_key else False
        other = self.ways(rest, f"{place}additionalProperties", text=text)
        first = behind = close
        if other:
            known = {*named, *required}
            heads = (self._any_head(form, known, is_first=each) for each in (True, False))
            more, again = (f"{head} {_any(other)}" for head in heads)
            behind = self.lark.rule(f"({again})* {close}")
            first = self.lark.rule(f"{more} {behind} | {close}")
        keys = {**named, **{key: True for key in required if key not in named}}
        for key in reversed(self.spelling.in_order(keys) if form.sorts_keys else keys):
            written = form.key(key)
            ways = self.ways(named.get(key, True), f"{place}properties.{key}", text=text)
            if written is None:
                self.lose(f"the key {key!r}, which the model's form of calls cannot write")
            if written is None or not ways:
                continue
            value = self.lark.rule(f"{_any(ways)} {behind}")
            head, later = (f"{self.lark.tag(form.before(written, is_first=each))} {value}" for each in (True, False))
            first = self.lark.rule(head if key in required else f"{head} | {first}")
            behind = self.lark.rule(later if key in required else f"{later} | {behind}")
        return first

    def _any_head(self, form: MemberForm, known: Collection[str], *, is_first: bool) -> str:
        """What stands before the value of a key that is none of those that are known."""
        before, lead = form.head(is_first=is_first), form.lead
        barred = "|".join(escaped(key) for key in map(form.key, sorted(known)) if key is not None)
        if any(map(self.lark.has_tokens, (before, lead))):
            return f"{self.lark.tag(before)} {self.lark.terminal(form.any_key, barred=barred)} {self.lark.tag(lead)}"
        barred = f"{escaped(before)}({barred}){escaped(lead)}" if barred else ""
        return self.lark.terminal(f"{escaped(before)}({form.any_key}){escaped(lead)}", barred=barred)

    # --- schemas of schemas -------------------------------------------------------------------------------------------

    def _combined(self, schema: Mapping[str, object], place: str, types: frozenset[str], text: str) -> list[str]:
        """What a reference names, one of several schemas allows, or the schema itself says: never two of these."""
        restricting = [key for key in RESTRICTING if key in schema]
        keyword, reference = next(iter(restricting), ""), schema.get("$ref")
        schemas = _list_of(schema.get(keyword)) if keyword in OF_SCHEMAS else ()
        is_one = len(restricting) == 1 and (len(schemas) == 1 or (bool(schemas) and keyword != "allOf"))
        if isinstance(reference, str):
            self._lose_each(schema, f"{place}.", (key for key in restricting if key != "$ref"))
            return self._referred(reference, place, types, text)
        if not is_one:
            self._lose_each(schema, f"{place}.", OF_SCHEMAS)
            own = {key: value for key, value in schema.items() if key not in OF_SCHEMAS}
            return self._typed(own, place, types, text)
        found = (self.ways(part, f"{place}.{keyword}", types, text=text) for part in schemas)
        return list(dict.fromkeys(way for ways in found for way in ways))

    def _referred(self, reference: str, place: str, types: frozenset[str], text: str) -> list[str]:
        """The same for what a reference names, which may hold itself."""
        asked = (reference, types, text)
        if asked not in self._known:
            rule = self._known[asked] = self.lark.reserved()
            found = resolve(reference, self.root.schema)
            if not isinstance(found, bool | Mapping):
                self._lose(f"{place}.$ref")
            ways = self.ways(found, place, types, text=text)
            self.lark.fill(rule, " | ".join(ways) or rule)
            if not ways:
                self._known[asked] = ""
        return [self._known[asked]] if self._known[asked] else []

    # --- one type -----------------------------------------------------------------------------------------------------

    def _typed(self, schema: Mapping[str, object], place: str, types: frozenset[str], text: str) -> list[str]:
        """Alternatives by type, for what a schema says without others."""
        if text or types != JSON_TYPES or not schema.keys().isdisjoint(RESTRICTING):
            return list(self._by_type(schema, place, types, text))
        if "any" not in self._known:
            rule = self._known["any"] = self.lark.reserved()
            self.lark.fill(rule, " | ".join(self._by_type({}, place, types, "")))
        return [self._known["any"]]

    def _by_type(self, schema: Mapping[str, object], place: str, types: frozenset[str], text: str) -> Iterable[str]:
        if "string" in types:
            yield self._text(schema, place, text)
        if types & _NUMBERS:
            yield from self._number(schema, place, types & _NUMBERS)
        if "boolean" in types:
            yield quote(self.spelling.true)
            yield quote(self.spelling.false)
        if "null" in types:
            yield quote(self.spelling.null)
        for kind in ("array", "object"):
            if kind in types and self._is_json(kind, is_inner=not text):
                yield from self._json(schema, place, kind)
        if "array" in types and not self._is_json("array", is_inner=not text):
            yield from self._list(schema, place)
        if "object" in types and not self._is_json("object", is_inner=not text):
            opened = self.members(schema, f"{place}.", self._inner_form, quote("}"))
            yield f"{quote('{')} {opened}"

    def _is_json(self, kind: str, *, is_inner: bool) -> bool:
        spelling = self.spelling
        if spelling.is_own or (spelling.is_python and is_inner):
            return False
        return not spelling.is_python or (kind == "object" and spelling.has_json_objects)

    def _text(self, schema: Mapping[str, object], place: str, text: str) -> str:
        if not schema.keys().isdisjoint(OF_TEXTS):
            own = Enforced({"type": "string", **_only(schema, OF_TEXTS)}, is_strict=False)
            if not allows_any_text(own):
                self.lose(f"{place}, as the model's form of calls leaves a text's inside free")
        if text:
            return text
        if self.spelling.is_python:
            return _any([self.lark.terminal(pattern) for pattern in _PYTHON_TEXTS])
        return self.lark.marked(self._marks, rf"[\s\x1c-\x1f]*[{escaped(BEHIND_VALUE)}]")

    def _number(self, schema: Mapping[str, object], place: str, types: frozenset[str]) -> list[str]:
        kind = "number" if "number" in types else "integer"
        return self._json(_only(schema, OF_NUMBERS), place, kind)

    def _json(self, schema: Mapping[str, object], place: str, kind: str) -> list[str]:
        """A value of this type as JSON; none if nothing obeys the schema."""
        shared = _only(self.root.schema, ("$defs", "definitions"))
        own = enforced({**shared, **schema, "type": kind}, self.path, strict=False)
        for key in own.left_out:
            self._lose(f"{place}.{key}")
        if own.text not in self._known:
            self._known[own.text] = self.lark.json(Enforced(own.schema, self.root.is_strict))
        return [self._known[own.text]]

    def _list(self, schema: Mapping[str, object], place: str) -> list[str]:
        """A list, whose first items may have schemas of their own; none if it must be longer than it can be."""
        self._lose_each(schema, f"{place}.", UNSAID_OF_LISTS)
        low, high = _size(schema.get("minItems"), 0), _size(schema.get("maxItems"), None)
        assert low is not None, "it has a default"
        if high is not None and low > high:
            return []
        others = schema.get("items", True)
        if not isinstance(others, bool | Mapping):
            self._lose(f"{place}.items")
            others = True
        item = _any(self.ways(others, f"{place}.items"))
        said = _list_of(schema.get("prefixItems"))
        firsts = [_any(self.ways(each, f"{place}.prefixItems.{index}")) for index, each in enumerate(said)]
        if "" in firsts:
            firsts, item = firsts[: firsts.index("")], ""
        firsts = (firsts or [item] * bool(item))[:high]
        most = None if high is None else high - len(firsts)
        if not item or most == 0:
            item = ""
            if low > len(firsts):
                return []
        between = quote(self._between)
        more = f"({between} {item}){_times(max(low - len(firsts), 0), most)}" if item else ""
        close = quote("]")
        tail = f"{more} {close}"
        for index in reversed(range(len(firsts))):
            behind = f"{between if index else ''} {firsts[index]} {tail}"
            tail = self.lark.rule(f"{behind} | {close}" if index >= low else behind)
        return [f"{quote('[')} {tail}"]

    # --- how it is spelt ----------------------------------------------------------------------------------------------

    @property
    def _marks(self) -> tuple[str, str]:
        assert self.spelling.marks is not None, "strings stand between marks"
        return self.spelling.marks

    @property
    def _between(self) -> str:
        return "," if self.spelling.is_own else ", "

    @property
    def _inner_form(self) -> MemberForm:
        """How objects inside of a value are written."""
        if self.spelling.is_python:
            any_key = "|".join(f"({text})" for text in _PYTHON_TEXTS)
            return MemberForm(repr, any_key, ", ", ": ", sorts_keys=False)
        part = rf"[^\s\x00-\x1f\x22\x27{escaped(':,[]{}' + self._marks[0][0])}]+"
        return MemberForm(
            lambda key: key if is_bare_key(key, self.spelling) else None, f"({part}( {part})*)?", ",", ":"
        )

    def _literals(self, values: Sequence[object], *, is_inner: bool) -> list[str]:
        """Alternatives for values as they are written."""
        texts = [each for each in values if isinstance(each, str)]
        others = [self._literal(each, is_inner=is_inner) for each in values if not isinstance(each, str)]
        if is_inner and not self.spelling.is_own:
            return [*self.lark.one_of(list(map(repr, texts)), ""), *others]
        opening, closing = self._marks
        return [*(f"{self.lark.tag(opening)} {way}" for way in self.lark.one_between(texts, closing)), *others]

    def _literal(self, value: object, *, is_inner: bool) -> str:
        """A value as it is written, in the lexemes of the rules for any."""
        match value:
            case str() if self.spelling.is_own or not is_inner:
                opening, closing = self._marks
                return f"{self.lark.tag(opening)} {self.lark.one_of([value], closing)[0]}"
            case list() | dict() if self._is_json("object" if isinstance(value, dict) else "array", is_inner=is_inner):
                return self.lark.json(Enforced({"const": value}, is_strict=True))
            case list():
                items = f" {quote(self._between)} ".join(self._literal(each, is_inner=True) for each in value)
                return f"{quote('[')} {items} {quote(']')}"
            case dict():
                form = self._inner_form
                members = self.spelling.in_order(value) if form.sorts_keys else value
                said = [
                    f"{self.lark.tag(form.before(form.key(key) or '', is_first=not index))} "
                    f"{self._literal(each, is_inner=True)}"
                    for index, (key, each) in enumerate(members.items())
                ]
                return f"{quote('{')} {' '.join(said)} {quote('}')}"
        return quote(repr(value) if self.spelling.is_python else self.spelling.written(value))

    def _is_told(self, value: object, place: str, *, is_inner: bool) -> bool:
        """Whether a value of an enumeration is read back as it is written; noted where it is not."""
        is_plain = value is None or isinstance(value, bool | int | float)
        is_plain |= isinstance(value, str) and self._marks[1][0] not in value
        is_told = is_plain or self.tells([value] if is_inner else value)
        if not is_told:
            self.lose(f"{place}: {value!r}, which the model's form of calls cannot write")
        return is_told

    # --- what is lost -------------------------------------------------------------------------------------------------

    def _lose_each(self, schema: Mapping[str, object], place: str, keywords: Iterable[str]) -> None:
        for keyword in keywords:
            if keyword in schema:
                self._lose(f"{place}{keyword}")

    def _lose(self, where: str) -> None:
        """Note what the rules cannot say, unless it was noted when the schema was looked at."""
        if not {where, where.rpartition(".")[2]} & set(self.root.left_out):
            self.lose(where)


def _only(schema: Mapping[str, object], keywords: Iterable[str]) -> dict[str, object]:
    return {key: schema[key] for key in keywords if key in schema}


def _list_of(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _size(value: object, default: int | None) -> int | None:
    return value if isinstance(value, int) and value >= 0 else default


def _times(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _any(ways: Sequence[str]) -> str:
    """One of these, and no text if there are none."""
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})" if ways else ""
