"""Calls as an answer's events say them: begun, in pieces, ended. For tests that make such events or read them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from kvserve.core import AnswerEvent, OutputDelta, ToolCallBlock, ToolCallEnd, ToolCallPiece, ToolCallStart

INTRICATE = (
    r'{"path": "a\n\"b\".txt", "text": "\ud83d\ude00 \u00e9 日本 😀", '
    r'"n": -1.5e-3, "ok": true, "no": null, "list": [1, {"a": []}]}'
)
"""Arguments with all that a cut can fall into: escapes, halves of a character, numbers, words, what is nested."""


def every_cut(arguments: str) -> Iterator[set[int]]:
    """Each place where arguments can be cut, and then all of them at once."""
    places = range(1, len(arguments))
    yield from ({place} for place in places)
    yield set(places)


def spoken(call: ToolCallBlock, cuts: Iterable[int] = (), *, is_cut: bool = False) -> list[OutputDelta]:
    """The events of a call whose arguments are cut at these places."""
    size = len(call.arguments)
    places = sorted({0, size, *(place for place in cuts if 0 < place < size)})
    pieces = [ToolCallPiece(call.arguments[start:end]) for start, end in pairwise(places)]
    return [ToolCallStart(call.call_id, call.name), *pieces, ToolCallEnd(call, is_cut)]


def calls_of(events: Sequence[AnswerEvent]) -> list[ToolCallEnd]:
    """The calls of these events, each checked to be what its pieces said: begun first, nothing else between."""
    calls: list[ToolCallEnd] = []
    begun: ToolCallStart | None = None
    said = ""
    for event in events:
        match event:
            case ToolCallStart():
                assert begun is None
                begun, said = event, ""
            case ToolCallPiece(text):
                assert begun is not None and text
                said += text
            case ToolCallEnd(call):
                assert begun == ToolCallStart(call.call_id, call.name) and said == call.arguments
                calls.append(event)
                begun = None
            case _:
                assert begun is None, "something came between the pieces of a call"
    return calls
