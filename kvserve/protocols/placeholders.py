"""Puts into words what the model cannot read and what another server did: a client cannot repair such a transcript. The
whole answer is words if a request needs a tool that only the provider's servers run.

Everything readable is kept: queries, addresses, code and the text of results follow a heading that names the block.
Ids, sealed fields and bytes are left out, so a block has the same words in every request that repeats it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvserve.core import AnswerEvent, ContentDelta, Finished, JsonObject, Usage
from kvserve.protocols.fields import Fields, mistyped

BY_ANOTHER_SERVER = "done by another server"
NOT_READ = "cannot be read here"
NOT_HEARD = "cannot be heard here"

_SILENT = frozenset(
    (
        *("id", "type", "call_id", "tool_use_id", "item_id", "file_id", "container_id", "caller", "index"),
        *(
            "cache_control",
            "prompt_cache_breakpoint",
            "created_by",
            "score",
            "logprobs",
            "detail",
            "media_type",
            "format",
        ),
        *("pending_safety_checks", "acknowledged_safety_checks", "max_output_length", "execution", "role", "citations"),
    )
)
"""Fields that mean nothing to the model: ids of clients and servers, and encodings of bytes."""

_NAMELESS = frozenset(("text", "content", "output", "result"))
"""Fields whose text is written without the field's name."""

_TOOL_INPUT = "input"
"""A tool's arguments: every field in it is the tool's own."""

_TELLING_TYPES = frozenset(("action", "operation", "outcome"))
"""Objects whose `type` is written: it names what was done."""

_SEALED_NAME = re.compile(r"encrypted_.*|signature|fingerprint")
_DATA_URL = re.compile(r"data:[^,]*;base64,.*", re.DOTALL)
_BASE64_LINE = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_BASE64_KINDS = ("[a-z]", "[A-Z]", "[0-9]")
_MIN_BYTES_CHARACTERS = 256
_MIN_BASE64_WIDTH = 60
_USUAL_STATUSES = ("completed", "in_progress", "searching", "interpreting", "generating", "calling")


@dataclass(frozen=True, slots=True)
class Readable:
    """The readable lines of a block, and whether that is all of it."""

    lines: tuple[str, ...]
    is_whole: bool


def words(block: Fields, why: str = BY_ANOTHER_SERVER) -> str:
    """A block in words."""
    return _titled(str(block.values.get("type")), read(block.values), why)


def words_of_unknown(block: Fields, known: Sequence[str]) -> str:
    """A block of unknown type in words. Raises BadRequest if nothing in it can be read."""
    readable = read(block.values)
    kind = block.values.get("type")
    if not readable.lines:
        raise mistyped(f"{block.path}.type", "one of " + ", ".join(f'"{name}"' for name in known), kind)
    return _titled(str(kind), readable, BY_ANOTHER_SERVER)


def _titled(kind: str, readable: Readable, why: str) -> str:
    missing = "" if readable.is_whole or why == NOT_READ else f", part of it {NOT_READ}"
    return "\n".join([f"[{kind}: {why}{missing}]", *readable.lines])


def read(values: JsonObject) -> Readable:
    """The readable part of an object, in the order sent."""
    found = list(_leaves("", values))
    return Readable(tuple(line for line in found if line is not None), None not in found)


def _leaves(name: str, value: object, *, in_input: bool = False) -> Iterator[str | None]:
    """A line for each readable value; None for one that cannot be read."""
    if isinstance(value, Mapping):
        if name in _TELLING_TYPES and not in_input and isinstance(kind := value.get("type"), str):
            yield f"{name}: {kind}"
        holds_bytes = value.get("type") == "base64"
        for key, inner in value.items():
            if in_input or key not in _SILENT:
                is_input = in_input or (key == _TOOL_INPUT and isinstance(inner, Mapping))
                yield from (None,) if holds_bytes and key == "data" else _leaves(key, inner, in_input=is_input)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(name, inner, in_input=in_input)
    elif value is None or value == "" or (name == "status" and value in _USUAL_STATUSES and not in_input):
        return
    elif (_SEALED_NAME.fullmatch(name) and not in_input) or (isinstance(value, str) and _is_bytes(value)):
        yield None
    else:
        said = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
        yield said if name in _NAMELESS else f"{name}: {said}"


def _is_bytes(text: str) -> bool:
    """Whether a text is a data URL or long base64: one line or lines of one length, with letters of both cases and
    digits, unlike lists of names and long numbers in the output of commands."""
    if _DATA_URL.fullmatch(text):
        return True
    if len(text) < _MIN_BYTES_CHARACTERS or text.isspace():
        return False
    *lines, last = text.split()
    widths = {len(line) for line in lines} or {len(last)}
    is_one_block = len(widths) == 1 and min(widths) >= _MIN_BASE64_WIDTH and len(last) <= min(widths)
    return (
        is_one_block
        and all(map(_BASE64_LINE.fullmatch, (*lines, last)))
        and all(re.search(kind, text) for kind in _BASE64_KINDS)
    )


# --- answers without a model -----------------------------------------------------------------------------------------


def unserved_words(names: Sequence[str]) -> str:
    """The answer's text."""
    tools = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return (
        f"This server cannot run the tool {tools}: it runs a model on this machine and no tools. Nothing was searched, "
        "fetched or executed. Go on without it."
    )


def answer_in_words(words: str) -> Iterator[AnswerEvent]:
    """The events of an answer without a model: it read and wrote no token."""
    yield ContentDelta(words)
    yield Finished("stop", Usage(0, 0, 0))
