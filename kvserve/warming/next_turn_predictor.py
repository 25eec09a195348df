"""What a session's next request must begin with: the job for an idle engine that follows from a turn that is over.

    learn what the client changed since its last turn -> the history that it will send -> render it twice, with two
    different last messages -> what both prompts begin with

It joins rooms and writes a prompt as requests do, so a guess is what that request would be read as. Nothing
here decides what is reused: a wrong guess costs idle time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvserve.canonical.canonicalise import canonicalise
from kvserve.core import Block, Message, Principal, RequestId, TextBlock, ToolCallBlock, ToolResultBlock, Turn
from kvserve.engine.warming import WarmJob
from kvserve.identity.reading import RecognisedTurn
from kvserve.requests.prompt_of_turn import SharedBeginning, shared_beginning
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import FinishedTurn, WatchedTurn
from kvserve.sessions.seen import TurnRecord, common_length
from kvserve.warming.client_behaviour import Habits, History, history_after, learn, place_of

MIN_NEW_TOKENS = 8
"""Fewer tokens are not worth a job: the end of an answer and the header of the next message are about as many."""

MAX_LINES = 1_024
MAX_CLIENTS = 64

FIRST_WORDS = ("a", "\u2058")
"""Two beginnings of a message that nobody knows yet: what both prompts have in common holds nothing of it."""

type Client = tuple[str, Principal, str, bytes]
"""Who may have the same habits: the same model, and so template, principal, protocol and set of tools."""


@dataclass(frozen=True, slots=True)
class Line:
    """A conversation up to one of its turns: the name that its jobs share, and what its client was seen to do."""

    name: str
    habits: Habits


@dataclass(frozen=True, slots=True)
class Over:
    """A turn that is over, complete, and may be gone on from: what was asked, how it was read, who knows what was
    answered, and the model's name."""

    turn: Turn
    reading: RecognisedTurn
    running: WatchedTurn
    model: str


def over(finished: FinishedTurn, running: WatchedTurn) -> Over | None:
    """The turn, if its answer is whole and something may be kept of it; a turn that the watchdog ended is lost."""
    turn, session = finished.turn, finished.turn.session
    is_whole = finished.facts.finish_reason in ("stop", "length", "tool_calls") and not running.is_lost
    if finished.reading is None or session.leaves_no_record or not is_whole or finished.prompt.continues:
        return None
    return Over(turn, finished.reading, running, finished.facts.model) if running.said.blocks else None


class NextTurnPredictor:
    """What is known of conversations and their clients, bounded, the least recently used first. One thread at a time
    asks for jobs; `clear` may come from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: OrderedDict[RequestId, Line] = OrderedDict()
        self._clients: OrderedDict[Client, Habits] = OrderedDict()

    def job_after(self, turn: Over, served: ServedModel) -> WarmJob | None:
        """What is to be computed before the next turn of this conversation; None where that is next to nothing, or
        nobody knows. Raises BadRequest where the template refuses what it took before."""
        line = self._line_of(turn)
        guess = guessed(turn, line.habits, served) if served.keeps_kv else None
        if guess is None:
            return None
        num_known = common_length(turn.running.context.ids, guess.tokens.ids)
        if len(guess.tokens) - num_known <= MIN_NEW_TOKENS:
            return None
        return WarmJob(
            tokens=guess.tokens,
            kind="next_turn",
            message_starts=guess.message_starts,
            key=line.name,
            images=guess.images_of(turn.turn),
            ends_before_user=not turn.running.said.calls,
            partition=served.partition(turn.turn.session.principal),
            owner=served.conversations.owner(turn.turn.session).name,
        )

    def clear(self) -> None:
        """Forget the conversations; clients keep their habits."""
        with self._lock:
            self._lines.clear()

    def forget_clients(self) -> None:
        """Forget what clients were seen to do."""
        with self._lock:
            self._clients.clear()

    def _line_of(self, turn: Over) -> Line:
        """The conversation that a turn belongs to, with what this turn shows of its client."""
        before, request_id = turn_before(turn), turn.turn.request_id
        client = turn.model, turn.turn.session.principal, turn.turn.protocol, turn.reading.identity.tools_digest
        with self._lock:
            last = self._lines.get(before.request_id) if before is not None else None
            known = last.habits if last is not None else self._clients.get(client, Habits())
            if before is not None and last is not None:  # whatever else goes on from there is a line of its own
                self._lines[before.request_id] = Line("", known)
        name = last.name if last is not None else ""
        line = Line(name or f"{turn.model} {request_id}", known if before is None else _learned(known, before, turn))
        with self._lock:
            _put(self._lines, request_id, line, MAX_LINES)
            _put(self._clients, client, line.habits, MAX_CLIENTS)
        return line


def _put[Key, Value](kept: OrderedDict[Key, Value], key: Key, value: Value, max_entries: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > max_entries:
        kept.popitem(last=False)


def turn_before(turn: Over) -> TurnRecord | None:
    """The turn that this one goes on from with its answer; a record that only shares a beginning is another's."""
    before = turn.reading.before
    if before is None or before.leaf.written is None:
        return None
    *asked, answer = before.messages
    place = place_of(answer, asked, turn.turn.messages, _identity_in(turn))
    return before if place is not None else None


def _learned(known: Habits, before: TurnRecord, turn: Over) -> Habits:
    *asked, answer = before.messages
    return learn(known, asked, answer, turn.turn.messages, _identity_in(turn))


def _identity_in(turn: Over) -> Callable[[Message], bytes]:
    rules = turn.reading.identity.rules
    return lambda message: canonicalise(message, rules).digest


# --- the guess -------------------------------------------------------------------------------------------------------


def guessed(turn: Over, habits: Habits, served: ServedModel) -> SharedBeginning | None:
    """What the prompt of the next request begins with, as far as that is known; None where nothing is."""
    identity = _identity_in(turn)
    history = history_after(habits, turn.turn.messages, turn.running.said, lambda message: not identity(message))
    if history is None:
        return None
    # calls that the client names anew have ids that nobody knows either: another one in each guess
    marks = [str(number) if habits.renames_calls else "" for number in range(len(FIRST_WORDS))]
    turns = [
        replace(turn.turn, messages=_next_messages(history, words, mark))
        for words, mark in zip(FIRST_WORDS, marks, strict=True)
    ]
    return shared_beginning(turns, served)


def _next_messages(history: History, words: str, mark: str) -> tuple[Message, ...]:
    """The history with what may follow: results of the calls, else the user's words, and what the client has at the end
    of every request."""
    *before, answer = history.messages
    answer = replace(answer, blocks=tuple(_marked(block, mark) for block in answer.blocks))
    said: Sequence[Message] = [
        Message("tool", (ToolResultBlock(call.call_id, (TextBlock(words),)),)) for call in answer.calls
    ]
    return (*before, answer, *(said or [Message("user", (TextBlock(words),))]), *history.carried)


def _marked(block: Block, mark: str) -> Block:
    return replace(block, call_id=block.call_id + mark) if mark and isinstance(block, ToolCallBlock) else block
