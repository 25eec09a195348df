"""Derives one chat template's form of calls, at load, by rendering calls. `pair_row.py` knows arguments in pairs.

What is the same in every rendered call is the form. A form is accepted only if new calls are rendered in it and the
reader that is handed in reads them back.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvserve.core import CallParts, CallRow, CallSlot, PairParts, ToolCallBlock
from kvserve.prompt.compiled import CompiledTemplate, Refusal
from kvserve.prompt.pair_row import Unlike, behind_pairs, find_pairs, hard_pairs, typed_tools
from kvserve.prompt.probe import PROBE_TOOL, Prober, probe, talk
from kvserve.prompt.reading_back import ReadsCalls
from kvserve.prompt.steps import THINK_TAGS, Kind, PromptStep, ThinkTags, WireForm, message_dict, tool_dicts, wire_id
from kvserve.prompt.switches import keep_arguments
from kvserve.prompt.thinking_tags import thinking_tags
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.writing import REASONING_TAGS

ANSWER, NEXT = "zqanswer", "zqnext"
NAMES = ("zqfirst", "zqsecond", "zqthird")
HARD = json.dumps(
    {
        "zqtext": "zq \"quoted\" \\ line\nline </tool_call>]} {'a'} <b> é 日",
        "zqobject": {"zqlist": [1, 2.5, -3, True, False, None, {}, [], ""], "": {"zq}": "{"}},
    },
    ensure_ascii=False,
)
"""Arguments that every form must keep unchanged as JSON."""

_REFUSES = "it refuses"
"""A conversation that is tried, such as calls without results: what was found with another one tells more."""

_TWO_WAYS = "it writes two calls in different ways"
_TOOLS = tuple(replace(PROBE_TOOL, name=name) for name in NAMES)

ENDINGS: tuple[tuple[Kind, ...], ...] = (("user",), ())
_DIGITS = re.compile(r"(\d+)")
_OPEN_TAG_AT_END = re.compile(r"(<[^<>\s]*|\[/?[A-Z_]*)\Z")
_TAG = re.compile(r"<[^<>\s]{2,}|\[/?[A-Z_]{2,}\]")
_TAG_START = re.compile(r"[<\[]|\s")


@dataclass(frozen=True, slots=True)
class NoRow:
    """The template's form of calls could not be derived; `reason` says why."""

    reason: str


class _NotJson(Unlike):
    """A call's arguments are not one JSON object."""


@dataclass(frozen=True, slots=True)
class _Asker:
    """Renders calls in one wire form, followed by `ending`. `parallel`: a message may hold several. `tags` are those of
    thinking."""

    prober: Prober
    form: WireForm
    ending: tuple[Kind, ...]
    parallel: bool
    tags: tuple[ThinkTags, ...]

    def answer(self) -> tuple[str, str]:
        """The text before and behind a plain answer."""
        before, found, behind = self._rendered([PromptStep("assistant", ANSWER)]).partition(ANSWER)
        if not found:
            raise Unlike("it writes no plain answer there")
        return before, behind

    def calls(self, *arguments: str) -> tuple[str, tuple[ToolCallBlock, ...]]:
        """A rendered message of calls with these arguments, and the calls with their ids."""
        given = zip(NAMES, arguments, strict=False)
        made = tuple(ToolCallBlock(f"zqid{index}", name, text) for index, (name, text) in enumerate(given))
        text = self._rendered([PromptStep("calls", calls=made)])
        ids = (wire_id(self.form.call_ids, call.call_id, call.name, index) for index, call in enumerate(made))
        return text, tuple(replace(call, call_id=call_id) for call, call_id in zip(made, ids, strict=True))

    def lead(self) -> str:
        """The text between a user's message and an answer."""
        return _behind_user(self._written(talk(["user"]), tail=True))

    def _rendered(self, said: Sequence[PromptStep]) -> str:
        steps = [*talk(["user"]), *said, *(PromptStep(kind, NEXT) for kind in self.ending)]
        text = self._written(steps, tail=False)
        return text.partition(NEXT)[0] if self.ending else text

    def _written(self, steps: Sequence[PromptStep], *, tail: bool) -> str:
        messages = [message_dict(step, self.form) for step in steps]
        template, arguments = self.prober.template, self.prober.arguments or {}
        tools = tool_dicts(self.prober.tools)
        text = template.render(messages, tools, add_generation_prompt=tail, arguments=arguments)
        if not isinstance(text, str):
            raise Unlike(f"{_REFUSES}: {text.reason}")
        return text


def call_row(tokenizer: Tokenizer, reads: ReadsCalls) -> CallRow | NoRow:
    """The row of a model's calls, or why it has none. Raises ModelLoadError."""
    if tokenizer.chat_template is None:
        return NoRow("there is no chat template")
    return find_call_row(CompiledTemplate(tokenizer.chat_template, tokenizer.template_variables), reads)


def find_call_row(template: CompiledTemplate, reads: ReadsCalls) -> CallRow | NoRow:
    """The row of the template's calls, verified with `reads`, or why there is none."""
    own = thinking_tags(template)
    prober = Prober(template, (PROBE_TOOL,), keep_arguments(template), own or THINK_TAGS)
    dialect = probe(prober)
    if dialect is None:
        return NoRow("it cannot be rendered")
    if not dialect.calls:
        return NoRow(_why_no_calls(prober, dialect.form))
    reasons, tags = [], REASONING_TAGS if own is None else (own, *REASONING_TAGS)
    for ending in ENDINGS:
        try:
            row = _derived(_Asker(prober, dialect.form, ending, dialect.parallel_calls, tags), reads)
            return replace(row, has_short_ids=dialect.form.call_ids == "nine_characters")
        except Unlike as unlike:
            reasons.append(str(unlike))
    return NoRow(next((reason for reason in reasons if not reason.startswith(_REFUSES)), reasons[0]))


def shown_row(prober: Prober, form: WireForm, ending: tuple[Kind, ...], tags: tuple[ThinkTags, ...]) -> CallRow:
    """The row of a message of two calls alone, which is not verified. Raises Unlike."""
    asker = _Asker(prober, form, ending, parallel=True, tags=tags)
    row = _row(asker, *asker.answer(), [_gaps(*asker.calls(_easy(0), _easy(1)), None)])
    _check_shape(asker, row)
    return row


def _why_no_calls(prober: Prober, form: WireForm) -> str:
    text = prober.render(talk(["user", "calls"]), form, tail=False)
    return f"it refuses calls: {text.reason}" if isinstance(text, Refusal) else "it writes no calls"


def _derived(asker: _Asker, reads: ReadsCalls) -> CallRow:
    """Raises Unlike."""
    answer = asker.answer()
    try:
        row = _row(asker, *answer, _seen(asker, None))
    except _NotJson:
        pairs = find_pairs(lambda arguments: asker.calls(json.dumps(arguments))[0], NAMES[0])
        row = replace(_row(asker, *answer, _seen(asker, pairs)), pairs=pairs)
    _check_shape(asker, row)
    _check(asker, row, reads)
    return row


def _easy(index: int) -> str:
    return json.dumps({f"zqkey{index}": f"zqvalue{index}"})


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The texts before the first name, behind each name, and behind each arguments; ids are slots already."""

    before: CallParts
    middles: tuple[CallParts, ...]
    behind: tuple[CallParts, ...]


def _seen(asker: _Asker, pairs: PairParts | None) -> list[_Gaps]:
    """The gaps around one, two and three calls, whose arguments are JSON or `pairs`."""
    numbers = (1, 2, 3) if asker.parallel else (1,)
    return [_gaps(*asker.calls(*map(_easy, range(number))), pairs) for number in numbers]


def _gaps(text: str, calls: Sequence[ToolCallBlock], pairs: PairParts | None) -> _Gaps:
    texts: list[str] = []
    position = 0
    for call in calls:
        name = text.find(call.name, position)
        if name < 0:
            raise Unlike("it does not write the name of a call, or writes no call there")
        behind_name = name + len(call.name)
        start = text.find("{", behind_name) if pairs is None else _pairs_start(text, behind_name, call, pairs)
        end = _behind_arguments(text, start, call, pairs) if start >= 0 else None
        if end is None:
            raise _NotJson("its arguments are not one JSON object") if pairs is None else Unlike(_TWO_WAYS)
        texts += [text[position:name], text[behind_name:start]]
        position = end
    parts = [_with_ids(piece, calls) for piece in (*texts, text[position:])]
    return _Gaps(parts[0], tuple(parts[1::2]), tuple(parts[2::2]))


def _pairs_start(text: str, behind_name: int, call: ToolCallBlock, pairs: PairParts) -> int:
    key = text.find(next(iter(json.loads(call.arguments))), behind_name)
    start = key - len(pairs.opening)
    return start if start >= behind_name else -1


def _behind_arguments(text: str, start: int, call: ToolCallBlock, pairs: PairParts | None) -> int | None:
    """Where the call's arguments end; None if the template wrote something else, such as 1 for true."""
    if pairs is not None:
        return behind_pairs(text, start, pairs, json.loads(call.arguments))
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return end if json.dumps(value) == json.dumps(json.loads(call.arguments)) else None


def _with_ids(text: str, calls: Sequence[ToolCallBlock]) -> CallParts:
    """A gap with its ids as slots; its own text must hold none."""
    ids = "|".join(re.escape(call.call_id) for call in calls if ":" not in call.call_id)
    pieces = re.split(ids, text) if ids else [text]
    return _joined(pieces, CallSlot.ID)


def _joined(pieces: Sequence[str], slot: CallSlot) -> CallParts:
    parts: list[str | CallSlot] = []
    for index, piece in enumerate(pieces):
        parts += [slot, piece] if index else [piece]
    return tuple(part for part in parts if part != "")


def _row(asker: _Asker, before_answer: str, behind_answer: str, seen: Sequence[_Gaps]) -> CallRow:
    """The row of the gaps around one, two and three calls."""
    most = seen[-1]
    middle = _alike(most.middles)
    between = _alike(most.behind[:-1]) if len(most.behind) > 1 else None
    opening = _own_opening(asker, before_answer, most.before)
    if between is not None:
        opening = _numbered(opening, between)
    closing = _alike([_without_end(gaps.behind[-1], behind_answer) for gaps in seen])
    row = CallRow(opening, middle, between, closing)
    end = _TAG.match(behind_answer.lstrip())
    if end is not None and any(end[0] in part for part in opening if isinstance(part, str)):
        raise Unlike("calls stand in a message of their own")
    return row


def _check_shape(asker: _Asker, row: CallRow) -> None:
    if not row.opening or not isinstance(row.opening[0], str):
        raise Unlike("nothing stands before a call's name")
    if row.pairs is not None:
        _check_pairs(row)
    elif not row.middle or not isinstance(row.middle[-1], str):
        raise Unlike("nothing stands between a call's name and its arguments")
    if row.between is not None and (not row.between or not isinstance(row.between[0], str)):
        raise Unlike("nothing stands between two calls")
    if _TAG.match(row.opening[0]):
        return
    if row.pairs is not None or not row.opening[0].startswith("{"):
        raise Unlike(f"no tag stands before a call: {row.opening[0]!r}")
    if any(opening in asker.prober.template.source for opening, _ in asker.tags):
        raise Unlike("a call without a tag cannot be told from text behind thinking")


def _check_pairs(row: CallRow) -> None:
    """A call ends with a text of its own, whether another one follows or none."""
    if any(CallSlot in map(type, parts) for parts in (row.opening, row.middle, row.between or (), row.closing)):
        raise Unlike("ids or numbers stand around arguments that are pairs")
    if not row.call_end.strip():
        raise Unlike("nothing ends a call whose arguments are pairs")


def _alike(gaps: Sequence[CallParts]) -> CallParts:
    """Gaps that are equal except for numbers, which become slots."""
    first = gaps[0]
    if all(gap == first for gap in gaps):
        return first
    split = [[_DIGITS.split(part) if isinstance(part, str) else part for part in gap] for gap in gaps]
    found: list[str | CallSlot] = []
    for same in zip(*split, strict=False):
        one = same[0]
        if isinstance(one, CallSlot):
            found.append(one)
            continue
        pieces = [piece if isinstance(piece, list) else [] for piece in same]
        texts = {tuple(piece[::2]) for piece in pieces}
        if len(texts) != 1:
            raise Unlike(_TWO_WAYS)
        for index, piece in enumerate(one):
            is_number = index % 2 and len({other[index] for other in pieces}) > 1
            _append(found, CallSlot.NUMBER if is_number else piece)
    if len({len(gap) for gap in gaps}) != 1:
        raise Unlike(_TWO_WAYS)
    return tuple(found)


def _append(parts: list[str | CallSlot], part: str | CallSlot) -> None:
    if part == "":
        return
    if isinstance(part, str) and parts and isinstance(last := parts[-1], str):
        parts[-1] = last + part
    else:
        parts.append(part)


def _numbered(opening: CallParts, between: CallParts) -> CallParts:
    """The opening, with a slot if the text between calls has a number before the name."""
    match between, opening:
        case (*_, CallSlot.NUMBER, str(tail)), (*first, str(text)):
            found = re.fullmatch(rf"(.*\D)\d+{re.escape(tail)}", text, re.DOTALL)
            if found is not None:
                return (*first, found[1], CallSlot.NUMBER, tail)
    return opening


def _own_opening(asker: _Asker, before_answer: str, before: CallParts) -> CallParts:
    """The text before the first name, without the message's header, thinking and the words for no text."""
    first, *rest = before or ("",)
    text = first if isinstance(first, str) else ""
    length = next((i for i, pair in enumerate(zip(text, before_answer, strict=False)) if pair[0] != pair[1]), None)
    length = min(len(text), len(before_answer)) if length is None else length
    begun = _OPEN_TAG_AT_END.search(text[:length])
    if begun is not None and length < len(before_answer):
        length = begun.start()
    own = text[length:].lstrip()
    for opening, closing in asker.tags:
        if own.startswith(opening) and closing in own:
            own = own.partition(closing)[2].lstrip()
    own = own.removeprefix(asker.form.empty_text.get("assistant", "")).lstrip()
    return (own, *rest) if own else tuple(rest)


def _without_end(ending: CallParts, behind_answer: str) -> CallParts:
    """The text behind the last arguments, without the end of every message."""
    if not ending or not isinstance(ending[-1], str):
        return ending
    last = ending[-1]
    pairs = enumerate(zip(reversed(last), reversed(behind_answer), strict=False))
    length = next((index for index, (one, other) in pairs if one != other), min(len(last), len(behind_answer)))
    if length < len(behind_answer):
        # An equal text that begins inside a tag is equal by chance: the message's end begins with the next tag.
        start = _TAG_START.search(last, len(last) - length)
        length = len(last) - start.start() if start is not None else 0
    own = last[: len(last) - length].rstrip()
    return (*ending[:-1], own) if own else ending[:-1]


# --- the proof --------------------------------------------------------------------------------------------------------


def _check(asker: _Asker, row: CallRow, reads: ReadsCalls) -> None:
    """Check that new calls are rendered in the row's form and read back. Raises Unlike."""
    hard = HARD if row.pairs is None else json.dumps(hard_pairs(row), ensure_ascii=False)
    tools = _TOOLS if row.pairs is None else typed_tools(NAMES, json.loads(hard))
    several = () if row.between is None else ([hard, hard], ["{}", hard, _easy(2)])
    for arguments in ([hard], ["{}"], *several):
        text, calls = asker.calls(*arguments)
        start = position = text.rfind(str(row.opening[0]), 0, text.find(NAMES[0]))
        if _header(asker, _behind_user(text[:start])) != _header(asker, asker.lead()):
            raise Unlike("calls do not stand where an answer begins")
        for call, lead in zip(calls, (row.opening, *[row.between or ()] * len(calls)), strict=False):
            position = _behind_call(text, position, lead, row, call)
        closing = re.compile(_source(row.closing)).match(text, position)
        if closing is None:
            raise Unlike("it does not end calls as the row says")
        reasoning, content, found = reads(row, tools, text[start : closing.end()])
        if reasoning or content or [(name, _value(read)) for name, read in found] != _meant(calls):
            raise Unlike("calls are not read as it writes them")


def _meant(calls: Sequence[ToolCallBlock]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _value(arguments: str) -> object:
    """The arguments that were read, as text where they are not JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _behind_user(text: str) -> str:
    return text.rpartition(str(talk(["user"])[0].text))[2]


def _header(asker: _Asker, text: str) -> str:
    """A message's header without thinking, and without words for no text, at its end."""
    words = (*(tag for tags in asker.tags for tag in tags), asker.form.empty_text.get("assistant", ""))
    while True:
        shorter = text.rstrip()
        for word in words:
            shorter = shorter.removesuffix(word)
        if shorter == text:
            return text
        text = shorter


def _behind_call(text: str, position: int, lead: CallParts, row: CallRow, call: ToolCallBlock) -> int:
    head = re.compile(rf"{_source(lead)}{re.escape(call.name)}{_source(row.middle)}").match(text, max(position, 0))
    end = _behind_arguments(text, head.end(), call, row.pairs) if head is not None else None
    if end is None:
        raise Unlike("it does not write every call as the row says")
    return end


def _source(parts: CallParts) -> str:
    slots = {CallSlot.ID: r"[A-Za-z0-9_.:-]+", CallSlot.NUMBER: r"\d+"}
    return "".join(re.escape(part) if isinstance(part, str) else slots[part] for part in parts)
