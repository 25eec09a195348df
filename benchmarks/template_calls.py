"""The column of the template matrix for calls: what the template writes of a call is read back, to the byte.

The text of a turn, as transformers writes it, comes in random pieces; names, values and all other text must be those
that were written.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.template_cases import NOTE, READ, SAVE, SORT, call
from benchmarks.template_cell import Cell, Judged, judged
from benchmarks.template_model import Model, as_sent
from benchmarks.template_reference import Conversation, NotRendered, Reference, Wire
from benchmarks.template_turns import NativeTurn, native_turn, spoken
from kvserve.core import ContentDelta, OutputDelta, ReasoningDelta, ToolCallEnd
from kvserve.output.splitter import Splitter

NUM_CUTS = 6
TOOLS = (READ, SAVE)
NO_NOTE: Mapping[str, Any] = {"note": None}
_CODE = "def f(x):\n    if x:\n\treturn 1\n    return 2\n"

VALUES: Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "text": (("save_all", {"text": "größe 東京 🫠, a  b"}),),
    "nested": (("save_all", {"options": {"a": {"b": [1, {"c": "d e"}]}, "f": [], "g": True}}),),
    "list": (("sort_all", {"items": ["x", "y z", "null"]}),),
    "quotes": (("save_all", {"text": 'say "hi" \\n \\ \'ok\' {"a": 1}'}),),
    "lines": (("save_all", {"text": _CODE}),),
    "edges": (("save_all", {"text": "    return 1\n"}),),
    "empty lines": (("save_all", {"text": "\n\n  x "}),),
    "empty": (("save_all", {"text": "", "count": 0}),),
    "no arguments": (("save_all", {}),),
    "numbers": (("save_all", {"count": -12, "ratio": 2.5, "text": "3"}),),
    "words": (("save_all", {"flag": False, "text": "null"}),),
    "words as text": (("save_all", {"text": "true", "flag": True}),),
    "null": (("note_all", {"note": None, "text": "None"}),),
    "null or text": (("note_all", {"note": "null"}),),
    "parallel": (("read_file", {"path": "a b", "lines": 3}), ("save_all", {"text": "c", "flag": True})),
}
"""The calls of each case; that of tags in values is made of the template's own."""

TAGS, BEFORE = "tags in a value", "text before"
_TAG = re.compile(r"</?[|｜]?[^<>\s'\"{}]{1,40}[|｜]?>|\[/?[A-Z_]{2,20}\]|</?\w+=?\"?")

_ASKED: Wire = {"role": "user", "content": "x"}

type Calls = tuple[tuple[str, Mapping[str, Any]], ...]


def call_cells(model: Model, reference: Reference) -> Iterator[Cell]:
    """One cell for each case."""
    for name, calls in VALUES.items():
        yield judged("calls", name, _case(model, reference, calls))
    yield judged("calls", TAGS, lambda: _tags(model, reference))
    yield judged("calls", BEFORE, _case(model, reference, VALUES["parallel"][:1], "I look."))


def _case(model: Model, reference: Reference, calls: Calls, text: str = "") -> Callable[[], Judged]:
    return lambda: _judge(model, reference, calls, text)


def _judge(model: Model, reference: Reference, calls: Calls, text: str = "") -> Judged:
    turn = written(model, reference, calls, text)
    if isinstance(turn, NotRendered):
        return turn
    if calls == VALUES["null or text"] and written(model, reference, ((calls[0][0], NO_NOTE),)) == turn:
        return NotRendered('the template writes null and "null" alike')
    return read_back(model, turn, calls, text)


def written(model: Model, reference: Reference, calls: Calls, text: str = "") -> NativeTurn | NotRendered:
    """The turn with these calls in the template's form."""
    said = [call(f"call{place}aaaa", name, arguments) for place, (name, arguments) in enumerate(calls)]
    return native_turn(model, reference, spoken(text or None, *said), tools_of(calls))


def tools_of(calls: Calls) -> tuple[Wire, ...]:
    """The tools that are offered: those with types that some templates cannot describe only where they are called."""
    called = {name for name, _ in calls}
    return (*TOOLS, *(each for each in (NOTE, SORT) if each["function"]["name"] in called))


def _tags(model: Model, reference: Reference) -> Judged:
    """Tags of the template's own form of calls, but for those that would end the answer, in the middle of a value."""
    turn = written(model, reference, VALUES["parallel"][:1])
    if isinstance(turn, NotRendered):
        return turn
    stops = {model.tokenizer.decode([token]) for token in model.tokenizer.stop_token_ids}
    tags = [tag for tag in dict.fromkeys(_TAG.findall(turn.text)) if tag not in stops]
    value = f"see {' or '.join(tags or ['</parameter>'])} here, then </parameter> too"
    return _judge(model, reference, (("save_all", {"text": value, "count": 1}),))


def read_back(model: Model, turn: NativeTurn, calls: Calls, text: str) -> str | None:
    """Why the turn does not say these calls and this text, in any of several cuts."""
    draw = random.Random(len(turn.text))
    wanted = [(name, exact(arguments)) for name, arguments in calls]
    for number in range(NUM_CUTS):
        size = len(turn.text)
        many = (0, size, 1, 3, 6, 12)[number % 6]
        cuts = sorted(draw.sample(range(1, size), min(many, size - 1))) if size > 1 else []
        pieces = [turn.text[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        found, said = read(model, pieces, tools_of(calls), starts_in_reasoning=turn.opens_reasoning)
        if found != wanted:
            return _unlike(found, wanted, turn.text)
        if said.strip() != text:
            return f"beside the call is read {said.strip()!r}"[:160]
    return None


def read(
    model: Model, pieces: Sequence[str], offered: Sequence[Wire], *, starts_in_reasoning: bool
) -> tuple[list[tuple[str, str]], str]:
    """The calls of an answer in these pieces, and all other text."""
    tools = as_sent(Conversation((_ASKED,), tuple(offered)))[1]
    splitter = Splitter(model.output_format, starts_in_reasoning=starts_in_reasoning, tools=tools)
    deltas: list[OutputDelta] = [delta for piece in pieces for delta in splitter.feed(piece)]
    deltas += splitter.finish(cut=False)
    said = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta | ReasoningDelta))
    ends = [delta.call for delta in deltas if isinstance(delta, ToolCallEnd)]
    return [(end.name, exact_text(end.arguments)) for end in ends], said


def exact(arguments: Mapping[str, Any]) -> str:
    """The arguments in a form in which 1, 1.0, "1" and true differ; an object's keys have no order."""
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True)


def exact_text(arguments: str) -> str:
    """The same of arguments as they were sent."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return f"no JSON: {arguments}"
    return exact(value) if isinstance(value, dict) else f"no object: {arguments}"


def _unlike(found: list[tuple[str, str]], wanted: list[tuple[str, str]], text: str) -> str:
    if not found:
        return f"not read: {text.strip()[:60]!r}"
    if [name for name, _ in found] != [name for name, _ in wanted]:
        return f"calls of {', '.join(name for name, _ in found)} are read"
    pair = next((mine, theirs) for (_, mine), (_, theirs) in zip(found, wanted, strict=True) if mine != theirs)
    place = next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    start = max(0, place - 16)
    return f"{pair[0][start : place + 24]!r} for {pair[1][start : place + 24]!r}"
