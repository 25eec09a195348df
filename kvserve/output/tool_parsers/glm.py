"""GLM's form: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`.

White space between the tags is ignored; a string value is exact. A value ends at the first `</arg_value>` that
a whole key with its tags (`<arg_key>k</arg_key><arg_value>`) or `</tool_call>` follows (white space aside), so a string
value must not contain that sequence. Without arguments the name must be a given tool's; any other word between the tags
is prose.
"""

from collections.abc import Sequence

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.arguments import TypedArguments, write_argument
from kvserve.output.tool_parsers.chains import NextKey
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import (
    CallForm,
    NotACall,
    ParsedCall,
    Reader,
    Scan,
    one_of,
    parse_text,
    skip_space,
    text_until,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"
_MORE = NextKey((VALUE_CLOSE, KEY_OPEN), ((KEY_CLOSE, VALUE_OPEN),))


def scan(tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
    """Reads what follows `<tool_call>`."""
    name, char = yield from _name((yield from skip_space((yield))))
    tag = yield from one_of((yield from skip_space(char)), (KEY_OPEN, CLOSE))
    if tag == CLOSE and tools and name not in {tool.name for tool in tools}:
        raise NotACall("a word, not a tool")
    arguments = TypedArguments(name, tools, draft)
    if tag == KEY_OPEN:
        key = yield from text_until((yield), KEY_CLOSE)
        yield from one_of((yield from skip_space((yield))), (VALUE_OPEN,))
        while (end := (yield from arguments.read(key, more=_MORE, last=[(VALUE_CLOSE, CLOSE)]))).key is not None:
            key = end.key.name
    return [arguments.call()]


def _name(char: str) -> Reader[tuple[str, str]]:
    name: list[str] = []
    while char.isalnum() or (char and char in "_-.:/"):
        name.append(char)
        char = yield
    if not name:
        raise NotACall("no name")
    return "".join(name), char


GLM = CallForm("glm", OPEN, scan, inner_tags=(KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE, CLOSE), close_tags=(CLOSE,))


def parse(text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The call that `text` is. Raises NotACall."""
    return parse_text(GLM, text, tools)


def render(call: ParsedCall, tools: Sequence[ToolSpec]) -> str:
    """The call in the spelling of GLM's template."""
    pairs = (
        f"{KEY_OPEN}{key}{KEY_CLOSE}{VALUE_OPEN}{write_argument(value)}{VALUE_CLOSE}"
        for key, value in call.arguments.items()
    )
    return f"{OPEN}{call.name}{''.join(pairs)}{CLOSE}"
