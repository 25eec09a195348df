"""Calls in the form that a model's own template writes, as a `CallRow` says it; arguments are one JSON object.

A call is certain once an offered tool's name and what stands behind it were read and the arguments open, and it ends
with them. What follows is read on its own: the next call, or what closes the calls, whose rest may be missing at the
end. White space counts where words would run together; a call's id and number are read and say nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvserve.core import CallParts, CallRow, CallSlot, ToolSpec
from kvserve.output.tool_parsers.draft import Draft
from kvserve.output.tool_parsers.form import END, SPACE, NotACall, ParsedCall, Reader, Scan, ToolForm
from kvserve.output.tool_parsers.hermes import read_arguments
from kvserve.output.tool_parsers.json_text import json_container

NAME = "derived"
PYTHON_TAG = "<|python_tag|>"
"""Llama's models write it before a call of the JSON form too."""

_TAG = r"<[^<>\s]+>?|\[/?[A-Z_]+\]"
_ATOM = re.compile(rf"(\s*)({_TAG}|[^\s<\[{{}},:\]]+|\S)")
_APART = frozenset("{}[],:<>")
"""Characters beside which white space joins no words."""
_ID_MEMBER = re.compile(r',\s*"[^"]*":\s*"\Z')
_SLOT_CHARS = {
    CallSlot.ID: frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"),
    CallSlot.NUMBER: frozenset("0123456789"),
}


@dataclass(frozen=True, slots=True)
class _Atom:
    text: str
    spaced: bool
    """Whether white space may stand before it."""


@dataclass(frozen=True, slots=True)
class _Path:
    """One way to go on: up to the arguments of the tool of this name; without a name, up to the end of the calls."""

    name: str | None
    steps: tuple[_Atom | CallSlot, ...]


def form_of(row: CallRow) -> ToolForm:
    """The form of the row's calls."""
    opening = _atoms(row.opening)
    first = opening[0]
    assert isinstance(first, _Atom), "a row begins with text"
    follows = [parts for parts in (row.between, row.closing) if parts]
    starts = [_atoms(ending)[0] for parts in follows for ending in _endings(parts)]
    tags = dict.fromkeys(step.text for step in starts if isinstance(step, _Atom))
    words = [part for parts in (row.opening, row.middle, *follows) for part in parts if isinstance(part, str)]
    inner = dict.fromkeys(tag for word in words for tag in re.findall(_TAG, word) if tag != first.text)

    def scan(tools: Sequence[ToolSpec], draft: Draft) -> Scan:
        return _scan(_paths(row, first.text, tuple(tool.name for tool in tools), behind_call=False), draft)

    def follow(tag: str, tools: Sequence[ToolSpec], draft: Draft) -> Scan | None:
        paths = _paths(row, tag, tuple(tool.name for tool in tools), behind_call=True)
        return None if any(not path.steps for path in paths) else _scan(paths, draft)

    return ToolForm(
        NAME,
        first.text,
        scan,
        inner_tags=tuple(inner),
        close_tags=tuple(tag for tag in tags if re.fullmatch(_TAG, tag) and tag != first.text),
        at_start=is_bare(row),
        follow_tags=tuple(tags),
        follow=follow,
        row=row,
    )


def python_form_of(row: CallRow) -> ToolForm:
    """The form of a bare row's calls behind `<|python_tag|>`, where a call may stand anywhere."""
    bare = form_of(row)

    def scan(tools: Sequence[ToolSpec], draft: Draft) -> Scan:
        return _scan(_paths(row, "", tuple(tool.name for tool in tools), behind_call=False), draft)

    return ToolForm(NAME, PYTHON_TAG, scan, follow_tags=bare.follow_tags, follow=bare.follow, row=row)


def is_bare(row: CallRow) -> bool:
    """Whether a call begins with no tag but with its JSON object."""
    return str(row.opening[0]).startswith("{")


def variants(parts: CallParts) -> Iterator[CallParts]:
    """What stands behind arguments, and the same without the id that models leave out."""
    yield parts
    match parts:
        case (str(before), CallSlot.ID, str(behind), *rest) if _ID_MEMBER.search(before) and behind.startswith('"'):
            yield (_ID_MEMBER.sub("", before) + behind[1:], *rest)


def _endings(parts: CallParts) -> Iterator[CallParts]:
    """What stands behind arguments, and the same from a later tag on: of a call that was broken the rest is left."""
    yield from variants(parts)
    match parts:
        case (str(first), *rest):
            later = (found.start() for found in re.finditer(_TAG, first))
            yield from ((first[start:], *rest) for start in later if first[:start].strip())


def _atoms(parts: CallParts) -> tuple[_Atom | CallSlot, ...]:
    steps: list[_Atom | CallSlot] = []
    for part in parts:
        if isinstance(part, CallSlot):
            steps.append(part)
            continue
        for space, text in _ATOM.findall(part):
            last = steps[-1] if steps else None
            before = last.text[-1] if isinstance(last, _Atom) else ""
            steps.append(_Atom(text, bool(space) or before in _APART or text[0] in _APART))
    return tuple(steps)


@lru_cache(maxsize=64)
def _paths(row: CallRow, tag: str, names: tuple[str, ...], *, behind_call: bool) -> tuple[_Path, ...]:
    """The ways to go on behind `tag`, which was read."""
    heads = list(_endings(row.between or ())) if behind_call else [row.opening]
    middle = _atoms(row.middle)
    found = [
        _Path(name, (*_atoms(head), _Atom(name, spaced=False), *middle)) for head in heads if head for name in names
    ]
    if behind_call:
        found += [_Path(None, _atoms(closing)) for closing in _endings(row.closing) if closing]
    if not tag:
        return tuple(found)
    return tuple(_Path(p.name, p.steps[1:]) for p in found if isinstance(s := p.steps[0], _Atom) and s.text == tag)


def _scan(paths: Sequence[_Path], draft: Draft) -> Scan:
    name = yield from _lead(paths)
    if name is None:
        return []
    draft.open(name)
    text = yield from json_container("{", draft if draft.is_open else None)
    arguments = read_arguments(text)
    draft.write("}")
    return [ParsedCall(name, arguments)]


def _lead(paths: Sequence[_Path]) -> Reader[str | None]:
    """The name of the tool whose arguments open, None where the calls are closed."""
    places = [(path, 0, 0) for path in paths]
    while places:
        char = yield
        if char == END:
            if any(path.name is None for path, _, _ in places):
                return None
            break
        if char == "{":
            called = next((path for path, index, _ in places if index == len(path.steps)), None)
            if called is not None:
                return called.name
        places = [(path, *after) for path, index, offset in places for after in _after(path.steps, index, offset, char)]
        if any(path.name is None and index == len(path.steps) for path, index, _ in places):
            return None
    raise NotACall("no call of an offered tool")


def _after(steps: Sequence[_Atom | CallSlot], index: int, offset: int, char: str) -> Iterator[tuple[int, int]]:
    """The places behind `char`, from one before it."""
    step = steps[index] if index < len(steps) else None
    match step:
        case None:
            if char in SPACE:
                yield index, 0
        case CallSlot():
            if char in _SLOT_CHARS[step]:
                yield index, 1
            if offset:
                yield from _after(steps, index + 1, 0, char)
        case _Atom(text=text, spaced=spaced):
            if char == text[offset]:
                yield (index + 1, 0) if offset + 1 == len(text) else (index, offset + 1)
            elif offset == 0 and spaced and char in SPACE:
                yield index, 0
