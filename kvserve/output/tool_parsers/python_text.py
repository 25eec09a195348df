"""Reads a value of JSON as Python shows it: `{'a': [True, None, "it's"]}`. It runs nothing, and knows no form."""

import re
import sys
from collections.abc import Iterator

from kvserve.output.tool_parsers.json_text import read_json, write_json

_TOKEN = re.compile(r"""\s*(?:('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")|(\w[\w.+-]*|-[\w.+-]+)|([\[\]{}:,]))""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))")
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def read_python(text: str) -> object:
    """The value of `text`.

    Raises:
        ValueError: it is not what Python shows of a value of JSON, or JSON cannot express it (`read_json`).
    """
    return read_json("".join(_as_json(text)))


def _as_json(text: str) -> Iterator[str]:
    """The tokens of the text in JSON's spelling, apart from each other."""
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError("not what Python shows of a value")
        string, word, sign = found.groups()
        if word in ("true", "false", "null"):
            raise ValueError(f"{word} is not Python's")
        yield write_json(_ESCAPE.sub(_unescaped, string[1:-1])) if string else sign or _WORDS.get(word, word)
        yield " "
        position = found.end()


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None and found[4] not in _SHORT:
        raise ValueError("an escape that Python does not write")
    if code is not None and int(code, 16) > sys.maxunicode:
        raise ValueError("no character has this number")
    return _SHORT[found[4]] if code is None else chr(int(code, 16))
