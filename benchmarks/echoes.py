"""The next request of a recorded session as its client would have sent it to this server: with the answers that this
server gave, where the recording has those of the server it was recorded with.

The recorded clients give answers back as they came, blocks or items, with ids and signatures, and name calls in their
results. It knows the two protocols of such answers and no server.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from benchmarks.recordings import MESSAGES, Conversation, Reply, Wire, blocks_said, items_said

CALL_NAMES: Mapping[str, str] = {"tool_use": "id", "function_call": "call_id"}
"""Blocks and items that are calls, and the field in which each has its name."""

RESULT_NAMES = ("tool_use_id", "call_id")
"""The fields in which results name their calls."""

UNCALLED = ""
"""In the place of the name of a call that this server's answer lacks."""


class Echoes:
    """The bodies of one session of `/v1/messages` or `/v1/responses`, and what a server answered to them so far. Where
    it `may_call_less`, the results of calls that an answer lacks are left out."""

    def __init__(self, talk: Conversation, *, may_call_less: bool = False) -> None:
        self._talk = talk
        self._may_call_less = may_call_less
        self._said = [request.reply or _part_said(talk, number) for number, request in enumerate(talk.requests)]
        self._answers: dict[int, list[Wire]] = {}

    def said(self, number: int) -> Reply | None:
        """What the model wrote to a request, as far as the client gave it back or would have; None where the client
        left and kept nothing of it."""
        return self._said[number]

    def answered(self, number: int, answer: Sequence[Wire]) -> None:
        """Blocks or items of the server's own answer to a request."""
        self._answers[number] = [dict(part) for part in answer]

    def body(self, number: int) -> Wire:
        """The body of a request, every answer in it this server's. Raises KeyError where one is in it that this server
        has not given, ValueError where one has calls and this server's has not, or belongs to no request."""
        request = self._talk.requests[number]
        field, names = _history_field(request.path), dict[str, str]()
        history = [entry for run in _runs(request.body[field]) for entry in self._echoed(run, names)]
        return {**request.body, field: list(_renamed(history, names))}

    def _echoed(self, run: list[Wire], names: dict[str, str]) -> list[Wire]:
        """A stretch of the history; `names` then has what the calls in it are called now."""
        said = _said_in(run)
        if said is None or said not in self._said:
            if said is not None and said.reasoning:
                raise ValueError("An answer in the history belongs to no request.")
            return run  # somebody else's, or words that the client itself put into the model's mouth
        recorded, answer = _parts(run), [dict(part) for part in self._answers[self._said.index(said)]]
        called, calls = _call_names(recorded), _call_names(answer)
        lacking = [UNCALLED] * (len(called) - len(calls)) if self._may_call_less else []
        names.update(zip(called, [*calls, *lacking], strict=True))
        return [{**run[0], "content": answer}] if _is_message(run[0]) else answer


def _part_said(talk: Conversation, number: int) -> Reply | None:
    """What the client kept of an answer that it left: in the next request it stands behind this one's history. Every
    recorded answer begins with a thought; words without one are the client's own."""
    if number + 1 >= len(talk.requests):
        return None
    request, later = talk.requests[number], talk.requests[number + 1]
    field = _history_field(request.path)
    said = _said_in(next(_runs(later.body[field][len(request.body[field]) :]), []))
    return said if said is not None and said.reasoning else None


def _history_field(path: str) -> str:
    return "messages" if path == MESSAGES else "input"


def _runs(history: Sequence[Wire]) -> Iterator[list[Wire]]:
    """The history in stretches: neighbouring items of an answer together, every other entry by itself."""
    for is_item, entries in groupby(history, key=lambda entry: _is_answer(entry) and not _is_message(entry)):
        run = list(entries)
        yield from [run] if is_item else ([entry] for entry in run)


def _is_answer(entry: Wire) -> bool:
    return entry.get("role") == "assistant" or entry.get("type") in ("reasoning", "function_call")


def _is_message(entry: Wire) -> bool:
    """Whether it is a message of `/v1/messages`; items have a type."""
    return "type" not in entry


def _parts(run: Sequence[Wire]) -> list[Wire]:
    """The blocks of a message, or the items of an answer."""
    if not _is_message(run[0]):
        return list(run)
    content = run[0]["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _said_in(run: Sequence[Wire]) -> Reply | None:
    """What the model said in a stretch; None of anybody else's words."""
    if not run or not _is_answer(run[0]):
        return None
    return blocks_said(_parts(run)) if _is_message(run[0]) else items_said(run)


def _call_names(parts: Sequence[Wire]) -> list[str]:
    return [part[CALL_NAMES[part["type"]]] for part in parts if part["type"] in CALL_NAMES]


def _renamed(entries: Sequence[Wire], names: Mapping[str, str]) -> Iterator[Wire]:
    """Messages, blocks or items whose results name calls as they are called now, without those of calls that are not
    made now."""
    for entry in entries:
        renamed = entry | {field: names[entry[field]] for field in RESULT_NAMES if entry.get(field) in names}
        if isinstance(entry.get("content"), list):
            renamed["content"] = list(_renamed(entry["content"], names))
        if not any(renamed.get(field) == UNCALLED for field in RESULT_NAMES):
            yield renamed
