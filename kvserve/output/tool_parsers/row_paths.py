"""The ways in which text may go on where a row's calls are written, followed character by character, all at once.

It knows a row's parts as steps and which names are offered; it reads up to a call's arguments and never into them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvserve.core import CallParts, CallSlot
from kvserve.output.tool_parsers.form import END, SPACE, NotACall, Reader

TAG = r"<[^<>\s]+>?|\[/?[A-Z_]+\]"
_ATOM = re.compile(rf"(\s*)({TAG}|[^\s<\[{{}},:\]]+|\S)")
_APART = frozenset("{}[],:;<>")
"""Characters beside which white space joins no words."""
_SEPARATORS = frozenset(",:;\"'")
_READ = {None: "name", CallSlot.ID: "call_id", CallSlot.NUMBER: "number"}
_SLOT_CHARS = {
    CallSlot.ID: frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"),
    CallSlot.NUMBER: frozenset("0123456789"),
}


@dataclass(frozen=True, slots=True)
class Word:
    """Text that is always the same; white space may stand before it where it is `spaced`."""

    text: str
    spaced: bool

    @property
    def is_closing(self) -> bool:
        """Whether it is a tag or brackets: behind arguments, where it closes something, it is never prose."""
        return re.fullmatch(TAG, self.text) is not None or not (
            any(map(str.isalnum, self.text)) or _SEPARATORS & set(self.text)
        )


@dataclass(frozen=True, slots=True)
class Blank:
    """What is another in each call: an id, a number or, without `slot`, the name of a tool."""

    slot: CallSlot | None
    spaced: bool

    def takes(self, char: str) -> bool:
        """Whether it may hold the character."""
        if self.slot is None:
            return char.isalnum() or (char != END and char in "_.-")
        return char in _SLOT_CHARS[self.slot]


type PathStep = Word | Blank


@dataclass(frozen=True, slots=True)
class Path:
    """One way to go on: to the arguments of the tool of this name, of any tool where it has none, or to the end of the
    calls."""

    steps: tuple[PathStep, ...]
    name: str | None = None
    closes: bool = False
    closing: CallParts = ()
    """What the template writes behind such a call's arguments if it is the last one."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The names of the tools that are offered; `alone`: no other is called."""

    names: frozenset[str]
    alone: bool

    @property
    def odd(self) -> tuple[str, ...]:
        """Those that are told from what stands behind a name only if they are known."""
        return tuple(sorted(name for name in self.names if not all(map(Blank(None, spaced=False).takes, name))))


@dataclass(frozen=True, slots=True)
class Lead:
    """The name of the tool whose arguments open."""

    name: str
    is_offered: bool
    closing: CallParts


@dataclass(frozen=True, slots=True)
class PathPlace:
    """How far text has come on a path, and what was read of its blanks."""

    path: Path
    index: int = 0
    offset: int = 0
    name: str = ""
    call_id: str = ""
    number: str = ""

    @property
    def is_end(self) -> bool:
        """Whether all of the path was read."""
        return self.index == len(self.path.steps)

    @property
    def called(self) -> str:
        """The name of the tool that is called."""
        return self.path.name or self.name

    @property
    def closing(self) -> CallParts:
        """What closes the call that the path leads to, with what is known of its blanks."""
        known = {CallSlot.ID: self.call_id or CallSlot.ID, CallSlot.NUMBER: self.number or "0"}
        return tuple(known[part] if isinstance(part, CallSlot) else part for part in self.path.closing)


def steps_of(parts: CallParts, name: str | None = None, middle: CallParts = ()) -> tuple[PathStep, ...]:
    """The steps of `parts`; of a call's with its name, None for any, and what stands behind that."""
    steps: list[PathStep] = []
    is_apart = False

    def add(part: str | CallSlot) -> None:
        nonlocal is_apart
        if isinstance(part, CallSlot):
            steps.append(Blank(part, is_apart))
            is_apart = False
            return
        for space, text in _ATOM.findall(part):
            steps.append(Word(text, is_apart or bool(space) or text[0] in _APART))
            is_apart = text[-1] in _APART
        is_apart = is_apart or part[-1:].isspace()

    for part in parts:
        add(part)
    if middle:
        steps.append(Word(name, is_apart) if name is not None else Blank(None, is_apart))
        is_apart = False
        for part in middle:
            add(part)
    return tuple(steps)


def behind(paths: Sequence[Path], tag: str) -> tuple[Path, ...]:
    """Those of the paths that begin with the word `tag`, without it."""
    return tuple(
        replace(path, steps=path.steps[1:])
        for path in paths
        if isinstance(first := path.steps[0], Word) and first.text == tag
    )


def lead(paths: Sequence[Path], offered: Offered, num_read: int = 0, num_closing: int = 0) -> Reader[Lead | None]:
    """The tool whose arguments open, None where the calls are closed.

    Raises NotACall where no path goes on. Of the `num_read` characters that were read before, and of those that are
    read here, the first `num_closing` close calls whatever follows: the error says how many these are by then.
    """
    places = [PathPlace(path) for path in paths]
    while places:
        char = yield
        if char == END:
            if any(place.path.closes for place in places):
                return None
            break
        if char == "{" and (found := _lead(places, offered)) is not None:
            return found
        num_read += 1
        places = [place for before in places for place in after(before, char)]
        if char not in SPACE and any(map(_closes, places)):
            num_closing = num_read
        if any(place.path.closes and place.is_end for place in places):
            return None
    raise NotACall("no call of an offered tool", num_closing)


def _lead(places: Sequence[PathPlace], offered: Offered) -> Lead | None:
    ends = [place for place in places if place.is_end]
    found = next((place for place in ends if place.called in offered.names), None)
    if found is None and not offered.alone:
        found = next(iter(ends), None)
    return Lead(found.called, found.called in offered.names, found.closing) if found is not None else None


def _closes(place: PathPlace) -> bool:
    """Whether a word that closes calls was just read."""
    last = place.path.steps[place.index - 1] if place.index and not place.offset else None
    return place.path.closes and isinstance(last, Word) and last.is_closing


def after(place: PathPlace, char: str) -> Iterator[PathPlace]:
    """The places behind `char`, from one before it."""
    path, index, offset = place.path, place.index, place.offset
    match path.steps[index] if index < len(path.steps) else None:
        case None:
            if char in SPACE:
                yield place
        case Blank(slot=slot, spaced=spaced) as blank:
            if blank.takes(char):
                read = {_READ[slot]: getattr(place, _READ[slot]) + char}
                yield replace(place, offset=1, **read)
            elif offset == 0 and spaced and char in SPACE:
                yield place
            if offset:
                yield from after(replace(place, index=index + 1, offset=0), char)
        case Word(text=text, spaced=spaced):
            if char == text[offset]:
                is_whole = offset + 1 == len(text)
                yield replace(place, index=index + is_whole, offset=0 if is_whole else offset + 1)
            elif offset == 0 and spaced and char in SPACE:
                yield place
