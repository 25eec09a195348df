"""Defines a written form of tool calls, and the small scanners that forms consist of.

A scan is a generator that receives one character at a time, so the same code reads a stream and a whole text, and the
cuts of the text cannot matter. It raises `NotACall` at the first character that no call can have there.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvserve.core import JSON_SPELLING, CallRow, Spelling, ToolSpec
from kvserve.output.tool_parsers.draft import Draft

END = ""
"""Sent to a scan at the end of the turn; no character equals it."""

SPACE = frozenset(" \t\r\n")


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
    scan: Callable[[Sequence[ToolSpec], Draft], Scan]
    stray_close: str | None = None
    inner_tags: tuple[str, ...] = ()
    close_tags: tuple[str, ...] = ()
    at_start: bool = False
    follow_tags: tuple[str, ...] = ()
    follow: Callable[[str, Sequence[ToolSpec], Draft], Scan | None] | None = None
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
    scan = form.scan(tools, Draft())
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
        if char == END or char in "<>\r\n":
            raise NotACall(f"unexpected {char!r} in a label")
        label.append(char)
        char = yield
    yield from one_of(char, (closing_tag,))
    if not label:
        raise NotACall("empty label")
    return "".join(label)


@dataclass(frozen=True, slots=True)
class _ChainPlace:
    """Text from `start` on that may be `chain`: the tags before `index` and `offset` characters of that tag matched."""

    start: int
    chain: Chain
    index: int = 0
    offset: int = 0
    num_last: int = 0
    """How many characters are read behind the tag before the last."""

    @property
    def is_end(self) -> bool:
        return self.index == len(self.chain)

    @property
    def lacks_end(self) -> bool:
        return self.index == len(self.chain) - 1

    def after(self, char: str) -> "_ChainPlace | None":
        """The place behind `char`; None if the chain does not continue with it."""
        tag = self.chain[self.index]
        num_last = self.num_last + self.lacks_end
        if char != tag[self.offset]:
            is_between = self.offset == 0 and self.index and char in SPACE
            return replace(self, num_last=num_last) if is_between else None
        is_whole = self.offset + 1 == len(tag)
        offset = 0 if is_whole else self.offset + 1
        return _ChainPlace(self.start, self.chain, self.index + is_whole, offset, num_last)


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The chain that was read, and how many characters were read behind its last tag but one. None are where the text
    ended before its last tag; with `lacks_end` that tag is missing, and all of these are other text."""

    chain: Chain
    num_last: int
    lacks_end: bool = False


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A chain that stood in the text without its last tag, and where it began and ended."""

    chain: Chain
    start: int
    end: int


def text_before(
    chains: Sequence[Chain], put: Callable[[str], None], *, may_lack_end: Sequence[Chain] = ()
) -> Reader[ChainEnd]:
    """Free text up to the first of `chains`, and that chain; `put` gets each piece as soon as it is certain.

    A tag without the rest of its chain is text. If the turn ends first, `put` gets the remaining text and NotACall is
    raised; chains that `may_lack_end` are then whole without their last tag, also where other text follows the first of
    them: from there on `put` gets nothing before it is known.
    """
    firsts = frozenset(chain[0][0] for chain in chains)
    held, num_put = "", 0
    places: list[_ChainPlace] = []
    lacking: _Lacking | None = None
    while True:
        char = yield
        if char == END:
            ends = (place for place in places if place.chain in may_lack_end and place.lacks_end)
            end = next(ends, None)
            start = end.start if end is not None else lacking.start if lacking is not None else num_put + len(held)
            put(held[: start - num_put])
            if end is not None:
                return ChainEnd(end.chain, 0)
            if lacking is not None:
                return ChainEnd(lacking.chain, num_put + len(held) - lacking.end, lacks_end=True)
            raise NotACall("the text is not finished")
        if not places and lacking is None and char not in firsts:
            num_put += 1
            put(char)
            continue
        now = num_put + len(held)
        here = [*places, *(_ChainPlace(now, chain) for chain in chains)]
        places = [moved for place in here if (moved := place.after(char)) is not None]
        held += char
        end = next((place for place in places if place.is_end), None)
        if lacking is None and (lacks := [each for each in places if each.lacks_end and each.chain in may_lack_end]):
            lacking = _Lacking(lacks[0].chain, lacks[0].start, now + 1)
        known = end if end is not None else lacking
        start = known.start if known is not None else min((place.start for place in places), default=now + 1)
        if start > num_put:
            put(held[: start - num_put])
            held, num_put = held[start - num_put :], start
        if end is not None:
            return ChainEnd(end.chain, end.num_last)


def end_of_call(endings: Sequence[Chain]) -> Reader[Chain | None]:
    """The ending behind complete arguments; None if the turn ends first."""
    char = yield from skip_space((yield))
    places = [_ChainPlace(0, chain) for chain in endings]
    while char != END:
        places = [moved for place in places if (moved := place.after(char)) is not None]
        if not places:
            raise NotACall(f"unexpected {char!r} behind the arguments")
        if (end := next((place for place in places if place.is_end), None)) is not None:
            return end.chain
        char = yield
    return None
