"""The JSON form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call ends with its JSON value, so a closing tag inside a string is text. A list of such objects is several calls. An
object with other keys is not a call: reading it as one would drop those keys. A call is certain once its arguments open
behind its name; its last bracket and the closing tag may then be missing at the end of the turn or before the next
call. Behind a list with an offered tool it may be missing at the end of the turn: Granite 3.1 writes none.
"""

from collections.abc import Sequence

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.chains import end_of_call
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import (
    END,
    CallForm,
    NotACall,
    ParsedCall,
    Scan,
    one_of,
    parse_text,
    skip_space,
)
from kvserve.output.tool_parsers.json_text import json_container, read_json, write_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ARGUMENT_KEYS = ("arguments", "parameters")
_HEADS = [["name", key] for key in ARGUMENT_KEYS]


def scan(tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
    """Reads what follows `<tool_call>`."""
    text = yield from json_container((yield from skip_space((yield))), stops_at=lambda head: _opens(head, draft))
    if draft.name is not None:
        arguments = yield from json_container("{", draft)
        end = yield from end_of_call([(*bracket, tag) for bracket in (("}",), ()) for tag in (CLOSE, OPEN)])
        draft.write("}")
        draft.num_behind = len(OPEN) if end is not None and end[-1] == OPEN else 0
        return [ParsedCall(draft.name, read_arguments(arguments))]
    if (char := (yield from skip_space((yield)))) == END:
        return _unclosed_list(text, tools)
    yield from one_of(char, (CLOSE,))
    return read_calls(text)


def _unclosed_list(text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The calls of a list that ends the turn. Raises NotACall for anything else, and where no tool of it is offered."""
    calls = read_calls(text) if text.startswith("[") else []
    if not {call.name for call in calls} & {tool.name for tool in tools}:
        raise NotACall("no closing tag")
    return calls


def _opens(head: str, draft: CallDraft) -> bool:
    """Whether the object behind `head` holds the arguments of the call that `head` names."""
    try:
        members = read_json(f"{head}null}}")
    except ValueError:
        return False
    if isinstance(members, dict) and list(members) in _HEADS and isinstance(members["name"], str):
        draft.open(members["name"])
    return draft.is_open


def read_calls(text: str) -> list[ParsedCall]:
    """The calls of a JSON object or of a list of them. Raises NotACall."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise NotACall(str(error)) from error
    items = value if isinstance(value, list) else [value]
    if not items:
        raise NotACall("an empty list")
    return [_call(item) for item in items]


def _call(item: object) -> ParsedCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        raise NotACall("no name")
    others = [key for key in item if key != "name"]
    if len(others) > 1 or not set(others) <= set(ARGUMENT_KEYS):
        raise NotACall("keys that no call has")
    return ParsedCall(item["name"], read_arguments(item[others[0]]) if others else {})


def read_arguments(value: object) -> dict[str, object]:
    """The arguments' object, also if the model wrote it as JSON inside a string; null is empty. Raises NotACall."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise NotACall(str(error)) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotACall("the arguments are not an object")
    return value


HERMES = CallForm("hermes", OPEN, scan, inner_tags=(CLOSE,), close_tags=(CLOSE,))


def parse(text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The calls in `text`. Raises NotACall."""
    return parse_text(HERMES, text, tools)


def render(call: ParsedCall, tools: Sequence[ToolSpec]) -> str:
    """The call as Qwen's template writes it."""
    body = write_json({"name": call.name, "arguments": dict(call.arguments)})
    return f"{OPEN}\n{body}\n{CLOSE}"
