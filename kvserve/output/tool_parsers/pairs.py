"""Calls in the form that a model's own template writes, as a `CallRow` says it, whose arguments are keys and values.

A value ends where the next key with all its tags, or all tags that end a call, follow it, with any white space between
the tags; the same tags apart, in another order or without a key are the value's own text. A line end on either side of
a value is the form's where the template writes one there; any other character is the value's. Where no such tags follow
by the end of the turn, a value ends at the first place where all tags of a call's end but the last one stand. A call is
certain as its first key opens. A tool that is not offered is called beside one that is, and else is text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvserve.core import CallParts, CallRow, PairParts, ToolSpec
from kvserve.output.tool_parsers.arguments import OwnLines, TypedArguments
from kvserve.output.tool_parsers.chains import ChainEnd, NextKey, text_before
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import (
    END,
    NOT_IN_KEYS,
    CallForm,
    Chain,
    NotACall,
    ParsedCall,
    Reader,
    Scan,
)
from kvserve.output.tool_parsers.json_text import write_json
from kvserve.output.tool_parsers.marked import CallEnd, MarkedArguments
from kvserve.output.tool_parsers.row_paths import TAG, Offered, Path, PathPlace, after, steps_of

_SEAM = re.compile(r"\s*\n\s*|(?<=[>\]])[ \t]*(?=[<\[])")


def form_of(row: CallRow, name: str) -> CallForm:
    """The form of the row's calls, under this name."""
    reading = _PairReading.of(row)
    inner = dict.fromkeys(tag for text in reading.texts for tag in re.findall(TAG, text))
    follow_tags = tuple(chain[0] for chain in (reading.next_call, reading.close) if chain)
    return CallForm(
        name,
        reading.tag,
        reading.scan,
        inner_tags=tuple(tag for tag in inner if tag != reading.tag),
        close_tags=reading.end[-1:],
        follow_tags=follow_tags,
        follow=reading.follow if follow_tags else None,
        row=row,
    )


def ends_of(row: CallRow) -> tuple[Chain, ...]:
    """The tags at which a forced value ends: with those before the next key, and with all that end a call."""
    reading = _PairReading.of(row)
    return reading.more.tags, *reading.lasts


def marked_of(row: CallRow) -> MarkedArguments | None:
    """The reader of the row's arguments, where their strings stand between marks."""
    return _PairReading.of(row).marked


def chain_of(text: str) -> Chain:
    """The tags of a text, between which any white space may stand."""
    return tuple(part for part in _SEAM.split(text) if part)


@dataclass(frozen=True, slots=True)
class _Values:
    """What stands around values: `leads` behind a key, before a string and before anything else, and `closing` behind
    a value; `lines` are those line ends that belong to the form."""

    leads: tuple[Chain, Chain]
    closing: str
    lines: OwnLines

    @classmethod
    def of(cls, pairs: PairParts) -> "_Values":
        """What a row says of them."""
        leads = [pairs.value, pairs.value if pairs.other_value is None else pairs.other_value]
        lines = OwnLines(all(map(_ends_line, leads)), _ends_line(pairs.closing[::-1]))
        before, other = (_chain(lead[:-1] if lines.before else lead) for lead in leads)
        return cls((before, other), pairs.closing[1:] if lines.behind else pairs.closing, lines)


def _ends_line(text: str) -> bool:
    """Whether a line end, and no more white space, ends the text."""
    return text.endswith("\n") and not text[:-1][-1:].isspace()


def _chain(text: str) -> Chain:
    """The tags of a text, with the white space on its ends."""
    body = text.strip()
    if not body:
        return (text,)
    chain = [*chain_of(body)]
    chain[0] = text[: text.index(body)] + chain[0]
    chain[-1] += text[text.index(body) + len(body) :]
    return tuple(chain)


@dataclass(frozen=True, slots=True)
class _PairReading:
    """One row as its calls are read: behind the text `head` of the first call, `next_head` of the next ones.

    `end` are the tags that end a call. Behind it the chain `next_call` opens another one, and `close` closes them all;
    `next_call` is empty where that takes the tag that opened the first one.
    """

    row: CallRow
    pairs: PairParts
    values: _Values
    tag: str
    head: str
    next_head: str
    end: Chain
    next_call: Chain
    close: Chain

    @classmethod
    def of(cls, row: CallRow) -> "_PairReading":
        """The reading of a row of pairs."""
        assert row.pairs is not None, "only such rows are read here"
        opening, between, closing = map(_text, (row.opening, row.between or (), row.closing))
        found = re.match(TAG, opening)
        assert found is not None, "a row begins with a tag"
        tag, num_end = found[0], len(row.call_end)
        rest = between[num_end:].lstrip()
        next_call = () if rest.startswith(tag) else chain_of(rest.rstrip())
        head = opening.removeprefix(tag)
        next_head = rest.removeprefix(next_call[0]) if next_call else ""
        end, close = chain_of(row.call_end), chain_of(closing[num_end:].lstrip())
        return cls(row, row.pairs, _Values.of(row.pairs), tag, head, next_head, end, next_call, close)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is the same in every call."""
        row, pairs = self.row, self.pairs
        parts = map(_text, (row.opening, row.middle, row.between or (), row.closing))
        around = pairs.spelling.marks or ()
        return (*parts, pairs.opening, pairs.value, pairs.other_value or "", pairs.closing, pairs.between, *around)

    @property
    def marked(self) -> MarkedArguments | None:
        """The reader of arguments whose strings stand between marks."""
        if self.pairs.spelling.marks is None:
            return None
        end, closing = self.row.call_end, _text(self.row.closing)[len(self.row.call_end) :]
        if not self.next_call:
            return MarkedArguments(self.pairs, (CallEnd(self._last(()), end),))
        another = CallEnd(self._last(self.next_call), end, self.next_call[0] + self.next_head, _text(self.row.middle))
        return MarkedArguments(self.pairs, (another, CallEnd(self._last(self.close), end, closing)))

    @property
    def more(self) -> NextKey:
        """What stands between a value and the next one."""
        tags = chain_of(self.values.closing + self.pairs.between + self.pairs.opening)
        return NextKey(tags, tuple(dict.fromkeys(self.values.leads)), may_be_empty=True)

    @property
    def lasts(self) -> tuple[Chain, ...]:
        """What may stand behind the last value."""
        return tuple(dict.fromkeys(map(self._last, (self.next_call, self.close))))

    # --- scans --------------------------------------------------------------------------------------------------------

    def scan(self, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan:
        """Reads what follows the opening tag."""
        return (yield from self._calls(self.head, tools, draft))

    def follow(self, word: str, tools: Sequence[ToolSpec], draft: CallDraft) -> Scan | None:
        """Reads on behind the first tag of the next call, or of what closes the calls; None if that is all of it."""
        if self.next_call and word == self.next_call[0]:
            return self._calls(self.next_head, tools, draft, is_beside=True)
        return _closing(self.close[1:]) if self.close[1:] else None

    def _calls(self, head: str, tools: Sequence[ToolSpec], draft: CallDraft, *, is_beside: bool = False) -> Scan:
        """A call behind `head`. Calls of tools that are not offered wait for one of a tool that is, unless one
        `is_beside` them already."""
        before: list[ParsedCall] = []
        offered = Offered(frozenset(tool.name for tool in tools), alone=False)
        called: str | None = None
        while True:
            read = PathPlace(Path((), called)) if called is not None else None
            place = read or (yield from _head(list(self._paths(head, offered))))
            is_offered = place.called in offered.names
            counts = is_offered or is_beside
            if counts:
                draft.before = tuple((call.name, write_json(dict(call.arguments))) for call in before)
                draft.closing = (_text(self.row.closing)[len(self.row.call_end.rstrip()) :],)
            draft.is_other = not is_offered
            arguments = TypedArguments(place.called, tools, draft, self.values.lines, self.pairs.spelling)
            chain: Chain = self.end
            if not place.path.closes:
                if self.marked is None:
                    end = yield from self._arguments(arguments)
                else:
                    end, called = yield from self.marked.read(arguments, offered, counts=counts)
                chain = end.chain
                is_behind = end.lacks_end or chain != self._last(())
                draft.num_behind = end.num_last if counts and is_behind else 0
            before.append(arguments.call())
            if counts:
                return before
            if not self.next_call or chain == self._last(self.close):
                raise NotACall("no call of an offered tool")
            head = self.next_head if chain == self._last(self.next_call) else self.next_call[0] + self.next_head

    def _paths(self, head: str, offered: Offered) -> Iterator[Path]:
        """The ways behind `head` to a call's first key, or to the end of a call without arguments."""
        middle = _text(self.row.middle)
        for name in (*offered.odd, None):
            lead = (head,) if head else ()
            yield Path(steps_of(lead, name, (middle + self.pairs.opening,)), name)
            yield Path(steps_of(lead, name, (middle + self.row.call_end.rstrip(),)), name, closes=True)

    def _arguments(self, arguments: TypedArguments) -> Reader[ChainEnd]:
        """Reads the arguments from behind the opening of the first key on, up to what ends their call."""
        arguments.open()
        string, other = self.values.leads
        more = self.more
        may_lack_end = [self._last(self.close)] if self.close or len(self.end) > 1 else []
        key: list[str] = []
        try:
            first = yield from text_before([string, other], partial(_put_key, key))
        except NotACall:
            arguments.break_off()
            raise
        name, lead = "".join(key), first.chain
        while True:
            is_string = None if self.pairs.other_value is None else lead == string
            end = yield from arguments.read(
                name, more=more, last=self.lasts, may_lack_end=may_lack_end, is_string=is_string
            )
            if end.key is None:
                return end
            name, lead = end.key.name, end.chain

    def _last(self, behind: Chain) -> Chain:
        """What stands behind the last value: all tags that end a call, and the first one behind it."""
        return (*chain_of(self.values.closing + self.row.call_end), *behind[:1])


def _text(parts: CallParts) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def _put_key(key: list[str], text: str) -> None:
    """Add to a key, which stands on one line and holds no tag."""
    if not NOT_IN_KEYS.isdisjoint(text):
        raise NotACall("unexpected text in a key")
    key.append(text)


def _head(paths: Sequence[Path]) -> Reader[PathPlace]:
    """The end of the first path that the text follows. Raises NotACall where none goes on."""
    places = [PathPlace(path) for path in paths]
    while places:
        char = yield
        if char == END:
            break
        places = [place for before in places for place in after(before, char)]
        if (found := next((place for place in places if place.is_end), None)) is not None:
            return found
    raise NotACall("no call of an offered tool")


def _closing(chain: Chain) -> Scan:
    yield from _head([Path(steps_of(("".join(chain),)))])
    return []
