"""Finds the end of a call whose arguments are not JSON. It knows brackets, quotes, tags and call openings."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvserve.output.tool_parsers.form import SPACE
from kvserve.output.tool_parsers.row_paths import Path, PathPlace, Word, after

_LINE_END_BEHIND_BRACKET = re.compile(r"(?<=\})[ \t]*\r?\n(?!\s*[}\]\",])")
_LINE_END = re.compile(r"\r?\n")
_JSON_GOES_ON = frozenset("]},:\"'")
_PAIRS = {"}": "{", "]": "["}


class _Brackets:
    """The open brackets outside of quotes."""

    def __init__(self) -> None:
        self.in_quotes = False
        self._is_escaped = False
        self._open: list[str] = []

    def add(self, char: str) -> None:
        """A closing bracket also closes brackets opened inside its own; without an opening one it is ignored."""
        if self.in_quotes:
            self.in_quotes = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self.in_quotes = True
        elif char in ("{", "["):
            self._open.append(char)
        elif _PAIRS.get(char) in self._open:
            while self._open.pop() != _PAIRS[char]:
                pass

    @property
    def are_closed(self) -> bool:
        """Whether none is open."""
        return not self._open


@dataclass(frozen=True, slots=True)
class CallContext:
    """What marks the end of a call: tags that close it or open others, other marks that JSON cannot have, the openings
    of other calls' arguments and the names of tools, and the first characters of what may follow a call."""

    close_tags: Sequence[str]
    open_tags: Sequence[str]
    fences: Sequence[str]
    calls: Sequence[Path]
    names: Collection[str]
    firsts: Collection[str]

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that JSON cannot have behind a bracket."""
        return (*self.close_tags, *self.open_tags, *self.fences)


class EndOfBroken:
    """Finds the end of a call whose arguments begin with `text`, which is not JSON.

    They end with their brackets, quotes respected, unless JSON continues there; else before a tag that closes calls, or
    before the next call if that is outside of quotes or behind a bracket, since arguments may quote a call; else, at
    the end of the text, with their line. An unclosed string may include the end before the text is known to be broken.
    """

    def __init__(self, text: str, around: CallContext) -> None:
        self._around = around
        self._brackets = _Brackets()
        self._seen: list[str] = []
        self._starts: list[tuple[int, PathPlace]] = []
        self._broke_at = len(text[:-1].rstrip())
        self._string = _last_string(text)
        for index, char in enumerate(text):
            if index > self._string:
                self._follow_calls(char)
            self._seen.append(char)
            self._brackets.add(char)
        self._end = len(text) if self._brackets.are_closed else None

    def at_once(self) -> int | None:
        """The same before more text is read, for an unclosed string that includes the call's closing."""
        text = "".join(self._seen)
        is_at_fault = text[: self._broke_at].endswith('"')
        return self._num_taken(text) if is_at_fault else None

    def unfinished(self) -> int | None:
        """The same at the end of a text that lacks only the rest of a string."""
        text = "".join(self._seen)
        if not self._brackets.in_quotes:
            return None
        taken = self._num_taken(text)
        line = _LINE_END_BEHIND_BRACKET.search(text, self._string) if taken is None else None
        return len(text) - line.start() if line is not None else taken

    def _num_taken(self, text: str) -> int | None:
        """The length of the text, in its last string, from a tag behind a bracket on."""
        marks = "|".join(map(re.escape, self._around.marks))
        found = re.compile(rf"(?<=[\]}}])\s*(?:{marks})").search(text, self._string) if marks else None
        return len(text) - found.start() if found is not None else None

    def add(self, char: str) -> int | None:
        """How many of the last characters do not belong to the arguments; None while they continue."""
        seen, around = self._seen, self._around
        num_read = len(seen) + 1
        if self._end is not None and char not in SPACE:
            if char in around.firsts or char not in _JSON_GOES_ON:
                return num_read - self._end
            self._end = None
        if char == "{":
            ends = (start for start, place in self._starts if place.is_end and place.called in around.names)
            if (called := next(ends, None)) is not None:
                return num_read - called
        self._follow_calls(char)
        seen.append(char)
        if not self._brackets.are_closed:
            self._brackets.add(char)
            self._end = num_read if self._brackets.are_closed else None
        if (tag := _tag_at_end(seen, around.close_tags)) is not None:
            return len(tag)
        tag = _tag_at_end(seen, around.open_tags)
        is_quoted = tag is not None and self._brackets.in_quotes and not _ends_in_bracket(seen, num_read - len(tag))
        return len(tag) if tag is not None and not is_quoted else None

    def finish(self, *, cut: bool) -> int | None:
        """The same at the end of the text; None if the arguments have no end. `cut`: a limit ended the text."""
        if self._end is not None:
            return len(self._seen) - self._end
        return None if cut else _num_behind_line("".join(self._seen), self._broke_at)

    def _follow_calls(self, char: str) -> None:
        """Track possible next calls, which may begin outside of quotes or behind a bracket."""
        seen, starts = self._seen, self._starts
        if not self._brackets.in_quotes or char == "}" or _ends_in_bracket(seen, len(seen)):
            starts += [(len(seen), PathPlace(path)) for path in self._around.calls if _begins(path, char)]
        self._starts = [(start, moved) for start, place in starts for moved in after(place, char)]


def _last_string(text: str) -> int:
    """Where the last string of the text begins; its end if it has none."""
    start, in_quotes, is_escaped = len(text), False, False
    for index, char in enumerate(text):
        if char == '"' and not is_escaped:
            in_quotes = not in_quotes
            start = index if in_quotes else start
        is_escaped = in_quotes and char == "\\" and not is_escaped
    return start


def _begins(path: Path, char: str) -> bool:
    first = path.steps[0]
    return isinstance(first, Word) and first.text[0] == char


def _tag_at_end(seen: Sequence[str], tags: Sequence[str]) -> str | None:
    return next((tag for tag in tags if seen[-1] == tag[-1] and "".join(seen[-len(tag) :]) == tag), None)


def _ends_in_bracket(seen: Sequence[str], end: int) -> bool:
    """Whether the last of the characters before `end` that is not white space is a bracket."""
    while end and seen[end - 1] in SPACE:
        end -= 1
    return end > 0 and seen[end - 1] == "}"


def _num_behind_line(text: str, start: int) -> int | None:
    """The length of the text behind the arguments' last line: the first line from `start` on that has their bracket."""
    line = _LINE_END_BEHIND_BRACKET.search(text, start) or _LINE_END.search(text, start)
    return len(text) - line.start() if line is not None else None
