"""Where a call ends whose arguments are no JSON: it knows brackets, quotes, tags and how calls begin, and no stream."""

import re
from collections.abc import Generator, Sequence

from kvserve.output.tool_parsers.form import END, SPACE
from kvserve.output.tool_parsers.row_paths import Path, Place, Word, after

_LINE_END_BEHIND_BRACKET = re.compile(r"(?<=\})[ \t]*\r?\n(?!\s*[}\]\",])")
_LINE_END = re.compile(r"\r?\n")
_PAIRS = {"}": "{", "]": "["}


class _Brackets:
    """Which brackets are open outside of quotes."""

    def __init__(self) -> None:
        self.in_quotes = False
        self._is_escaped = False
        self._open: list[str] = []

    def add(self, char: str) -> None:
        """A bracket closes all that were opened behind its own; one that nothing opened says nothing."""
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


def end_of_broken(
    text: str, close_tags: Sequence[str], open_tags: Sequence[str], calls: Sequence[Path]
) -> Generator[None, str, int]:
    """How many of the last characters do not belong to the arguments, which begin with `text`.

    These end where their brackets do, quotes counted; else before a tag that closes calls, or before the next call if
    it stands outside of quotes or behind a bracket, for arguments may quote one; else, at the end, with their line.
    """
    brackets, seen = _Brackets(), list(text)
    starts: list[tuple[int, Place]] = []
    for char in text:
        brackets.add(char)
    while not brackets.are_closed:
        char = yield
        if char == END:
            return _num_behind_line("".join(seen), len(text[:-1].rstrip()))
        if char == "{" and (found := next((start for start, place in starts if place.is_end), None)) is not None:
            return len(seen) + 1 - found
        if not brackets.in_quotes or char == "}" or _ends_in_bracket(seen, len(seen)):
            starts += [(len(seen), Place(path)) for path in calls if _begins(path, char)]
        starts = [(start, moved) for start, place in starts for moved in after(place, char)]
        seen.append(char)
        brackets.add(char)
        if (tag := _tag_at_end(seen, close_tags)) is not None:
            return len(tag)
        tag = _tag_at_end(seen, open_tags)
        if tag is not None and (not brackets.in_quotes or _ends_in_bracket(seen, len(seen) - len(tag))):
            return len(tag)
    return 0


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


def _num_behind_line(text: str, start: int) -> int:
    """How much stands behind the line that the arguments end with: the first from `start` on with their bracket."""
    line = _LINE_END_BEHIND_BRACKET.search(text, start) or _LINE_END.search(text, start)
    return len(text) - line.start() if line is not None else 0
