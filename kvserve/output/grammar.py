"""Makes grammars that force an answer's promised form: forced tool calls, strict tools and JSON content.

The promise, by `tool_choice`, `strict` and `response_format`:

    none                  JSON content, or no grammar
    auto                  for text: calls of strict tools follow their schema, all else is free; no grammar without them
                          else JSON content, or calls in its place
    required, function    only calls: there is no content for `response_format` to shape

A schema that is not strict is enforced as far as possible (`enforced.py`); the notes name what is not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import Grammar, JsonObject, ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.call_grammar import CallGrammar, OfferedTool
from kvserve.output.enforced import described, enforced
from kvserve.output.formats import OutputFormat
from kvserve.output.lark import Lark

_LINE_ENDS = r"/\n{0,2}/"


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Where the model's text begins.

    `opens_thinking`: the prompt ends inside thinking, whose closing tag has the token ids `closing_ids`. `may_think`:
    the model may open thinking itself. `begun`: the beginning of the answer's content that the prompt already holds;
    None if it holds none.
    """

    opens_thinking: bool = False
    closing_ids: tuple[int, ...] = ()
    may_think: bool = False
    begun: str | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """The grammar of a request, None without a promise, and notes on what of its schemas is not enforced.

    `is_whole`: everything behind the thinking has the promised form, so thinking must leave room for it.
    """

    grammar: Grammar | None
    notes: tuple[str, ...] = ()
    is_whole: bool = False


def build_grammar(
    *,
    tools: Sequence[ToolSpec],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    response_format: ResponseFormat,
    output_format: OutputFormat,
    added_tokens: Mapping[str, int],
    start: AnswerStart,
) -> Promise:
    """The grammar of a turn. `added_tokens`: the tokenizer's added tokens and their ids.

    Raises:
        BadRequest: a strict schema is invalid or uses what cannot be enforced, or a forced tool does not exist.
    """
    lark = Lark(added_tokens)
    calls = CallGrammar(lark, output_format, frozenset(tool.name for tool in tools))
    notes: tuple[str, ...] = ()
    if tool_choice.mode in ("required", "function"):
        many = parallel_tool_calls and tool_choice.mode == "required"
        body = calls.forced(_forced_tools(tools, tool_choice), many)
        if start.begun and output_format.channels == "harmony":
            body = f'{lark.tag("<|end|>")} {lark.tag(harmony.START)} "assistant" {body}'
        begun = ""  # text before a call
    elif response_format.kind != "text":
        json, notes = _json(lark, response_format)
        body = json if start.begun else _content(lark, json, output_format)
        if tool_choice.mode == "auto" and tools and not start.begun:
            body = lark.rule(f"{body} | {calls.forced(_offered(tools), parallel_tool_calls)}")
        begun = start.begun or ""
    elif tool_choice.mode == "auto" and any(tool.strict for tool in tools):
        free = calls.in_text(_offered(tools))
        if free is None:
            return Promise(None, ("not enforced: strict tools, as the grammar of the model's calls is not known",))
        return Promise(Grammar(lark.text(free)), tuple(calls.notes))
    else:
        return Promise(None)
    grammar = _behind_thinking(lark, body, output_format, start, begun)
    return Promise(grammar, (*notes, *calls.notes), is_whole=True)


def build_raw_grammar(response_format: ResponseFormat) -> Promise:
    """The grammar of a raw prompt's continuation, without thinking, channels and calls. Raises BadRequest."""
    if response_format.kind == "text":
        return Promise(None)
    lark = Lark({})
    body, notes = _json(lark, response_format)
    return Promise(Grammar(lark.text(body)), notes)


# --- thinking before it -----------------------------------------------------------------------------------------------


def _behind_thinking(lark: Lark, body: str, output_format: OutputFormat, start: AnswerStart, begun: str) -> Grammar:
    """The grammar of a promised form behind free thinking."""
    is_harmony = output_format.channels == "harmony"
    bounds = output_format.thinking_bounds
    if start.opens_thinking and bounds is not None:
        between = f'{lark.tag(harmony.START)} "assistant"' if is_harmony else _LINE_ENDS
        if lark.has_tokens(bounds.closing):
            return Grammar(lark.text(f"{between} {body}"), start.closing_ids)
        # A tag that is no token can be written with many tokens, and the last of them may hold more than the tag.
        return Grammar(lark.text(f"{lark.text_before(bounds.closing)} {between} {body}"))
    if start.begun or not start.may_think:
        return Grammar(lark.text(body), begun=begun)
    return Grammar(lark.text(f"{_own_thinking(lark, output_format)} {body}"))


def _own_thinking(lark: Lark, output_format: OutputFormat) -> str:
    """Thinking that the model may open itself."""
    if output_format.channels == "harmony":
        opening = f'{lark.tag(harmony.CHANNEL)} "analysis" {lark.tag(harmony.MESSAGE)}'
        closing = f'{lark.text_before("<|end|>")} {lark.tag(harmony.START)} "assistant"'
        return f"({opening} {closing})?"
    tags = output_format.thinking
    if tags is None:
        return ""
    opening, thought = lark.tag(tags.opening), lark.text_before(tags.closing)
    return f"({opening} {thought} {_LINE_ENDS})?"


# --- content ----------------------------------------------------------------------------------------------------------


def _json(lark: Lark, response_format: ResponseFormat) -> tuple[str, tuple[str, ...]]:
    """A rule for the requested JSON, and notes on what of its schema is not enforced."""
    schema: JsonObject = {"type": "object"}
    if response_format.kind == "json_schema":
        schema = response_format.schema if response_format.schema is not None else {}
    held = enforced(schema, "response_format.json_schema.schema", strict=response_format.strict)
    return lark.json(held), described("response_format", held.left_out)


def _content(lark: Lark, json: str, output_format: OutputFormat) -> str:
    if output_format.channels == "harmony":
        return f'{lark.tag(harmony.CHANNEL)} "final" {lark.tag(harmony.MESSAGE)} {json}'
    return json


# --- calls ------------------------------------------------------------------------------------------------------------


def _offered(tools: Sequence[ToolSpec]) -> list[OfferedTool]:
    return [OfferedTool(tool, f"tools[{index}].function.parameters") for index, tool in enumerate(tools)]


def _forced_tools(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[OfferedTool]:
    names = choice.among if choice.mode == "required" else (choice.name,)
    wanted = [tool for tool in _offered(tools) if names is None or tool.spec.name in names]
    if not wanted:
        missing = "no tools are given" if choice.mode == "required" else f"there is no tool {choice.name!r}"
        raise BadRequest(f"tool_choice asks for a call, but {missing}.", param="tool_choice")
    return wanted
