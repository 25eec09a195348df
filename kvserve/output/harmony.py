"""Reads the headers of harmony, gpt-oss's channel form: which open which channel and which are calls. It knows no
stream.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

`<|return|>` and `<|call|>` usually are stop tokens and do not arrive here: the end of the turn closes the message.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.chains import end_of_call
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import END, NotACall, ParsedCall, Reader, one_of, skip_space
from kvserve.output.tool_parsers.hermes import read_arguments
from kvserve.output.tool_parsers.json_text import json_container, write_json

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = " to="
"""Opens a header only at the beginning, since the prompt ends with `<|start|>assistant`."""

MAX_HEADER_CHARS = 300
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<early>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)(?: to=(?P<late>[^\s<]+))?"
    r"(?: ?<\|constrain\|>| )?(?P<form>json)?<\|message\|>"
)


type Channel = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    """A message has begun; its text belongs to `channel`."""

    channel: Channel


type HarmonyScan = Generator[None, str, ChannelOpened | list[ParsedCall]]


def scan_message(opener: str, allow_calls: bool, draft: CallDraft) -> HarmonyScan:
    """Reads what follows `opener`: a header, and the body too if it is a call.

    A message to a recipient that is not a function stays text. The draft gets the arguments of a call.
    """
    header = yield from _header(opener)
    recipient = header["early"] or header["late"]
    if recipient is None:
        return ChannelOpened("reasoning" if header["channel"] == "analysis" else "content")
    if not allow_calls or not recipient.startswith("functions."):
        raise NotACall("not a call of a function")
    name = recipient.removeprefix("functions.")
    char = yield from skip_space((yield))
    if char == "{":
        draft.open(name)
    text = yield from json_container(char, draft if draft.is_open else None)
    if draft.is_open:
        yield from end_of_call([(end,) for end in ENDS])
        draft.write("}")
    elif (char := (yield from skip_space((yield)))) != END:
        yield from one_of(char, ENDS)
    return [ParsedCall(name, read_arguments(text))]


def _header(opener: str) -> Reader[re.Match[str]]:
    text = opener
    while not text.endswith(MESSAGE):
        char = yield
        text += char
        if char == END or len(text) > MAX_HEADER_CHARS:
            raise NotACall("the header is not finished")
    header = _HEADER.fullmatch(text)
    if header is None:
        raise NotACall("an unknown header")
    return header


def render(call: ParsedCall, tools: Sequence[ToolSpec]) -> str:
    """The call as gpt-oss writes it after `<|start|>assistant`."""
    body = write_json(dict(call.arguments))
    return f"{CHANNEL}commentary to=functions.{call.name} {CONSTRAIN}json{MESSAGE}{body}<|call|>"
