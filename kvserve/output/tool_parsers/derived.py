"""Calls in the form that a model's own template writes, as a `CallRow` says it; arguments are one JSON object.

A call is certain once an offered tool's name and what stands behind it were read and the arguments open, and it ends
with them. What follows is read on its own: the next call, or what closes the calls, whose rest may be missing at the
end. White space counts where words would run together; a call's id and number, and members of its JSON object that no
call needs, are read and say nothing. A tool that is not offered is called beside one that is, and else is text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvserve.core import CallParts, CallRow, CallSlot, ToolSpec
from kvserve.output.tool_parsers import pairs
from kvserve.output.tool_parsers.broken import CallContext, EndOfBroken
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import CallForm, NotACall, ParsedCall, Reader, Scan, skip_space
from kvserve.output.tool_parsers.hermes import ARGUMENT_KEYS, read_arguments
from kvserve.output.tool_parsers.json_text import json_container, read_json, write_json
from kvserve.output.tool_parsers.row_paths import TAG, Offered, Path, Word, behind, lead, steps_of

NAME = "derived"
PYTHON_TAG = "<|python_tag|>"
"""Llama's models write it before a call of the JSON form too."""

LISTED = "derived list"
_MISTRAL = "[TOOL_CALLS]"
_HEADED = CallRow((_MISTRAL,), ("[CALL_ID]", CallSlot.ID, "[ARGS]"), (_MISTRAL,), ())
"""Mistral's models write this form, whichever one their template has; the other one is a list of JSON objects."""

_ID_MEMBER = re.compile(r',\s*"[^"]*":\s*"\Z')
_NAME_KEY = re.compile(r'"([^"]+)":\s*"\Z')
_ARGUMENTS_KEY = re.compile(r'\A"\s*,\s*"([^"]+)":\s*\Z')
_NAMESPACE = re.compile(r"(?<![\w.])\w+\.\Z")
_LAST_TAG = re.compile(rf"(?:{TAG})\s*\Z")


def form_of(row: CallRow) -> CallForm:
    """The form of the row's calls."""
    if row.pairs is not None:
        return pairs.form_of(row, NAME)
    tag = _first_word(row.opening)
    return _form(row, tag, opened=tag)


def forms_of(row: CallRow, *, has_python_tag: bool) -> tuple[CallForm, ...]:
    """All forms in which a model with this row writes: the row's own first."""
    form = form_of(row)
    if row.pairs is not None:
        return (form,)
    python = (_form(row, PYTHON_TAG, opened=""),) if form.at_start and has_python_tag else ()
    if form.at_start or not (form.open_tag == _MISTRAL or _keys(row)):
        return (form, *python)
    return (form, CallForm(LISTED, form.open_tag, _list_scan(row), row=row))


def is_bare(row: CallRow) -> bool:
    """Whether a call begins with no tag but with its JSON object."""
    return str(row.opening[0]).startswith("{")


def variants(parts: CallParts) -> Iterator[CallParts]:
    """What stands before or behind arguments, and the same without the id that models leave out."""
    yield parts
    match parts:
        case (str(before), CallSlot.ID, str(behind_id), *rest) if _ID_MEMBER.search(before):
            if behind_id.startswith('"'):
                yield (_ID_MEMBER.sub("", before) + behind_id[1:], *rest)
        case (str(before), CallSlot.ID, str(behind_id), *rest) if re.fullmatch(TAG, before.strip()):
            if re.match(TAG, behind_id):
                yield (behind_id, *rest)


def bare_openings(row: CallRow) -> tuple[str, ...]:
    """How a call that no tag opens begins: as the row says, or with its type first."""
    opening = "".join(part for part in row.opening if isinstance(part, str))
    return opening, f'{{"type": "function", {opening.removeprefix("{")}'


def closing_text(parts: CallParts, call_id: str) -> str:
    """What closes the only call of a message as the template writes it."""
    return "".join(part if isinstance(part, str) else call_id for part in parts)


# --- forms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Behind:
    """The ways to go on behind a call: `takes_members` of its JSON object."""

    paths: tuple[Path, ...]
    takes_members: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The words that they begin with."""
        firsts = (path.steps[0] for path in self.paths)
        words = (step.text for step in firsts if isinstance(step, Word))
        return tuple(dict.fromkeys([*words, *([","] if self.takes_members else [])]))

    def without(self, word: str) -> tuple[Path, ...]:
        """The rest of those that begin with the word."""
        return behind(self.paths, word)


def _form(row: CallRow, tag: str, *, opened: str) -> CallForm:
    """The form of the row's calls behind `tag`, of which `opened` belongs to the row's opening."""
    words = [part for parts in (row.opening, row.middle, row.between or (), row.closing) for part in parts]
    inner = dict.fromkeys(found for text in words if isinstance(text, str) for found in re.findall(TAG, text))
    follows, closed = _behind(row, ()), _behind(row, (), is_closed=True)
    ends = tuple(each for each in follows.tags if re.fullmatch(TAG, each) and each != tag)

    raw = [str(parts[0]).lstrip()[:1] for parts in (row.between, row.closing) if parts]
    fences = [word for word in follows.tags if len(word) > 2 and not any(map(str.isalnum, word))]
    firsts = {word[0] for word in follows.tags if word != "]" or "]" in raw}

    def offered(tools: Sequence[ToolSpec]) -> Offered:
        return Offered(frozenset(tool.name for tool in tools), alone=is_bare(row))

    def scan(tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
        return _scan(row, opened, offered(tools), draft)

    def broken(text: str, tools: Sequence[ToolSpec]) -> EndOfBroken:
        names, odd = offered(tools).names, offered(tools).odd
        calls = [path for path in (*_behind(row, odd).paths, *_openings(row, "", odd)) if not path.closes]
        opens = [tag] if re.fullmatch(TAG, tag) else []
        return EndOfBroken(text, CallContext(ends, opens, fences, calls, names, firsts))

    def follow(word: str, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan | None:
        return _follow(_behind(row, offered(tools).odd), word, offered(tools), draft)

    def follow_closed(word: str, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan | None:
        return _follow(_behind(row, offered(tools).odd, is_closed=True), word, offered(tools), draft)

    return CallForm(
        NAME,
        tag,
        scan,
        inner_tags=tuple(each for each in inner if each != tag),
        close_tags=ends,
        at_start=is_bare(row) and tag == opened,
        follow_tags=follows.tags,
        follow=follow,
        closed=CallForm(NAME, tag, scan, follow_tags=closed.tags, follow=follow_closed, broken=broken),
        broken=broken,
        row=row,
    )


def _follow(follows: _Behind, word: str, offered: Offered, draft: CallDraft) -> Scan | None:
    """Reads on behind `word`; None where that is the end of the calls."""
    if word == "," and follows.takes_members:
        return _behind_members(follows, offered, draft)
    paths = follows.without(word)
    if any(not path.steps for path in paths):
        return None
    is_closing = Word(word, spaced=False).is_closing and any(path.closes for path in paths)
    return _follow_scan(paths, offered, draft, len(word), len(word) if is_closing else 0)


def _first_word(parts: CallParts) -> str:
    first = steps_of(parts)[0]
    assert isinstance(first, Word), "a row begins with text"
    return first.text


# --- paths ------------------------------------------------------------------------------------------------------------


def _rows(row: CallRow) -> tuple[CallRow, ...]:
    """The row, and others that begin with its tag."""
    return (row, _HEADED) if _first_word(row.opening) == _MISTRAL else (row,)


@lru_cache(maxsize=64)
def _openings(row: CallRow, word: str, odd: tuple[str, ...]) -> tuple[Path, ...]:
    """The ways to go on behind `word`, which opened calls."""
    found = [path for each in _rows(row) for head in _heads(each) for path in _calls(each, head, odd)]
    return behind(found, word) if word else tuple(found)


@lru_cache(maxsize=64)
def _behind(row: CallRow, odd: tuple[str, ...], *, is_closed: bool = False) -> _Behind:
    """What may follow a call; `is_closed`: one that is closed already."""
    found: list[Path] = []
    takes_members = bool(_keys(row))
    for each in _rows(row):
        closing = _without_members(each.closing) if takes_members else each.closing
        heads = [_without_members(each.between or ()) if takes_members else each.between or ()]
        if is_bare(each):
            heads = [head for opening in bare_openings(each) for head in ((opening,), (f"; {opening}",))]
        elif is_closed:
            heads = [rest for head in heads if (rest := _behind_closing(head, closing))]
        variety = (later for head in heads for one in _spellings(head) for later in _later(one))
        variety = (short for head in variety for short in _unbracketed(head))
        found += [path for head in dict.fromkeys(variety) if head for path in _calls(each, head, odd)]
        if not is_closed:
            endings = (short for end in _endings(closing) for short in _unbracketed(end))
            found += [Path(steps_of(end), closes=True) for end in dict.fromkeys(endings) if end]
    return _Behind(tuple(found), takes_members and not is_closed)


def _calls(row: CallRow, head: CallParts, odd: tuple[str, ...]) -> Iterator[Path]:
    """The ways behind `head` to the arguments of any tool; those with odd names stand there by name."""
    for name in (*odd, None):
        for middle in variants(row.middle):
            yield Path(steps_of(head, name, middle), name, closing=row.closing)


def _heads(row: CallRow) -> Iterator[CallParts]:
    if is_bare(row):
        yield from ((opening,) for opening in bare_openings(row))
    else:
        yield from _spellings(row.opening)


def _spellings(parts: CallParts) -> Iterator[CallParts]:
    """The same without the word that some write before a tool's name, `functions.`"""
    yield parts
    if parts and isinstance(last := parts[-1], str) and (found := _NAMESPACE.search(last)) is not None:
        yield (*parts[:-1], last[: found.start()])


def _endings(parts: CallParts) -> Iterator[CallParts]:
    """What stands behind arguments, all of it or from a later tag on."""
    for variant in variants(parts):
        yield from _later(variant)


def _later(parts: CallParts) -> Iterator[CallParts]:
    """The same from a later tag on: of a call that was broken the rest is left."""
    yield parts
    match parts:
        case (str(first), *rest):
            later = (found.start() for found in re.finditer(TAG, first))
            yield from ((first[start:], *rest) for start in later if first[:start].strip())


def _unbracketed(parts: CallParts) -> Iterator[CallParts]:
    """The same where the arguments took a bracket of what stands behind them, as their own is missing."""
    yield parts
    match parts:
        case (str(first), *rest) if first.lstrip().startswith("}") and first.strip() != "}":
            yield from _unbracketed((first.lstrip()[1:].lstrip(), *rest))


def _behind_closing(between: CallParts, closing: CallParts) -> CallParts:
    """What opens the next call where the one before is closed already."""
    match between, closing:
        case (str(first), *rest), (str(end),) if first.startswith(end) and first[len(end) :].strip():
            return (first[len(end) :], *rest)
    return ()


def _keys(row: CallRow) -> tuple[str, str] | None:
    """The keys of name and arguments where a call is a JSON object with both."""
    match row.opening, row.middle:
        case (*_, str(before)), (str(after),):
            name, arguments = _NAME_KEY.search(before), _ARGUMENTS_KEY.match(after)
            if name is not None and arguments is not None and not _NAMESPACE.search(before):
                return name[1], arguments[1]
    return None


def _without_members(parts: CallParts) -> CallParts:
    """What stands behind arguments without the members of the call's own object."""
    if not parts or not str(parts[0]).lstrip().startswith(","):
        return parts
    for index, part in enumerate(parts):
        if isinstance(part, str) and "}" in part:
            return (part[part.index("}") :], *parts[index + 1 :])
    return parts


# --- scans ------------------------------------------------------------------------------------------------------------


def _scan(row: CallRow, opened: str, offered: Offered, draft: CallDraft) -> Scan:
    """A call behind what opens it. Calls of tools that are not offered wait for one of a tool that is."""
    before: list[ParsedCall] = []
    odd = offered.odd
    found = yield from lead(_openings(row, opened, odd), offered)
    while found is None or not found.is_offered:
        if found is not None:
            before.append(ParsedCall(found.name, read_arguments((yield from json_container("{")))))
            found = yield from lead(_behind(row, odd).paths, offered)
        else:
            closed = _behind(row, odd, is_closed=True).paths
            found = yield from lead((*closed, *_openings(row, "", odd)), offered)
    draft.closing = found.closing
    draft.before = tuple((call.name, write_json(dict(call.arguments))) for call in before)
    return [*before, (yield from _arguments(found.name, draft))]


def _follow_scan(paths: Sequence[Path], offered: Offered, draft: CallDraft, num_read: int, num_closing: int) -> Scan:
    """What follows a call: the next one, of whichever tool, or the end of all."""
    found = yield from lead(paths, offered, num_read, num_closing)
    if found is None:
        return []
    draft.closing = found.closing
    return [(yield from _arguments(found.name, draft))]


def _arguments(name: str, draft: CallDraft) -> Reader[ParsedCall]:
    draft.open(name)
    draft.is_other = not draft.is_open
    text = yield from json_container("{", draft if draft.is_open else None)
    arguments = read_arguments(text)
    draft.write("}")
    return ParsedCall(name, arguments)


def _behind_members(follows: _Behind, offered: Offered, draft: CallDraft) -> Scan:
    """Members of the call's object that no call needs, and what follows; or the next call, where a bracket of this one
    is missing."""
    char = yield from skip_space((yield))
    if char == "{":
        paths = behind(follows.without(","), "{")
        return (yield from _follow_scan(paths, offered, draft, 0, 0))
    text = yield from _sent(json_container("{"), char)
    paths = follows.without("}")
    if any(not path.steps for path in paths):
        return []
    return (yield from _follow_scan(paths, offered, draft, len(text), len(text)))


def _sent[T](reader: Reader[T], char: str) -> Reader[T]:
    """What the reader reads from `char` on."""
    next(reader)
    while True:
        try:
            reader.send(char)
        except StopIteration as done:
            value: T = done.value
            return value
        char = yield


def _list_scan(row: CallRow) -> Callable[[Sequence[ToolSpec], CallDraft], Scan]:
    """Reads JSON behind the tag: an object or a list of them, with their members in any order."""
    own = _keys(row)
    name_key = own[0] if own is not None else "name"
    argument_keys = (*((own[1],) if own is not None else ()), *ARGUMENT_KEYS)
    tag = _LAST_TAG.search(str(row.closing[-1])) if row.closing else None

    def scan(tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
        text = yield from json_container((yield from skip_space((yield))))
        try:
            value = read_json(text)
        except ValueError as error:
            raise NotACall(str(error)) from error
        calls = [_listed(item, name_key, argument_keys) for item in (value if isinstance(value, list) else [value])]
        if not {call.name for call in calls} & {tool.name for tool in tools}:
            raise NotACall("no call of an offered tool")
        draft.closing = (tag[0],) if tag is not None else ()
        return calls

    return scan


def _listed(item: object, name_key: str, argument_keys: Sequence[str]) -> ParsedCall:
    """A call of a list. An id, a type or the like beside name and arguments say nothing."""
    name = item.get(name_key) if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(name, str) or not name:
        raise NotACall("no name")
    arguments = next((item[key] for key in argument_keys if key in item), None)
    return ParsedCall(name, read_arguments(arguments))
