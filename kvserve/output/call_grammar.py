"""Writes grammar rules for tool calls: for forced calls, and for calls that a model may write in its text.

A call has the model's own form, or the JSON form, which is always read too, if the grammar of the model's form is
unknown. Arguments follow the tool's schema as far as the form can express it (`pair_grammar.py` writes those of
the forms of keys and values, `marked_grammar.py` those whose strings stand between marks).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvserve.core import CallParts, CallRow, CallSlot, PairParts, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.enforced import ANY_OBJECT, Enforced, described, enforced
from kvserve.output.formats import OutputFormat
from kvserve.output.lark import SPACES, Lark, quote
from kvserve.output.marked_grammar import MarkedGrammar, MarkedTool
from kvserve.output.pair_grammar import PairForm, PairGrammar
from kvserve.output.tool_parsers import derived, glm, hermes, qwen_coder
from kvserve.output.tool_parsers import pairs as pair_reader

_BARE = "qwen_coder_bare"
_SLOTS = {CallSlot.ID: "/[A-Za-z0-9_-]{1,64}/", CallSlot.NUMBER: "/[0-9]{1,6}/"}
_SHORT_SLOTS = {**_SLOTS, CallSlot.ID: "/[A-Za-z0-9]{9}/"}
_GLM = PairForm(
    glm.KEY_OPEN,
    (glm.KEY_CLOSE, glm.VALUE_OPEN),
    glm.VALUE_CLOSE,
    glm.CLOSE,
    ((glm.VALUE_CLOSE, glm.KEY_OPEN), (glm.VALUE_CLOSE, glm.CLOSE)),
    gap=r"\n?",
)
_CODER_BARE = PairForm(
    qwen_coder.PARAMETER_OPEN,
    (">\n",),
    f"\n{qwen_coder.PARAMETER_CLOSE}\n",
    qwen_coder.FUNCTION_CLOSE,
    tuple((qwen_coder.PARAMETER_CLOSE, tag) for tag in (qwen_coder.PARAMETER_OPEN, qwen_coder.FUNCTION_CLOSE)),
)
_CODER = replace(
    _CODER_BARE,
    end=f"{qwen_coder.FUNCTION_CLOSE}\n{qwen_coder.CLOSE}",
    ends=(_CODER_BARE.ends[0], (*_CODER_BARE.ends[1], qwen_coder.CLOSE)),
)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool, and the protocol's name of its schema."""

    spec: ToolSpec
    path: str


@dataclass(slots=True)
class CallGrammar:
    """Writes the rules of one request's calls into `lark`; `notes` name what is not enforced of a schema.

    `offered` are the names of all tools of the request: what is read as another call depends on them.
    """

    lark: Lark
    output_format: OutputFormat
    offered: frozenset[str] = frozenset()
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
        follows its schema; None if the grammar of the model's own form is unknown."""
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
        if self._has_marks:
            calls = self._marked_calls(row, tools, many=many, by_schema=True)
            return self.lark.rule(f"{self._parts(row.opening)} {calls}")
        call = self._alternatives(tools, derived.NAME, by_schema=True)
        more = f"({self._behind(row, row.between)} {call})*" if many and row.between else ""
        return self.lark.rule(f"{self._parts(row.opening)} {call} {more} {self._behind(row, row.closing)}")

    def _row_body(self, row: CallRow, tools: Sequence[OfferedTool], *, opened: str) -> str:
        """The same behind the opening tag; only strict tools' arguments follow their schema."""
        head = self._parts((str(row.opening[0]).removeprefix(opened), *row.opening[1:]))
        if self._has_marks:
            return self.lark.rule(f"{head} {self._marked_calls(row, tools, many=True, by_schema=False)}")
        call = self._alternatives(tools, derived.NAME, by_schema=False)
        more = f"({self._behind(row, row.between)} {call})*" if row.between else ""
        return self.lark.rule(f"{head} {call} {more} {self._behind(row, row.closing)}")

    @property
    def _has_marks(self) -> bool:
        """Whether the row's strings stand between marks."""
        pairs = self._row.pairs if self._row is not None else None
        return pairs is not None and pairs.spelling.marks is not None

    def _marked_calls(self, row: CallRow, tools: Sequence[OfferedTool], *, many: bool, by_schema: bool) -> str:
        """The same of such a row, from the first call's name on."""
        lost = [list[str]() for _ in tools]
        made = [
            MarkedTool(
                tool.spec, self._parameters(tool, by_schema=by_schema), tool.path, partial(self._lose, tool, left_out)
            )
            for tool, left_out in zip(tools, lost, strict=True)
        ]
        rule = MarkedGrammar(self.lark, row, self.offered).calls(made, many=many)
        for tool, left_out in zip(made, lost, strict=True):
            self._note(tool.spec, tool.parameters, left_out)
        return rule

    def _behind(self, row: CallRow, parts: CallParts) -> str:
        """What stands behind a call; one whose arguments are pairs has ended by itself."""
        if row.pairs is None:
            return self._any_of(parts)
        return self._parts(("".join(part for part in parts if isinstance(part, str))[len(row.call_end) :],))

    def _bare_calls(self, row: CallRow, tools: Sequence[OfferedTool]) -> str:
        """Calls without an opening tag, or none: an object is a call only if it names an offered tool, whatever the
        spacing of its JSON. The next call may follow a semicolon."""
        first: list[str] = []
        more: list[str] = []
        middle = "".join(part for part in row.middle if isinstance(part, str))
        for tool in tools:
            arguments = self.lark.json(self._parameters(tool, by_schema=False))
            body = self.lark.rule(f"/{SPACES}/ {arguments} /{SPACES}/ {self._any_of(row.closing)}")
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
        return not self._is_harmony and not self.output_format.has_grammar

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
            self._note(tool.spec, parameters, self._left_out)
            self._left_out.clear()
        return self.lark.rule(" | ".join(bodies))

    def _note(self, tool: ToolSpec, parameters: Enforced, left_out: Sequence[str]) -> None:
        """Note what is not enforced of a tool's schema, once."""
        notes = described(f"tool {tool.name}", [*parameters.left_out, *left_out])
        self.notes += (note for note in notes if note not in self.notes)

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
                    form_of_pairs = self._row_form(row, row.pairs)
                    return f"{quote(name)} {self._parts(row.middle)} {self._pairs(tool, parameters, form_of_pairs)}"
                return f"{quote(name)} {self._any_of(row.middle)} {lark.json(parameters)}"
            case "harmony":
                return (
                    f"{quote(f'commentary to=functions.{name} ')} {lark.tag(harmony.CONSTRAIN)} "
                    f'"json" {lark.tag(harmony.MESSAGE)} {lark.json(parameters)}'
                )
            case "glm":
                return f"{quote(name)} {self._pairs(tool, parameters, _GLM)}"
            case "qwen_coder" | "qwen_coder_bare":
                spelling = next(each.spelling for each in self.output_format.tool_forms if each.name == form)
                is_bare = form == _BARE
                pairs = self._pairs(tool, parameters, replace(_CODER_BARE if is_bare else _CODER, spelling=spelling))
                return f"{quote(f'{name}>\n' if is_bare else f'\n{qwen_coder.FUNCTION_OPEN}{name}>\n')} {pairs}"
            case "hermes":
                head = quote(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
                return f'{head} {lark.json(parameters)} "}}\\n" {lark.tag(hermes.CLOSE)}'
        raise ValueError(f"no grammar writes calls of the form {form}")

    # --- arguments as pairs -------------------------------------------------------------------------------------------

    def _row_form(self, row: CallRow, pairs: PairParts) -> PairForm:
        """The template's own."""
        return PairForm(
            pairs.opening,
            (pairs.value,),
            pairs.closing,
            row.call_end,
            pair_reader.ends_of(row),
            between=pairs.between,
            other=None if pairs.other_value is None else (pairs.other_value,),
            stops=f"<>{pairs.value[0]}{(pairs.other_value or pairs.value)[0]}",
            spelling=pairs.spelling,
        )

    def _pairs(self, tool: OfferedTool, parameters: Enforced, form: PairForm) -> str:
        """The arguments and what ends the call."""
        grammar = PairGrammar(self.lark, form, parameters, tool.path, partial(self._lose, tool, self._left_out))
        rule = grammar.arguments()
        self._left_out += grammar.left_out
        return rule

    def _lose(self, tool: OfferedTool, left_out: list[str], what: str) -> None:
        """Note that a part of a tool's schema is not enforced. Raises BadRequest for a strict tool."""
        if tool.spec.strict:
            raise BadRequest(f"{tool.path} cannot be enforced: {what}.", param=tool.path)
        left_out.append(what)
