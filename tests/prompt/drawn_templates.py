"""Chat templates that nobody wrote, as families write theirs: who speaks is marked, turns end, and thinking, tools,
calls and results have forms of their own.

It knows Jinja and the parts that real templates have (shared/templates), nothing that reads them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

type TokenKind = Literal["special", "added", "text"]

ROLES = ("system", "user", "assistant", "tool")
CALL_NAME, CALL_ID, CALL_ARGUMENTS = "{{- c.name -}}", "{{- call.id -}}", "{{- c.arguments | tojson -}}"


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before and behind the text of a role's message."""

    before: str
    behind: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """`shown`: of which answers history keeps the thinking. `opens`: the prompt opens it. `fills`: history has an empty
    block where nothing was thought. `splits`: thinking is also cut out of the text. `inner` stands behind the opening
    tag and before the closing one, `behind` behind that."""

    opening: str
    closing: str
    inner: str = "\n"
    behind: str = "\n\n"
    shown: Literal["always", "after a question", "last", "never"] = "always"
    opens: bool = False
    has_switch: bool = False
    fills: bool = False
    splits: bool = False
    field: str = "reasoning_content"

    @property
    def head(self) -> str:
        return self.opening + self.inner

    @property
    def tail(self) -> str:
        return self.inner + self.closing + self.behind


@dataclass(frozen=True, slots=True)
class Tools:
    """How tools are described, in the system message, or before the text of the first or the last question."""

    place: Literal["system", "first question", "last question"]
    form: Literal["lines", "list", "functions"]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Calls:
    """`each` is the template's source of one call. `single`: a message holds one. `is_bare`: no tag
    opens one. `gap` stands between a text and the
    calls, `between` between two of these; `drops_words`: a text beside calls is not written."""

    opening: str
    each: str
    between: str
    closing: str
    gap: str = ""
    single: bool = False
    is_bare: bool = False
    drops_words: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """`grouped`: neighbours stand in one message. `named`: with the name of the tool or the id of the call."""

    opening: str = ""
    closing: str = ""
    grouped: bool = False
    named: Literal["", "name", "id"] = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One template, and what its tokenizer knows: `tokens` with their kinds, `merged` texts that its vocabulary joins
    to one token, `joins_words`: also across the borders of words."""

    system: Frame
    user: Frame
    assistant: Frame
    tool: Frame
    stops: tuple[str, ...]
    tokens: tuple[tuple[str, TokenKind], ...]
    bos: str = ""
    names_bos: bool = False
    system_style: Literal["own", "first", "merged", "refused", "bare"] = "own"
    default_system: str = ""
    trims: bool = False
    alternates: bool = False
    thinking: Thinking | None = None
    tools: Tools | None = None
    calls: Calls | None = None
    results: Results = Results()
    merged: tuple[str, ...] = ()
    joins_words: bool = False

    @property
    def source(self) -> str:
        return "".join(_source(self))


# --- the source -------------------------------------------------------------------------------------------------------


def said(text: str) -> str:
    """The source that writes this text."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " -}}" if text else ""


def _source(drawn: Drawn) -> Iterator[str]:
    text = "m.content | trim" if drawn.trims else "m.content"
    yield "{%- set ns = namespace(last=-1, first=-1, turns=0) -%}{%- set said = messages -%}{%- set told = '' -%}"
    if drawn.system_style != "refused":
        yield "{%- if messages[0].role == 'system' -%}{%- set told = messages[0].content -%}"
        yield "{%- set said = messages[1:] -%}{%- endif -%}"
    yield "{%- for m in said -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    yield "{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}{%- endif -%}{%- endfor -%}"
    if drawn.alternates:
        yield "{%- for m in said -%}{%- if m.role != 'tool' and not m.tool_calls -%}"
        yield "{%- if (m.role == 'user') != (ns.turns % 2 == 0) -%}{{- raise_exception('alternate') -}}{%- endif -%}"
        yield "{%- set ns.turns = ns.turns + 1 -%}{%- endif -%}{%- endfor -%}"
    yield "{{- bos_token -}}" if drawn.bos and drawn.names_bos else said(drawn.bos)
    yield from _front(drawn)
    yield "{%- for m in said -%}{%- if m.role == 'user' -%}"
    yield said(drawn.user.before)
    if drawn.system_style == "merged":
        yield f"{{%- if told and loop.index0 == ns.first -%}}{{{{- told -}}}}{said('\n\n')}{{%- endif -%}}"
    if drawn.tools is not None and drawn.tools.place != "system":
        place = "first" if drawn.tools.place == "first question" else "last"
        yield f"{{%- if tools and loop.index0 == ns.{place} -%}}{_tools(drawn.tools)}{said('\n\n')}{{%- endif -%}}"
    yield f"{{{{- {text} -}}}}{said(drawn.user.behind)}{{%- elif m.role == 'assistant' -%}}"
    yield from _assistant(drawn, text)
    yield "{%- elif m.role == 'tool' -%}"
    yield from _result(drawn, text)
    yield "{%- elif m.role == 'system' -%}"
    if drawn.system_style == "own":
        yield f"{said(drawn.system.before)}{{{{- {text} -}}}}{said(drawn.system.behind)}"
    else:
        yield "{{- raise_exception('no system message here') -}}"
    yield "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
    yield said(drawn.assistant.before)
    if drawn.thinking is not None:
        yield from _tail(drawn.thinking)
    yield "{%- endif -%}"


def _front(drawn: Drawn) -> Iterator[str]:
    """The system's text and the tools, before all messages."""
    if drawn.system_style in ("merged", "refused"):
        return
    text = "(told | trim)" if drawn.trims else "told"
    if drawn.default_system:
        yield f"{{%- if not told -%}}{{%- set told = {json.dumps(drawn.default_system)} -%}}{{%- endif -%}}"
    has_tools = drawn.tools is not None and drawn.tools.place == "system"
    yield "{%- if told or tools -%}" if has_tools else "{%- if told -%}"
    frame = Frame("", "") if drawn.system_style == "bare" else drawn.system
    yield f"{said(frame.before)}{{{{- {text} -}}}}"
    if has_tools:
        assert drawn.tools is not None
        yield "{%- if tools -%}{%- if told -%}" + said("\n\n") + "{%- endif -%}"
        yield _tools(drawn.tools) + "{%- endif -%}"
    yield said(frame.behind) + "{%- endif -%}"


def _tools(tools: Tools) -> str:
    each = "tool.function" if tools.form == "functions" else "tool"
    lines = f"{{%- for tool in tools -%}}{said('\n')}{{{{- {each} | tojson -}}}}{{%- endfor -%}}"
    body = "{{- tools | tojson -}}" if tools.form == "list" else lines + said("\n")
    return said(tools.opening) + body + said(tools.closing)


def _assistant(drawn: Drawn, text: str) -> Iterator[str]:
    yield f"{{%- set content = {text} -%}}"
    if drawn.thinking is not None:
        yield from _thought(drawn.thinking)
    yield said(drawn.assistant.before)
    if drawn.thinking is not None:
        yield _block(drawn.thinking)
    if drawn.calls is not None and drawn.calls.drops_words:
        yield "{%- if m.tool_calls -%}{%- set content = '' -%}{%- endif -%}"
    yield "{{- content -}}"
    if drawn.calls is not None:
        yield "{%- if m.tool_calls -%}"
        if drawn.calls.single:
            yield "{%- if m.tool_calls | length > 1 -%}{{- raise_exception('one call') -}}{%- endif -%}"
        if drawn.calls.gap:
            yield f"{{%- if content -%}}{said(drawn.calls.gap)}{{%- endif -%}}"
        yield said(drawn.calls.opening) + "{%- for call in m.tool_calls -%}{%- set c = call.function -%}"
        yield drawn.calls.each
        yield f"{{%- if not loop.last -%}}{said(drawn.calls.between)}{{%- endif -%}}" if drawn.calls.between else ""
        yield "{%- endfor -%}" + said(drawn.calls.closing) + "{%- endif -%}"
    yield said(drawn.assistant.behind)


def _thought(thinking: Thinking) -> Iterator[str]:
    """What was thought: a field, or the beginning of the text."""
    if thinking.shown == "never":
        yield "{%- set thought = '' -%}"
    else:
        yield f"{{%- set thought = m.{thinking.field} if m.{thinking.field} is string else '' -%}}"
    if thinking.splits:
        opening, closing = (json.dumps(tag, ensure_ascii=False) for tag in (thinking.opening, thinking.closing))
        yield f"{{%- if m.{thinking.field} is not string and {closing} in content -%}}"
        yield f"{{%- set thought = content.split({closing})[0].split({opening})[-1].strip('\\n') -%}}"
        yield f"{{%- set content = content.split({closing})[-1].lstrip('\\n') -%}}{{%- endif -%}}"


def _block(thinking: Thinking) -> str:
    if thinking.shown == "never":
        return ""
    shown = {"always": "true", "after a question": "loop.index0 > ns.last", "last": "loop.last"}[thinking.shown]
    block = said(thinking.head) + "{{- thought -}}" + said(thinking.tail)
    return f"{{%- if {shown}{'' if thinking.fills else ' and thought'} -%}}{block}{{%- endif -%}}"


def _tail(thinking: Thinking) -> Iterator[str]:
    """Behind the header of the answer that is asked for."""
    opened = said(thinking.head) if thinking.opens else ""
    if not thinking.has_switch:
        yield opened
        return
    yield "{%- if enable_thinking is defined and not enable_thinking -%}"
    yield said(thinking.head + thinking.tail) + "{%- else -%}" + opened + "{%- endif -%}"


def _result(drawn: Drawn, text: str) -> Iterator[str]:
    results = drawn.results
    named = {"": "", "name": "{{- m.name -}}" + said(": "), "id": "{{- m.tool_call_id -}}" + said(": ")}[results.named]
    before, behind = said(drawn.tool.before), said(drawn.tool.behind)
    if results.grouped:
        before = f"{{%- if loop.first or said[loop.index0 - 1].role != 'tool' -%}}{before}{{%- endif -%}}"
        behind = f"{{%- if loop.last or said[loop.index0 + 1].role != 'tool' -%}}{behind}{{%- endif -%}}"
    yield f"{before}{said(results.opening)}{named}{{{{- {text} -}}}}{said(results.closing)}{behind}"
