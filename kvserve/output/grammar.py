"""Grammars that make a model answer in a promised form: forced tool calls and JSON content, in llguidance's Lark.

What is promised, by `tool_choice` and `response_format`:

    none                  JSON content, or no grammar
    auto                  no grammar for text; else JSON content, or calls in its place
    required, function    calls and nothing else: there is no content for `response_format` to shape

A forced call is written in the model's own form; where that form is a foreign one, whose grammar is not known here, in
the JSON form, which is always read too. Arguments obey the tool's schema as far as the form can say it: the bare-text
forms leave a string's inside free, except for an enumeration, and fix the order of the arguments.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from llguidance import LLMatcher

from kvserve.core import Grammar, JsonObject, ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.formats import OutputFormat
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.arguments import types_of, write_argument

MAX_CHARS_PER_TOKEN = 4
"""Bounds thinking that the grammar itself has to bound, where only characters can be counted."""

JSON_SPACE = r"[ \t\n\r]{1,20}"
"""White space inside JSON is bounded: a model that finds nothing to say fills a form with it for ever."""

# Replaces the client's own options, which could switch the checks off.
_GUIDANCE = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}

_TAG_PARTS = re.compile(r"(<[^<>]*>)")


@dataclass(frozen=True, slots=True)
class ThinkingAhead:
    """Thinking that may come before the constrained part, at most `max_num_tokens` tokens long.

    `opened`: the prompt ended inside it, so its end will come; `closing_ids` are then the token ids of the tag that
    ends it (`<|end|>` in harmony). Otherwise the model may open it itself.
    """

    opened: bool
    closing_ids: tuple[int, ...]
    max_num_tokens: int


def build_grammar(
    *,
    tools: Sequence[ToolSpec],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    response_format: ResponseFormat,
    output_format: OutputFormat,
    added_tokens: Collection[str],
    thinking: ThinkingAhead | None,
) -> Grammar | None:
    """The grammar of a request, None where nothing is promised. `added_tokens`: texts of the tokenizer's added tokens.

    Raises:
        BadRequest: a schema is invalid or uses what cannot be enforced, or a forced tool does not exist.
    """
    lark = _Lark(added_tokens)
    shapes: list[str] = []
    if tool_choice.mode in ("required", "function"):
        many = parallel_tool_calls and tool_choice.mode == "required"
        shapes.append(_calls(lark, _forced_tools(tools, tool_choice), many, output_format))
    elif response_format.kind != "text":
        shapes.append(_content(lark, response_format, output_format))
        if tool_choice.mode == "auto" and tools:
            shapes.append(_calls(lark, list(enumerate(tools)), parallel_tool_calls, output_format))
    if not shapes:
        return None
    body = lark.rule(" | ".join(shapes))
    if thinking is None:
        return Grammar(lark.text(body))
    if thinking.opened:
        between = lark.tag(harmony.START) + ' "assistant"' if output_format.channels == "harmony" else _LINE_ENDS
        return Grammar(lark.text(f"{between} {body}"), thinking.closing_ids, thinking.max_num_tokens)
    return Grammar(lark.text(f"{_own_thinking(lark, output_format, thinking.max_num_tokens)} {body}"))


_LINE_ENDS = r"/\n{0,2}/"


class _Lark:
    """Rules of a grammar as they are written, each under a name of its own."""

    def __init__(self, added_tokens: Collection[str]) -> None:
        self._added_tokens = frozenset(added_tokens)
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def is_token(self, tag: str) -> bool:
        """Whether the tokenizer has the tag as an added token: then llguidance matches its name, never its text."""
        return tag in self._added_tokens

    def tag(self, tag: str) -> str:
        """The tag: its parts that are added tokens by name, the rest as text."""
        parts = [part for part in _TAG_PARTS.split(tag) if part]
        runs = groupby(parts, key=self.is_token)
        return " ".join(part for token, run in runs for part in (run if token else [quote("".join(run))]))

    def json(self, schema: JsonObject) -> str:
        """A rule for a JSON value that obeys `schema`."""
        return self.rule("%json " + json.dumps({**schema, **_GUIDANCE}))

    def text_before(self, tag: str, max_chars: int | None = None) -> str:
        """Free text and then `tag`."""
        free = "(?s:.*)" if max_chars is None else f"(?s:.{{0,{max_chars}}})"
        tokens = [part for part in _TAG_PARTS.split(tag) if self.is_token(part)]
        if not tokens:
            return self.rule(f"/{free}/", f"[suffix={quote(tag)}]")
        # Text of the tag before its first token belongs to the same lexeme: lexemes are greedy and end at tokens only.
        head = tag[: tag.index(tokens[0])]
        escaped = "".join(rf"\x{{{ord(char):x}}}" for char in head)
        return f"/{free}{escaped}/ {self.tag(tag.removeprefix(head))}"


def quote(text: str) -> str:
    """A Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _own_thinking(lark: _Lark, output_format: OutputFormat, max_num_tokens: int) -> str:
    max_chars = max_num_tokens * MAX_CHARS_PER_TOKEN
    if output_format.channels == "harmony":
        opening = f'{lark.tag(harmony.CHANNEL)} "analysis" {lark.tag(harmony.MESSAGE)}'
        closing = f'{lark.text_before("<|end|>", max_chars)} {lark.tag(harmony.START)} "assistant"'
        return f"({opening} {closing})?"
    tags = output_format.thinking
    if tags is None:
        return ""
    opening, thought = lark.tag(tags.opening), lark.text_before(tags.closing, max_chars)
    return f"({opening} {thought} {_LINE_ENDS})?"


# --- content ----------------------------------------------------------------------------------------------------------


def _content(lark: _Lark, response_format: ResponseFormat, output_format: OutputFormat) -> str:
    if response_format.kind == "json_object":
        schema: JsonObject = {"type": "object"}
    else:
        schema = response_format.schema if response_format.schema is not None else {}
        check_schema(schema, "response_format.json_schema.schema")
    body = lark.json(schema)
    if output_format.channels == "harmony":
        body = f'{lark.tag(harmony.CHANNEL)} "final" {lark.tag(harmony.MESSAGE)} {body}'
    return body


def check_schema(schema: object, field: str) -> None:
    """Raises BadRequest naming `field` if llguidance cannot enforce `schema`."""
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{field} must be a JSON schema: an object.", param=field)
    complaint = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({**schema, **_GUIDANCE})))
    if complaint and not complaint.startswith("WARNING"):
        raise BadRequest(f"{field} cannot be enforced: {complaint.strip()}", param=field)


# --- calls ------------------------------------------------------------------------------------------------------------


def _forced_tools(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[tuple[int, ToolSpec]]:
    names = choice.among if choice.mode == "required" else (choice.name,)
    wanted = [(index, tool) for index, tool in enumerate(tools) if names is None or tool.name in names]
    if not wanted:
        missing = "no tools are given" if choice.mode == "required" else f"there is no tool {choice.name!r}"
        raise BadRequest(f"tool_choice asks for a call, but {missing}.", param="tool_choice")
    return wanted


def _calls(lark: _Lark, tools: Sequence[tuple[int, ToolSpec]], many: bool, output_format: OutputFormat) -> str:
    calls: list[str] = []
    for index, tool in tools:
        field = f"tools[{index}].function.parameters"
        parameters = {"type": "object", **tool.parameters}
        check_schema(parameters, field)
        calls.append(lark.rule(_call(lark, tool.name, parameters, output_format, field)))
    call = lark.rule(" | ".join(calls))
    harmonic = output_format.channels == "harmony"
    return lark.rule(f'{call} ("\\n" {call})*') if many and not harmonic else call


def _call(lark: _Lark, name: str, parameters: JsonObject, output_format: OutputFormat, field: str) -> str:
    if output_format.channels == "harmony":
        return (
            f"{lark.tag(harmony.CHANNEL)} {quote(f'commentary to=functions.{name} ')} "
            f'{lark.tag(harmony.CONSTRAIN)} "json" {lark.tag(harmony.MESSAGE)} {lark.json(parameters)}'
        )
    form = output_format.tool_forms[0].name
    if form == "glm":
        pairs = _glm_pairs(lark, parameters, field)
        return f"{lark.tag(glm.OPEN)} {quote(name)} {pairs} /\\n?/ {lark.tag(glm.CLOSE)}"
    if form == "qwen_coder":
        pairs = _qwen_pairs(lark, parameters, field)
        return (
            f"{lark.tag(qwen_coder.OPEN)} {quote(f'\n{qwen_coder.FUNCTION_OPEN}{name}>\n')} {pairs} "
            f"{quote(f'{qwen_coder.FUNCTION_CLOSE}\n')} {lark.tag(qwen_coder.CLOSE)}"
        )
    head = quote(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
    return f'{lark.tag(hermes.OPEN)} {head} {lark.json(parameters)} "}}\\n" {lark.tag(hermes.CLOSE)}'


def _glm_pairs(lark: _Lark, parameters: JsonObject, field: str) -> str:
    def pair(key: str, value: str) -> str:
        return (
            rf"/\n?/ {lark.tag(glm.KEY_OPEN)} {key} {lark.tag(glm.KEY_CLOSE)} /\n?/ {lark.tag(glm.VALUE_OPEN)} {value}"
        )

    return _pairs(lark, parameters, field, pair, closing=glm.VALUE_CLOSE)


def _qwen_pairs(lark: _Lark, parameters: JsonObject, field: str) -> str:
    def pair(key: str, value: str) -> str:
        return f'"{qwen_coder.PARAMETER_OPEN}" {key} ">\\n" {value} "\\n"'

    return _pairs(lark, parameters, field, pair, closing=f"\n{qwen_coder.PARAMETER_CLOSE}")


def _pairs(lark: _Lark, parameters: JsonObject, field: str, pair: Callable[[str, str], str], *, closing: str) -> str:
    """The arguments in the order of the schema; where it names none, any."""
    properties = parameters.get("properties")
    schemas = dict(properties) if isinstance(properties, Mapping) else {}
    required = _strings(parameters.get("required"))
    schemas = {**schemas, **{key: {} for key in required if key not in schemas}}
    if not schemas and parameters.get("additionalProperties") is not False:
        return f"({pair(r'/[^<>\r\n]+/', lark.text_before(closing))})*"
    written: list[str] = []
    for key, schema in schemas.items():
        if not key or set(key) & set("<>\r\n"):
            raise BadRequest(f"{field}: the model's form of calls cannot write the key {key!r}.", param=field)
        one = pair(quote(key), _value(lark, schema, parameters, field, closing))
        written.append(one if key in required else f"({one})?")
    return " ".join(written)


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _value(lark: _Lark, schema: object, root: JsonObject, field: str, closing: str) -> str:
    """One argument's value and its closing tag."""
    own = schema if isinstance(schema, Mapping) else {}
    match (own.get("enum"), "const" in own):
        case ([_, *_] as choices, _):
            return f"({' | '.join(quote(write_argument(choice)) for choice in choices)}) {lark.tag(closing)}"
        case (_, True):
            return f"{quote(write_argument(own['const']))} {lark.tag(closing)}"
    if "string" in types_of(own, root):
        return lark.text_before(closing)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    check_schema({**shared, **own}, field)
    return f"{lark.json({**shared, **own})} {lark.tag(closing)}"
