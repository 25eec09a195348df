"""What a written form of a tool call is, and the small scanners that forms are made of.

A scan is a generator that is sent one character at a time, so the same code reads a stream as it comes and a whole
text, and how the text was cut cannot matter. It raises `NotACall` at the first character that no call can have there.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import ToolSpec

END = ""
"""Sent to a scan when the turn is over: no character equals it."""

SPACE = frozenset(" \t\r\n")


class NotACall(ValueError):
    """The text is not a call of this form. It never leaves this room: the text becomes content."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as read: the function's name and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, object]


type Scan = Generator[None, str, list[ParsedCall]]
type Reader[T] = Generator[None, str, T]


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A form: `scan(tools)` reads what follows `open_tag`; `stray_close` is a tag some models write after it.

    `inner_tags` are the others that it is written with.
    """

    name: str
    open_tag: str
    scan: Callable[[Sequence[ToolSpec]], Scan]
    stray_close: str | None = None
    inner_tags: tuple[str, ...] = ()


def parse_text(form: ToolForm, text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
    """The calls of `text`, which must be one element of `form` and nothing else but white space around it.

    Raises:
        NotACall: it is something else.
    """
    body = text.strip()
    if not body.startswith(form.open_tag):
        raise NotACall(f"no {form.open_tag}")
    body = body.removeprefix(form.open_tag)
    scan = form.scan(tools)
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
    """The tag that starts with `char`. No tag may be the beginning of another."""
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
    """A short label up to `closing_tag`: not empty, on one line, without another tag in it."""
    label: list[str] = []
    while char != closing_tag[0]:
        if char == END or char in "<>\r\n":
            raise NotACall(f"unexpected {char!r} in a label")
        label.append(char)
        char = yield
    yield from one_of(char, (closing_tag,))
    if not label:
        raise NotACall("empty label")
    return "".join(label)


def value_until(closing_tag: str, chains: Sequence[tuple[str, ...]]) -> Reader[tuple[str, str]]:
    """Free text up to the first `closing_tag` that one of `chains` follows, and the first tag of that chain.

    A chain is tags with nothing but white space between them. A closing tag followed by anything else is part of
    the value, so that a value may contain it.
    """
    lasts = {chain[-1][-1] for chain in chains}
    chars: list[str] = []
    while True:
        char = yield
        if char == END:
            raise NotACall("the value is not finished")
        chars.append(char)
        if char not in lasts:
            continue
        for chain in chains:
            end = _before(chars, (closing_tag, *chain))
            if end is not None:
                return "".join(chars[:end]), chain[0]


def _before(chars: list[str], chain: tuple[str, ...]) -> int | None:
    """Where `chain` begins, if `chars` ends with it; the tags' lengths and the white space bound the work."""
    end = len(chars)
    for tag in reversed(chain):
        while end and tag is not chain[-1] and chars[end - 1] in SPACE:
            end -= 1
        if end < len(tag) or "".join(chars[end - len(tag) : end]) != tag:
            return None
        end -= len(tag)
    return end
