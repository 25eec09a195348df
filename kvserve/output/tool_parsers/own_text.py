"""Reads lists and objects in a template's own spelling: `{a:[<|"|>b<|"|>,1,true]}`. It knows a spelling and no form.

A string ends at its mark where a comma, a bracket or a colon follows. JSON's strings are read as well.
"""

import json
import re
from dataclasses import dataclass

from kvserve.core import Spelling
from kvserve.output.tool_parsers.json_text import MAX_DEPTH, read_json, write_json

BEHIND_VALUE = ",:]}"
_NOT_IN_KEYS = frozenset(",:[]{}\r\n")
_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[^:,\[\]{}]*")
_SCALAR = re.compile(r"[^,\[\]{}\s]+")


def read_own(text: str, spelling: Spelling) -> object:
    """The value of `text`.

    Raises:
        ValueError: it is not what the template writes of a value, or JSON cannot express it (`read_json`).
    """
    reading = _Reading(text, spelling)
    value = reading.value(0)
    reading.skip()
    if reading.position < len(text):
        raise ValueError("text behind the value")
    return read_json(write_json(value))


def is_bare_key(key: str, spelling: Spelling) -> bool:
    """Whether a key is read back that stands bare in an object of this spelling."""
    marks = (*(spelling.marks or ()), '"', "'")
    return _NOT_IN_KEYS.isdisjoint(key) and key == key.strip() and not any(mark in key for mark in marks)


@dataclass(slots=True)
class _Reading:
    """A text that is read from `position` on."""

    text: str
    spelling: Spelling
    position: int = 0

    def value(self, depth: int) -> object:
        """The value that stands here."""
        self.skip()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if (string := self._string()) is not None:
            return string
        if self._takes("["):
            return self._list(depth)
        if self._takes("{"):
            return self._object(depth)
        word = self._match(_SCALAR)
        words: dict[str, object] = {self.spelling.true: True, self.spelling.false: False, self.spelling.null: None}
        return words[word] if word in words else read_json(word)

    def skip(self) -> None:
        """Go on behind white space."""
        self._match(_SPACE)

    def _list(self, depth: int) -> list[object]:
        values: list[object] = []
        self.skip()
        while not self._takes("]"):
            if values:
                self._expect(",")
            values.append(self.value(depth + 1))
            self.skip()
        return values

    def _object(self, depth: int) -> dict[str, object]:
        members: dict[str, object] = {}
        self.skip()
        while not self._takes("}"):
            if members:
                self._expect(",")
                self.skip()
            key = self._string()
            key = self._match(_BARE_KEY).rstrip() if key is None else key
            if key in members:
                raise ValueError("a key occurs twice")
            self.skip()
            self._expect(":")
            members[key] = self.value(depth + 1)
            self.skip()
        return members

    def _string(self) -> str | None:
        opening, closing = self.spelling.marks or ('"', '"')
        if self.text.startswith(opening, self.position):
            start = self.position + len(opening)
            end = re.compile(rf"{re.escape(closing)}(?=\s*(?:[{re.escape(BEHIND_VALUE)}]|\Z))").search(self.text, start)
            if end is None:
                raise ValueError("a string is not finished")
            self.position = end.end()
            return self.text[start : end.start()]
        if self.text.startswith('"', self.position):
            string, self.position = json.JSONDecoder(strict=False).raw_decode(self.text, self.position)
            return str(string)
        return None

    def _takes(self, char: str) -> bool:
        is_here = self.text.startswith(char, self.position)
        self.position += is_here
        return is_here

    def _expect(self, char: str) -> None:
        if not self._takes(char):
            raise ValueError(f"no {char} at {self.position}")

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise ValueError(f"no value at {self.position}")
        self.position = found.end()
        return found[0]
