"""Writes grammar rules for tool calls: for forced calls, and for calls that a model may write in its text.

A call has the model's own form, or the JSON form, which is always read too, if the model's form is foreign and its
grammar unknown. Arguments follow the tool's schema as far as the form can express it: the bare-text forms fix the order
of the arguments and leave strings free, except enumerations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvserve.core import JSON_SPELLING, CallParts, CallRow, CallSlot, PairParts, Spelling, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.enforced import ANY_OBJECT, Enforced, allows_any_text, described, enforced
from kvserve.output.formats import OutputFormat
from kvserve.output.lark import Lark, escaped, quote
from kvserve.output.tool_parsers import derived, glm, hermes, qwen_coder
from kvserve.output.tool_parsers.arguments import JSON_TYPES, STRING, type_names, types_of, write_argument

ANY_VALUE = Enforced({"type": sorted(JSON_TYPES - STRING)}, is_strict=True)
"""Whatever is no string."""
_ONLY_TYPES = frozenset(("type", "title", "description", "default", "examples"))
"""Keywords of a schema that allows or forbids true, false and null by its type alone."""
_BARE = "qwen_coder_bare"
_SPACES = r"[ \t\r\n]*"
_SLOTS = {CallSlot.ID: "/[A-Za-z0-9_-]{1,64}/", CallSlot.NUMBER: "/[0-9]{1,6}/"}
_SHORT_SLOTS = {**_SLOTS, CallSlot.ID: "/[A-Za-z0-9]{9}/"}


type Pair = Callable[[str, str], str]
"""Writes a key and the rule of its value, which ends with what closes the argument."""


@dataclass(frozen=True, slots=True)
class PairForm:
    """How a form writes one argument, with `between` two of them; a key holds none of the characters in `stops`.
    `other` writes what is no string, where the form tells them apart; `spelling` is that of such values."""

    pair: Pair
    closing: str
    between: str = ""
    stops: str = "<>"
    other: Pair | None = None
    spelling: Spelling = JSON_SPELLING

    @property
    def tells_strings(self) -> bool:
        """Whether an argument says if its value is a string."""
        return self.other is not None

    def written(self, key: str, strings: Sequence[str], others: Sequence[str]) -> str:
        """The argument with one of these values."""
        if self.other is None:
            return self.pair(key, _any(*strings, *others))
        pairs = [write(key, _any(*each)) for write, each in ((self.pair, strings), (self.other, others)) if each]
        return _any(*pairs)


def _any(*alternatives: str) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool, and the protocol's name of its schema."""

    spec: ToolSpec
    path: str


@dataclass(slots=True)
class CallGrammar:
    """Writes the rules of one request's calls into `lark`; `notes` name what is not enforced of a schema."""

    lark: Lark
    output_format: OutputFormat
    notes: list[str] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)

    # --- calls and nothing else ---------------------------------------------------------------------------------------

    def forced(self, tools: Sequence[OfferedTool], many: bool) -> str:
        """A rule for a call of one of the tools, or for several in a row."""
        if (row := self._row) is not None and self._own_form == derived.NAME:
            return self._row_calls(row, tools, many)
        bodies = self._alternatives(tools, self._own_form, by_schema=True)
        if self._is_harmony:
            return self.lark.rule(f"{self.lark.tag(harmony.CHANNEL)} {bodies}")
        call = self.lark.rule(f"{self.lark.tag(hermes.OPEN)} {bodies}")
        return self.lark.rule(f'{call} ("\\n" {call})*') if many else call

    # --- calls in free text -------------------------------------------------------------------------------------------

    def in_text(self, tools: Sequence[OfferedTool]) -> str | None:
        """The start of a grammar for free text in which every call names an offered tool and a strict tool's call
        follows its schema; None if the model's own call form is foreign."""
        if self._is_foreign:
            return None
        row = self._row
        form = self._own_form if self._own_form != derived.NAME else "hermes"
        bodies = {hermes.OPEN: self._alternatives(tools, form, by_schema=False)}
        first = ""
        if row is not None and not derived.is_bare(row):
            tag = derived.form_of(row).open_tag
            bodies[tag] = self._row_body(row, tools, opened=tag)
        elif row is not None:
            first = self._bare_calls(row, tools)
            if any(form.open_tag == derived.PYTHON_TAG for form in self.output_format.tool_forms):
                bodies[derived.PYTHON_TAG] = first
        if any(form.name == _BARE for form in self.output_format.tool_forms):
            bodies[qwen_coder.FUNCTION_OPEN] = self._alternatives(tools, _BARE, by_schema=False)
        if self._is_harmony:
            bodies[hermes.OPEN] = self._alternatives(tools, "hermes", by_schema=False)
            return self._in_channels(tools, bodies)
        calls = [f"{self.lark.openings(tag)} {body}" for tag, body in bodies.items()]
        return f"{first} ({' | '.join([*self.lark.free(bodies), *calls])})*"

    def _in_channels(self, tools: Sequence[OfferedTool], bodies: Mapping[str, str]) -> str:
        """The same for harmony's messages, where a call's message ends with its arguments."""
        lark = self.lark
        late = self._alternatives(tools, "harmony", by_schema=False)
        early = lark.rule(" | ".join(self._early(tool) for tool in tools))
        channel, start = lark.openings(harmony.CHANNEL), lark.openings(harmony.START)
        form = f'(" "? {lark.tag(harmony.CONSTRAIN)} "json" | " json")?'
        plain = lark.rule(f'("analysis" | "commentary" | "final") {form} {lark.tag(harmony.MESSAGE)}')
        to, first = quote(harmony.RECIPIENT), lark.openings(harmony.RECIPIENT, at_start=True)
        reopened = f'{start} "assistant"'
        call = lark.rule(f"{channel} {late} | {reopened} {to} {early}")
        opened = lark.rule(f"{channel} {plain} | {reopened} {lark.tag(harmony.CHANNEL)} {plain}")
        again = lark.rule(f"{reopened} {lark.tag(harmony.CHANNEL)} {late}")
        free = lark.free((*bodies, harmony.CHANNEL, harmony.START))
        others = [f"{lark.openings(tag)} {body}" for tag, body in bodies.items()]
        end = lark.tag("<|end|>")
        items = " | ".join([*free, *others, opened, f"({call} | {again}) {end}"])
        return f"({first} {early} {end})? ({items})* ({call} | {again})? | {first} {early}"

    def _early(self, tool: OfferedTool) -> str:
        lark = self.lark
        form = f'" " {lark.tag(harmony.CONSTRAIN)}? "json"'
        header = f'{quote(f"functions.{tool.spec.name}")} {lark.tag(harmony.CHANNEL)} "commentary" {form}'
        return lark.rule(f"{header} {lark.tag(harmony.MESSAGE)} {lark.json(self._parameters(tool, by_schema=False))}")

    # --- calls as the template writes them ----------------------------------------------------------------------------

    @property
    def _row(self) -> CallRow | None:
        return None if self._is_harmony else self.output_format.row

    def _row_calls(self, row: CallRow, tools: Sequence[OfferedTool], many: bool) -> str:
        """A rule for a message's calls, from their opening to their closing text."""
        call = self._alternatives(tools, derived.NAME, by_schema=True)
        more = f"({self._any_of(row.between)} {call})*" if many and row.between else ""
        return self.lark.rule(f"{self._parts(row.opening)} {call} {more} {self._any_of(row.closing)}")

    def _row_body(self, row: CallRow, tools: Sequence[OfferedTool], *, opened: str) -> str:
        """The same behind the opening tag; only strict tools' arguments follow their schema."""
        call = self._alternatives(tools, derived.NAME, by_schema=False)
        more = f"({self._any_of(row.between)} {call})*" if row.between else ""
        head = self._parts((str(row.opening[0]).removeprefix(opened), *row.opening[1:]))
        return self.lark.rule(f"{head} {call} {more} {self._any_of(row.closing)}")

    def _bare_calls(self, row: CallRow, tools: Sequence[OfferedTool]) -> str:
        """Calls without an opening tag, or none: an object is a call only if it names an offered tool, whatever the
        spacing of its JSON. The next call may follow a semicolon."""
        first: list[str] = []
        more: list[str] = []
        middle = "".join(part for part in row.middle if isinstance(part, str))
        for tool in tools:
            arguments = self.lark.json(self._parameters(tool, by_schema=False))
            body = self.lark.rule(f"/{_SPACES}/ {arguments} /{_SPACES}/ {self._any_of(row.closing)}")
            for opening in derived.bare_openings(row):
                head = f"{opening}{tool.spec.name}{middle}"
                first.append(f"{self.lark.spaced_opening(head)} {body}")
                more.append(f"{self.lark.spaced_opening(head, separator=';')} {body}")
        return f"({self.lark.rule(' | '.join(first))} {self.lark.rule(' | '.join(more))}*)?"

    def _parts(self, parts: CallParts) -> str:
        slots = _SHORT_SLOTS if self._row is not None and self._row.has_short_ids else _SLOTS
        return " ".join(self.lark.tag(part) if isinstance(part, str) else slots[part] for part in parts if part)

    def _any_of(self, parts: CallParts) -> str:
        return f"({' | '.join(self._parts(variant) for variant in derived.variants(parts))})" if parts else ""

    # --- one call -----------------------------------------------------------------------------------------------------

    @property
    def _is_harmony(self) -> bool:
        return self.output_format.channels == "harmony"

    @property
    def _is_foreign(self) -> bool:
        return not self._is_harmony and self.output_format.tool_forms[0].name == "foreign"

    @property
    def _own_form(self) -> str:
        if self._is_harmony:
            return "harmony"
        return "hermes" if self._is_foreign else self.output_format.tool_forms[0].name

    def _alternatives(self, tools: Sequence[OfferedTool], form: str, *, by_schema: bool) -> str:
        """A rule for the text behind the opening tag of a call of one of the tools. Without `by_schema` only strict
        tools' arguments follow their schema."""
        bodies: list[str] = []
        for tool in tools:
            parameters = self._parameters(tool, by_schema=by_schema)
            bodies.append(self.lark.rule(self._body(tool, parameters, form)))
            self.notes += described(f"tool {tool.spec.name}", [*parameters.left_out, *self._left_out])
            self._left_out.clear()
        self.notes[:] = dict.fromkeys(self.notes)
        return self.lark.rule(" | ".join(bodies))

    def _parameters(self, tool: OfferedTool, *, by_schema: bool) -> Enforced:
        if not (by_schema or tool.spec.strict):
            return ANY_OBJECT
        return enforced({"type": "object", **tool.spec.parameters}, tool.path, strict=bool(tool.spec.strict))

    def _body(self, tool: OfferedTool, parameters: Enforced, form: str) -> str:
        lark, name = self.lark, tool.spec.name
        match form:
            case derived.NAME:
                row = self._row
                assert row is not None, "this form has a row"
                if row.pairs is not None:
                    return f"{quote(name)} {self._parts(row.middle)} {self._row_pairs(tool, parameters, row.pairs)}"
                return f"{quote(name)} {self._any_of(row.middle)} {lark.json(parameters)}"
            case "harmony":
                return (
                    f"{quote(f'commentary to=functions.{name} ')} {lark.tag(harmony.CONSTRAIN)} "
                    f'"json" {lark.tag(harmony.MESSAGE)} {lark.json(parameters)}'
                )
            case "glm":
                pairs = self._pairs(tool, parameters, PairForm(_glm_pair(lark), glm.VALUE_CLOSE))
                return f"{quote(name)} {pairs} /\\n?/ {lark.tag(glm.CLOSE)}"
            case "qwen_coder" | "qwen_coder_bare":
                closing = f"\n{qwen_coder.PARAMETER_CLOSE}"
                spelling = next(each.spelling for each in self.output_format.tool_forms if each.name == form)
                pairs = self._pairs(tool, parameters, PairForm(_qwen_pair, closing, spelling=spelling))
                if form == _BARE:
                    return f"{quote(f'{name}>\n')} {pairs} {quote(qwen_coder.FUNCTION_CLOSE)}"
                return (
                    f"{quote(f'\n{qwen_coder.FUNCTION_OPEN}{name}>\n')} {pairs} "
                    f"{quote(f'{qwen_coder.FUNCTION_CLOSE}\n')} {lark.tag(qwen_coder.CLOSE)}"
                )
            case "hermes":
                head = quote(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
                return f'{head} {lark.json(parameters)} "}}\\n" {lark.tag(hermes.CLOSE)}'
        raise ValueError(f"no grammar writes calls of the form {form}")

    # --- arguments as pairs -------------------------------------------------------------------------------------------

    def _row_pairs(self, tool: OfferedTool, parameters: Enforced, pairs: PairParts) -> str:
        """The arguments as the template writes them."""

        def pair(lead: str) -> Pair:
            before, behind = self._parts((pairs.opening,)), self.lark.tag(lead)
            return lambda key, value: f"{before} {key} {behind} {value}"

        other = None if pairs.other_value is None else pair(pairs.other_value)
        stops = f"<>{pairs.value[0]}{(pairs.other_value or pairs.value)[0]}"
        form = PairForm(pair(pairs.value), pairs.closing, pairs.between, stops, other, pairs.spelling)
        return self._pairs(tool, parameters, form)

    def _pairs(self, tool: OfferedTool, parameters: Enforced, form: PairForm) -> str:
        """The arguments in the schema's order; any arguments if the schema names none."""
        schema = parameters.schema
        properties = schema.get("properties")
        schemas = dict(properties) if isinstance(properties, Mapping) else {}
        required = _strings(schema.get("required"))
        schemas = {**schemas, **{key: {} for key in required if key not in schemas}}
        if not schemas and schema.get("additionalProperties") is not False:
            one = self._any_pair(form)
            return f"({one} ({self.lark.tag(form.between)} {one})*)?" if form.between else f"({one})*"
        written: list[tuple[str, bool]] = []
        for key, own in schemas.items():
            if own is False:
                continue
            if not key or set(key) & {*form.stops, *"\r\n"}:
                self._lose(tool, f"the key {key!r}, which the model's form of calls cannot write")
                continue
            written.append((self._pair(tool, key, own, parameters, form), key in required))
        return self._in_order(written, form)

    def _in_order(self, written: Sequence[tuple[str, bool]], form: PairForm) -> str:
        """These arguments, each with whether it is required, with what stands between two of them."""
        if not form.between:
            return " ".join(one if is_required else f"({one})?" for one, is_required in written)
        first, later = '""', ""
        for one, is_required in reversed(written):
            own, behind = self.lark.rule(one), f"{self.lark.tag(form.between)} "
            first = self.lark.rule(f"{own} {later}" if is_required else f"{own} {later} | {first}")
            later = f"{behind}{own} {later}" if is_required else f"({behind}{own})? {later}"
        return first

    def _any_pair(self, form: PairForm) -> str:
        """Any argument with any value."""
        key = f"/[^{''.join(map(escaped, form.stops))}\\r\\n]+/"
        values = [self.lark.text_before(form.closing)]
        return form.written(key, values, [self._other(ANY_VALUE, form)] if form.tells_strings else [])

    def _other(self, value: Enforced, form: PairForm) -> str:
        return f"{self.lark.json(value)} {self.lark.tag(form.closing)}"

    def _pair(self, tool: OfferedTool, key: str, schema: object, parameters: Enforced, form: PairForm) -> str:
        """One argument with its value and closing tag."""
        own, root = schema if isinstance(schema, Mapping) else {}, parameters.schema
        match (own.get("enum"), "const" in own):
            case ([_, *_] as choices, _):
                return self._one_of(key, choices, form)
            case (_, True):
                return self._one_of(key, [own["const"]], form)
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        types = types_of(own, root)
        others = types - STRING if form.tells_strings else types
        texts: list[str] = []
        value = enforced({**shared, **own}, tool.path, strict=bool(tool.spec.strict))
        if "string" in types:
            if not allows_any_text(value):
                self._lose(tool, f"properties.{key}, as the model's form of calls leaves a text's inside free")
            texts = [self.lark.text_before(form.closing)]
            if not (form.tells_strings and others):
                return form.written(quote(key), texts, [])
            value = enforced({**shared, **own, "type": sorted(others)}, tool.path, strict=bool(tool.spec.strict))
        words = self._words(own, others, form)
        rest = others - {"boolean", "null"} if words else others
        if words and rest:
            value = enforced({**shared, **own, "type": sorted(rest)}, tool.path, strict=bool(tool.spec.strict))
        new = (place for place in value.left_out if place not in parameters.left_out)
        self._left_out += (f"properties.{key}.{place}" for place in new)
        return form.written(quote(key), texts, [*words, *([self._other(value, form)] if rest else [])])

    def _words(self, schema: Mapping[str, object], types: frozenset[str], form: PairForm) -> list[str]:
        """The form's own words for true, false and null, where these are no JSON and a type alone says that they are
        allowed; none where the schema says more, which is enforced as JSON."""
        if form.spelling == JSON_SPELLING or not schema.keys() <= _ONLY_TYPES:
            return []
        words = (form.spelling.written(value) for value in (True, False, None) if type_names(value) & types)
        return [f"{quote(word)} {self.lark.tag(form.closing)}" for word in words]

    def _one_of(self, key: str, choices: Sequence[object], form: PairForm) -> str:
        written: dict[bool, list[str]] = {True: [], False: []}
        for choice in choices:
            value = f"{quote(write_argument(choice, form.spelling))} {self.lark.tag(form.closing)}"
            written[isinstance(choice, str)].append(value)
        return form.written(quote(key), written[True], written[False])

    def _lose(self, tool: OfferedTool, what: str) -> None:
        """Note that a part of a tool's schema is not enforced. Raises BadRequest for a strict tool."""
        if tool.spec.strict:
            raise BadRequest(f"{tool.path} cannot be enforced: {what}.", param=tool.path)
        self._left_out.append(what)


def _glm_pair(lark: Lark) -> Callable[[str, str], str]:
    def pair(key: str, value: str) -> str:
        opening = rf"/\n?/ {lark.tag(glm.KEY_OPEN)} {key} {lark.tag(glm.KEY_CLOSE)}"
        return rf"{opening} /\n?/ {lark.tag(glm.VALUE_OPEN)} {value}"

    return pair


def _qwen_pair(key: str, value: str) -> str:
    return f'"{qwen_coder.PARAMETER_OPEN}" {key} ">\\n" {value} "\\n"'


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
