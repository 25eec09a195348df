"""Defines a written form of tool calls, and the small scanners that forms consist of.

A scan is a generator that receives one character at a time, so the same code reads a stream and a whole text, and the
cuts of the text cannot matter. It raises `NotACall` at the first character that no call can have there.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvserve.core import JSON_SPELLING, CallRow, Spelling, ToolSpec
from kvserve.output.tool_parsers.draft import CallDraft

END = ""
"""Sent to a scan at the end of the turn; no character equals it."""

SPACE = frozenset(" \t\r\n")

NOT_IN_KEYS = frozenset("<>\r\n")


class NotACall(ValueError):
    """The text is not a call of this form. It never leaves this package: the text becomes content, or, in a call that
    was sent already, arguments as the model wrote them. Of text behind a call the first `num_closing` characters still
    close the call."""

    def __init__(self, reason: str = "", num_closing: int = 0) -> None:
        super().__init__(reason)
        self.num_closing = num_closing


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A parsed call: the function's name and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, object]


type Scan = Generator[None, str, list[ParsedCall]]
type Reader[T] = Generator[None, str, T]
type Chain = tuple[str, ...]
"""Tags with only white space between them."""


class FindsEnd(Protocol):
    """Finds the end of a broken call: each method returns how many of the last characters are not the call's."""

    def at_once(self) -> int | None:
        """None if the call continues."""
        ...

    def add(self, char: str) -> int | None:
        """None while the call continues."""
        ...

    def finish(self, *, cut: bool) -> int | None:
        """At the end of the text; None if the call has no end. `cut`: a limit ended the text."""
        ...

    def unfinished(self) -> int | None:
        """The same for text that could continue as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form: `scan(tools, draft)` reads what follows `open_tag` and writes certain text to the draft; `stray_close` is
    a tag that some models write after it. `inner_tags` are its other tags, `close_tags` those that end a call.

    If a call ends with its arguments, `follow` reads what may follow them, from one of `follow_tags` on: the next call,
    or the closing of the calls, which gives no call; no scan if the tag alone closes them. `closed` is the form of a
    call that may follow even then. `at_start`: the tag opens a call only at the beginning of an answer. Such a form was
    derived from `row`. `spelling` is that of values that are bare text in it.

    `broken(text, tools)` finds the end of a call whose arguments, `text` so far, are not JSON. Without it only a
    closing tag ends a broken call.
    """

    name: str
    open_tag: str
    scan: Callable[[Sequence[ToolSpec], CallDraft], Scan]
    stray_close: str | None = None
    inner_tags: tuple[str, ...] = ()
    close_tags: tuple[str, ...] = ()
    at_start: bool = False
    follow_tags: tuple[str, ...] = ()
    follow: Callable[[str, Sequence[ToolSpec], CallDraft], Scan | None] | None = None
    closed: "CallForm | None" = None
    broken: Callable[[str, Sequence[ToolSpec]], FindsEnd] | None = None
    row: CallRow | None = None
    spelling: Spelling = JSON_SPELLING


def parse_text(form: CallForm, text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The calls of `text`, one element of `form` with white space around it.

    Raises:
        NotACall: it is something else.
    """
    body = text.strip()
    if not body.startswith(form.open_tag):
        raise NotACall(f"no {form.open_tag}")
    body = body.removeprefix(form.open_tag)
    scan = form.scan(tools, CallDraft())
    next(scan)
    for index, char in enumerate(body):
        try:
            scan.send(char)
        except StopIteration as done:
            if index + 1 < len(body):
                raise NotACall("text after the call") from None
            return _calls(done)
    try:
        scan.send(END)
    except StopIteration as done:
        return _calls(done)
    raise NotACall("the call is not finished")


def _calls(done: StopIteration) -> list[ParsedCall]:
    calls: list[ParsedCall] = done.value
    return calls


def skip_space(char: str) -> Reader[str]:
    """The first character from `char` on that is not white space."""
    while char in SPACE:
        char = yield
    return char


def one_of(char: str, tags: Iterable[str]) -> Reader[str]:
    """The tag that starts with `char`. No tag may begin with another."""
    candidates = list(tags)
    seen = ""
    while True:
        seen += char
        candidates = [tag for tag in candidates if tag.startswith(seen)]
        if char == END or not candidates:
            raise NotACall(f"unexpected {seen!r}")
        if seen in candidates:
            return seen
        char = yield


def text_until(char: str, closing_tag: str) -> Reader[str]:
    """A short label up to `closing_tag`: not empty, on one line, without other tags."""
    label: list[str] = []
    while char != closing_tag[0]:
        if char == END or char in NOT_IN_KEYS:
            raise NotACall(f"unexpected {char!r} in a label")
        label.append(char)
        char = yield
    yield from one_of(char, (closing_tag,))
    if not label:
        raise NotACall("empty label")
    return "".join(label)
