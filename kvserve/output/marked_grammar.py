"""Writes grammar rules for calls whose strings stand between marks, as the template writes them.

A string holds whatever its reader does not take for its end: a mark may stand in it, but not with the next key or the
call's end behind it. So what stands behind a string, up to where the reader knows that it has ended, is one lexeme.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvserve.core import CallParts, CallRow, PairParts, ToolSpec
from kvserve.output.enforced import Enforced
from kvserve.output.lark import Lark, escaped
from kvserve.output.tool_parsers.arguments import TypedArguments, closed_keys
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import NotACall
from kvserve.output.tool_parsers.marked import MarkedArguments
from kvserve.output.tool_parsers.pairs import marked_of
from kvserve.output.tool_parsers.row_paths import Blank, Offered, PathStep
from kvserve.output.value_grammar import MemberForm, ValueGrammar

_SPACES = r"[ \t\r\n]*"
_NAME = r"[\p{L}\p{Nd}_.\-&&\p{Age=15.0}]+"
"""What a reader takes for any name, with any Python: the oldest, 3.12, knows no newer Unicode."""

_BARRED_NAME = r"[\p{L}\p{N}_.\-]+"
"""That and more, for texts must not hold one."""

_PROBE = "zqprobe"


@dataclass(frozen=True, slots=True)
class MarkedTool:
    """A tool, the part of its schema that is enforced, its name, and what notes that some of it is not."""

    spec: ToolSpec
    parameters: Enforced
    path: str
    lose: Callable[[str], None]


@dataclass(slots=True)
class MarkedGrammar:
    """Writes the calls of a row of marked strings into `lark`. `offered` are the names of all tools of the request."""

    lark: Lark
    row: CallRow
    offered: frozenset[str]
    _reader: MarkedArguments = field(init=False)

    def __post_init__(self) -> None:
        reader = marked_of(self.row)
        assert reader is not None, "only such rows are written here"
        self._reader = reader

    def calls(self, tools: Sequence[MarkedTool], *, many: bool) -> str:
        """A rule for a call of one of the tools, or for several in a row, from the first one's name on up to what
        closes them all."""
        lark, end, middle = self.lark, self.row.call_end, _text(self.row.middle)
        between, closing = _text(self.row.between or ()), _text(self.row.closing)
        has_more = many and self.row.between is not None
        ended = lark.reserved()
        heads = [(tool.spec.name + middle, self._arguments(tool, ended)) for tool in tools]
        first = lark.rule(" | ".join(f"{lark.tag(head)} {behind}" for head, behind in heads))
        if any(each.middle for each in self._reader.ends):  # then the next call's name tells that this one has ended
            more = [f"{lark.tag(between + head)} {behind}" for head, behind in heads] if has_more else []
            lark.fill(ended, " | ".join([lark.tag(closing), *more]))
            return first
        rest, lead = lark.tag(closing[len(end) :]), lark.tag(between[len(end) :])
        ways = [rest] * bool(rest) + [f"{lead} {first}"] * has_more
        behind = f"({' | '.join(ways)}){'' if rest else '?'}" if ways else ""
        lark.fill(ended, f"{lark.tag(end)} {behind}")
        return first

    # --- one call -----------------------------------------------------------------------------------------------------

    def _arguments(self, tool: MarkedTool, ended: str) -> str:
        """The arguments of a tool, from behind what opens them, and the call's end."""
        pairs, keys = self._pairs, frozenset(filter(_is_text, closed_keys(tool.spec.parameters)))
        assert pairs.spelling.marks is not None, "strings stand between marks"
        ends = self._reader.string_ends(keys, Offered(self.offered, alone=False))
        pattern = "|".join(_pattern(steps, names) for steps, names in ends)
        # a lexeme of a text ends at each mark: an end that holds one itself would be seen by none
        holds_mark = any(pairs.spelling.marks[1][0] in key for key in keys)
        text = self.lark.marked(pairs.spelling.marks, ".*" if holds_mark else pattern)
        counting = keys if self._reader.names_count else frozenset[str]()

        def writes(key: str) -> bool:
            return self._is_plain(key, counting) or self._tells_key(tool.spec, key)

        form = MemberForm(
            key=lambda key: key if writes(key) else None,
            any_key="|".join(escaped(key) for key in sorted(counting) if writes(key)) if counting else _NAME,
            between=pairs.closing + pairs.between,
            lead=pairs.value,
            opening=pairs.opening,
        )
        values = ValueGrammar(
            self.lark, pairs.spelling, tool.parameters, tool.path, tool.lose, lambda said: self._tells(tool.spec, said)
        )
        return values.members(tool.parameters.schema, "", form, ended, text=text)

    @property
    def _pairs(self) -> PairParts:
        assert self.row.pairs is not None, "only such rows are written here"
        return self.row.pairs

    # --- what is read back --------------------------------------------------------------------------------------------

    def _is_plain(self, key: str, counting: frozenset[str]) -> bool:
        """Whether a key is one like any other, which a reader tells by what it is made of."""
        return bool(key) and all(map(Blank(None, spaced=False).takes, key)) and (not counting or key in counting)

    def _tells_key(self, spec: ToolSpec, key: str) -> bool:
        """Whether a key is read back behind a string."""
        return key != _PROBE and self._reads(spec, {_PROBE: "x", key: "x"})

    def _tells(self, spec: ToolSpec, value: object) -> bool:
        """Whether the value of an argument is read back."""
        return self._reads(spec, {_PROBE: value})

    def _reads(self, spec: ToolSpec, said: Mapping[str, object]) -> bool:
        pairs, end = self._pairs, self._reader.ends[-1]
        each = (
            f"{pairs.opening}{key}{pairs.value}{pairs.spelling.written(value)}{pairs.closing}"
            for key, value in said.items()
        )
        arguments = TypedArguments(spec.name, (spec,), CallDraft(), spelling=pairs.spelling)
        scan = self._reader.read(arguments, Offered(self.offered, alone=False), counts=True)
        next(scan)
        text = f"{pairs.between.join(each)}{end.end}{end.behind}"
        try:
            for char in text[:-1]:
                scan.send(char)
        except (StopIteration, NotACall):
            return False
        try:
            scan.send(text[-1])
        except StopIteration:
            return json.dumps(dict(arguments.call().arguments), sort_keys=True) == json.dumps(
                dict(said), sort_keys=True
            )
        except NotACall:
            return False
        return False


def _pattern(steps: Sequence[PathStep], names: frozenset[str]) -> str:
    """These steps as a regular expression, a blank of which is one of the names, any if there are none."""
    blank = f"({'|'.join(map(escaped, sorted(names)))})" if names else _BARRED_NAME
    texts = (
        (_SPACES if step.spaced else "") + (blank if isinstance(step, Blank) else escaped(step.text)) for step in steps
    )
    return "".join(texts)


def _is_text(key: str) -> bool:
    """Whether a text can hold the key: no half of a character can be written."""
    return not any("\ud800" <= char <= "\udfff" for char in key)


def _text(parts: CallParts) -> str:
    return "".join(part for part in parts if isinstance(part, str))
