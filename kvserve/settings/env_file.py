"""What an `.env` file says, as far as it can be known without python-dotenv, which reads it for the server.

Standard library only, and every line must run under Python 3.9: `start_checks.py` judges by it before anything is
installed. It says what python-dotenv says, or that it does not know; it knows names and texts, no settings.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Union

from kvserve.errors import StartupError


class Unknown(enum.Enum):
    """What stands for a value that only python-dotenv can read: one with an escape, or put together from variables."""

    UNKNOWN = enum.auto()


UNKNOWN = Unknown.UNKNOWN
Value = Union[str, None, Unknown]  # noqa: UP007  # evaluated under Python 3.9
"""None: the name stands there alone and sets nothing."""

_SPACE = r"[^\S\r\n]"
_LINE = re.compile(
    rf"\s*(?:export{_SPACE}+|(?!export{_SPACE}))(?P<name>[^=#\s'][^=#\s]*){_SPACE}*"
    rf"(?:=(?P<space>{_SPACE}*)(?P<text>.*)|(?:#.*)?)"
)
_QUOTED_NAME = re.compile(rf"\s*(?:export{_SPACE}+)?'")
_QUOTED = re.compile(r"""(?P<mark>['"])(?P<inside>(?:\\.|(?!(?P=mark))[^\\])*)(?P=mark)""")
_NOTHING_MORE = re.compile(rf"{_SPACE}*(?:#.*)?")


def read_text(env_file: Path) -> str | None:
    """The file's text, "" where there is no file, None where it can be read only once, as a pipe. Raises StartupError
    for one that cannot be read."""
    if not env_file.is_file():
        return None if env_file.exists() and not env_file.is_dir() else ""
    try:
        return env_file.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{env_file} cannot be read: {error}.") from None


def values_in(env_text: str) -> dict[str, Value] | None:
    """Every name of the text with its value, in python-dotenv's order. None where a quotation goes on over lines: what
    is a name then, only python-dotenv can tell."""
    found: dict[str, Value] = {}
    for line in re.split(r"\r\n|\r|\n", env_text[1:] if env_text.startswith("\ufeff") else env_text):
        match = _LINE.fullmatch(line)
        if match is None:  # empty, a comment, or skipped as no assignment, unless a name in quotes begins there
            if _QUOTED_NAME.match(line):
                return None
            continue
        name, text = match["name"], match["text"]
        if text is None or text[:1] not in ("'", '"'):
            found[name] = None if text is None else _known(_unquoted(text, match["space"]))
        elif (quoted := _QUOTED.match(text)) is None:
            return None
        elif _NOTHING_MORE.fullmatch(text, quoted.end()):
            found[name] = UNKNOWN if "\\" in quoted["inside"] else _known(quoted["inside"])
    return found


def _unquoted(text: str, space: str) -> str:
    """White space and `#` begin a comment."""
    return re.sub(r"\s+#.*", "", space + text).strip() if text.startswith("#") else re.sub(r"\s+#.*", "", text).rstrip()


def _known(value: str) -> Value:
    return UNKNOWN if "${" in value else value


def by_field(*sources: Mapping[str, Value]) -> dict[str, Value]:
    """What is set, by names in lower case, each from the first source that sets it: an empty text sets nothing, and of
    two spellings in one source the later one counts."""
    found: dict[str, Value] = {}
    for source in reversed(sources):
        own = {name.lower(): value for name, value in source.items() if value != ""}
        found.update({name: value for name, value in own.items() if value is not None})
    return found
