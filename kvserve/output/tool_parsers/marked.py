"""Reads arguments of a call whose strings stand between marks, and nothing else does: `path:<|"|>a b<|"|>,lines:3`.

A string ends at its mark where the next key, or what ends the call, follows; a mark apart from these is text. Where it
is one that prose holds too, a quote, only a key that the tool's schema names and the name of a tool that is offered
count there, as code is full of quotes, commas and brackets. Anything else ends outside of its own brackets and strings.
What ends the call may be cut at the turn's end.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvserve.core import PairParts
from kvserve.output.tool_parsers.arguments import TypedArguments
from kvserve.output.tool_parsers.chains import ChainEnd
from kvserve.output.tool_parsers.form import END, SPACE, Chain, NotACall, Reader, skip_space
from kvserve.output.tool_parsers.own_text import BEHIND_VALUE
from kvserve.output.tool_parsers.row_paths import TAG, Offered, Path, PathPlace, PathStep, Word, after, steps_of

_QUOTES = "'\""
_NO_NAMES = frozenset[str]()


@dataclass(frozen=True, slots=True)
class CallEnd:
    """What ends a call: `end`, with `behind` behind it and, where that opens another call, a tool's name and `middle`.
    The reader of calls knows it as `chain`."""

    chain: Chain
    end: str
    behind: str = ""
    middle: str = ""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way on: to the next key, or to an `end` of the call, whose own text are the steps from `first` up to `last`.
    The key, or the next call's name, is one of `names`, if there are any."""

    path: Path
    names: frozenset[str]
    end: CallEnd | None = None
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Text from `start` on that may be `way`; the call's own end, if it was read, ends at `end`."""

    start: int
    way: _Way
    at: PathPlace
    end: int | None = None

    def after(self, char: str, num_read: int) -> Iterator["_Place"]:
        """The places behind `char`, with which this many were read."""
        for at in after(self.at, char):
            is_ended = self.end is None and self.way.end is not None and at.index >= self.way.last
            yield replace(self, at=at, end=num_read if is_ended else self.end)

    @property
    def is_end(self) -> bool:
        """Whether all of the way was read."""
        return self.at.is_end and (not self.way.names or self.at.called in self.way.names)

    @property
    def may_be_cut(self) -> bool:
        """Whether the turn may end here: a part of what ends the call was read."""
        return self.way.end is not None and self.at.index > self.way.first

    def call_end(self, num_read: int) -> tuple[ChainEnd, str | None]:
        """The end of the call, of whose text and what follows this many characters were read, and the next one's name
        if that was read too."""
        assert self.way.end is not None and self.end is not None, "only then the call ends"
        return ChainEnd(self.way.end.chain, num_read - self.end), self.at.called or None


@dataclass(frozen=True, slots=True)
class MarkedArguments:
    """Reads the arguments of a row of pairs whose calls have these ends."""

    pairs: PairParts
    ends: tuple[CallEnd, ...]

    def read(self, arguments: TypedArguments, offered: Offered, *, counts: bool) -> Reader[tuple[ChainEnd, str | None]]:
        """Reads from behind the text before the first key on, up to what ends the call, and up to the arguments of the
        next one whose name was needed to tell so. `counts`: another call that ends a text is one of an offered tool."""
        arguments.open()
        opening, closing = self.pairs.spelling.marks or ("", "")
        ends = [*self._end_ways("", offered, _NO_NAMES)]
        text = _Text([*_key_ways("", self.pairs.opening, self.pairs.value, arguments.keys, _NO_NAMES), *ends])
        try:
            place = yield from text.at_once()
        except NotACall:
            arguments.break_off()
            raise
        while place.way.end is None:
            key, begun = place.at.called, (yield from self._begun(arguments, opening))
            is_string = begun == opening
            value = arguments.begin(key, is_string=is_string)
            if is_string:
                text = _Text(self._string_ways(closing, arguments.keys, offered, counts=counts), value.put)
            else:
                ways = [*self._more_ways("", arguments.keys, _NO_NAMES), *ends]
                text = _Text(ways, value.put, _Nesting(opening, closing))
            try:
                place = yield from text.up_to_end("" if is_string else begun)
            except NotACall:
                value.break_off()
                raise
            if place.way.end is None:
                arguments.go_on(key, value, text.from_key(place.at.called, self.pairs.value.strip()))
            else:
                arguments.keep(key, value, is_more=False)
        return place.call_end(text.num_read)

    @property
    def names_count(self) -> bool:
        """Whether a string's mark stands in prose too, so that only names that are known end it."""
        return re.fullmatch(TAG, (self.pairs.spelling.marks or ("", ""))[1]) is None

    def string_ends(self, keys: frozenset[str], offered: Offered) -> list[tuple[tuple[PathStep, ...], frozenset[str]]]:
        """What ends a string behind its mark in a call whose schema names `keys`: the steps of each way on, and what
        its blank may be, anything without names."""
        mark = (self.pairs.spelling.marks or ("", ""))[1]
        ways = self._string_ways(mark, keys, offered, counts=True)
        return [(way.path.steps[len(_mark_step(mark)) :], way.names) for way in ways]

    def _begun(self, arguments: TypedArguments, opening: str) -> Reader[str]:
        """The beginning of a value, behind its key."""
        try:
            return (yield from _begun(opening))
        except NotACall:
            arguments.break_off()
            raise

    def _string_ways(self, mark: str, keys: frozenset[str], offered: Offered, *, counts: bool) -> list[_Way]:
        """The ways over the mark that ends a string."""
        more = self._more_ways(mark, keys, keys if self.names_count else _NO_NAMES)
        return [*more, *self._end_ways(mark, offered, offered.names if self.names_count and counts else _NO_NAMES)]

    def _more_ways(self, mark: str, keys: frozenset[str], names: frozenset[str]) -> Iterator[_Way]:
        lead = self.pairs.closing + self.pairs.between + self.pairs.opening
        return _key_ways(mark, lead, self.pairs.value, keys, names)

    def _end_ways(self, mark: str, offered: Offered, names: frozenset[str]) -> Iterator[_Way]:
        """The ways over a string's `mark`, or from anything else, to the ends of the call and the next one's name."""
        for end in self.ends:
            own = (*_mark_step(mark), *steps_of((end.end,)))
            for name in (*offered.odd, None) if end.middle else (None,):
                behind = steps_of((end.behind,), name, (end.middle,) if end.middle else ())
                of_these = names if end.middle else _NO_NAMES
                yield _Way(Path((*own, *behind), name), of_these, end, len(_mark_step(mark)), len(own))


def _key_ways(mark: str, lead: str, value: str, keys: frozenset[str], names: frozenset[str]) -> Iterator[_Way]:
    """The ways over `mark` and `lead` to a key, one of `names` if there are any; `keys` are those that are known."""
    for key in (*Offered(keys, alone=False).odd, None):
        yield _Way(Path((*_mark_step(mark), *steps_of((lead,), key, (value,))), key), names)


def _mark_step(mark: str) -> tuple[PathStep, ...]:
    """The step of the mark behind a string; all white space before it is the string's."""
    return (Word(mark, spaced=False),) if mark else ()


def _begun(opening: str) -> Reader[str]:
    """The beginning of a value: the mark of a string, or as much as shows that it is none."""
    begun = char = yield from skip_space((yield))
    while char != END and begun != opening and opening.startswith(begun):
        char = yield
        begun += char
    if char == END:
        raise NotACall("the value is not finished")
    return begun


class _Text:
    """Text in which one of `ways` is looked for, outside of what `nesting` says; `put` gets what stands before it."""

    def __init__(
        self, ways: Sequence[_Way], put: Callable[[str], None] = lambda _: None, nesting: "_Nesting | None" = None
    ) -> None:
        self._ways = ways
        self._put = put
        self._nesting = nesting
        self._firsts = {step.text[0] for way in ways if isinstance(step := way.path.steps[0], Word)}
        self._places: list[_Place] = []
        self._held = ""
        self.num_read = 0

    def at_once(self) -> Reader[_Place]:
        """The end of the way that the text follows from its beginning on."""
        self._places = self._begun()
        while True:
            char = yield
            if char == END:
                return self._cut()
            if (found := self._moved(char)) is not None:
                return found
            if not self._places:
                raise NotACall(f"unexpected {char!r} among arguments")

    def up_to_end(self, begun: str) -> Reader[_Place]:
        """The end of the first way in the text, which begins with `begun`."""
        for char in begun:
            if (found := self._read(char)) is not None:
                return found
        while True:
            char = yield
            if char == END:
                place = self._cut()
                self._put(self._held[: len(self._held) - (self.num_read - place.start)])
                return place
            if (found := self._read(char)) is not None:
                return found

    def from_key(self, key: str, lead: str) -> str:
        """What was read last, from `key` on: that and `lead` behind it."""
        return self._held[self._held.rindex(key, 0, len(self._held.rstrip()) - len(lead)) :]

    def _read(self, char: str) -> _Place | None:
        if self._nesting is None or not self._nesting.is_open:
            if char in self._firsts:
                self._places += self._begun()
            found = self._moved(char)
        else:
            self.num_read, found = self.num_read + 1, None
        if self._nesting is not None:
            self._nesting.feed(char)
        self._held += char
        start = min((place.start for place in self._places), default=self.num_read) if found is None else found.start
        size = len(self._held) - (self.num_read - start)
        if size > 0:
            self._put(self._held[:size])
            self._held = self._held[size:]
        return found

    def _begun(self) -> list[_Place]:
        return [_Place(self.num_read, way, PathPlace(way.path)) for way in self._ways]

    def _moved(self, char: str) -> _Place | None:
        """Go on behind `char`; the place where a way ends, if one does."""
        self.num_read += 1
        self._places = [moved for place in self._places for moved in place.after(char, self.num_read)]
        return next((place for place in self._places if place.is_end), None)

    def _cut(self) -> _Place:
        """The place where the turn ends the call. Raises NotACall with all that is held put."""
        place = next((place for place in self._places if place.may_be_cut), None)
        if place is None:
            self._put(self._held)
            raise NotACall("the call is not finished")
        return replace(place, end=self.num_read)


class _Nesting:
    """Whether a value that is no string is inside its own brackets or strings, as far as it was fed."""

    def __init__(self, opening: str, closing: str) -> None:
        """The marks of strings; those of JSON and Python are known."""
        self._marks = opening, closing
        self._depth = 0
        self._before = ""
        self._tail = ""
        self._string = ""
        self._is_escape = self._may_be_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the value cannot end here."""
        return bool(self._depth or self._string)

    def feed(self, char: str) -> None:
        """Read the next character."""
        if self._string in _QUOTES and self._string:
            self._in_quotes(char)
        elif not self._string or self._leaves_marks(char):
            self._outside(char)

    def _in_quotes(self, char: str) -> None:
        if not self._is_escape and char == self._string:
            self._string = ""
        self._is_escape = char == "\\" and not self._is_escape

    def _leaves_marks(self, char: str) -> bool:
        """Whether the string has ended at a mark before `char`."""
        if self._may_be_closed and char in BEHIND_VALUE:
            self._string, self._tail = "", ""
            return True
        self._tail = f"{self._tail}{char}"[-len(self._marks[1]) :]
        is_mark = self._tail == self._marks[1]
        self._may_be_closed = is_mark or (self._may_be_closed and char in SPACE)
        return False

    def _outside(self, char: str) -> None:
        begins_value = not self._before or (self._depth > 0 and self._before in "[{,:")
        if char in _QUOTES and begins_value:
            self._string = char
        elif char in "[{" and begins_value:
            self._depth += 1
        elif char in "]}" and self._depth:
            self._depth -= 1
        self._tail = f"{self._tail}{char}"[-len(self._marks[0]) :]
        if self._depth and self._tail == self._marks[0] and self._marks[0] not in _QUOTES:
            self._string, self._tail, self._may_be_closed = self._marks[0], "", False
        if char not in SPACE:
            self._before = char
