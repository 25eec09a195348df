"""Sessions of recorded clients in closed loop over three protocols: the beginnings of their instructions, some of their
tools, and their words; the answers in their histories are the server's own. It knows where to ask and no proxy."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import cycle
from typing import Any

from benchmarks.anthropic_bodies import joined_blocks
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, Conversation, read_recordings, shared_folder
from tests.e2e.cluster import Reply

CLIENTS = ("pi-0.87-anthropic", "pi-0.87-qwen", "codex")
"""One of each protocol, in turn."""

NUM_THREADS = 4
MAX_TOKENS = 24
MAX_TEXT_CHARACTERS, MAX_SAID_CHARACTERS, MAX_TOOLS = 600, 100, 1
"""What is kept of each text, of what a user says, and of the tools: who gets a session does not hang on it, and a small
machine has to compute all of it forty times."""

KEPT_FIELDS = ("model", "system", "tools", "instructions")

type Ask = Callable[[str, dict[str, Any], Mapping[str, str]], Reply]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the server said of one turn."""

    backend: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_answer_tokens: int

    @property
    def reuse(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


@dataclass
class Loop:
    """One session. Every second one names itself; the others are known by their first words."""

    path: str
    body: dict[str, Any]
    words: Iterator[str]
    headers: dict[str, str]
    turns: list[Turn] = field(default_factory=list)
    num_sent_again: int = 0

    def turn(self, ask: Ask) -> None:
        """Send the next request and put its answer into the history. An answer that breaks off is sent again once, as
        clients do."""
        if self.turns:
            self._history.append({"role": "user", "content": next(self.words)})
        try:
            backend, answer = self._asked(ask)
        except (OSError, HTTPException):
            self.num_sent_again += 1
            backend, answer = self._asked(ask)
        self.turns.append(Turn(backend, *_counts(self.path, answer["usage"])))
        self._history.extend(_said(self.path, answer))

    def _asked(self, ask: Ask) -> tuple[str | None, Mapping[str, Any]]:
        """Who answered, and what. Raises ConnectionError for a stream that breaks off."""
        reply = ask(self.path, self.body, self.headers)
        assert reply.status == 200, f"{self.path}: {reply.status} {reply.raw[:300]!r}"
        return reply.backend, JOINED[self.path](reply.events()) if self.body["stream"] else reply.json()

    @property
    def _history(self) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = self.body["input" if self.path == RESPONSES else "messages"]
        return history


def _joined_chat(events: list[dict[str, Any]]) -> Mapping[str, Any]:
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    if not any(event.get("usage") for event in events) or any("error" in event for event in events):
        raise ConnectionError("the stream broke off")
    message = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}
    return {"choices": [{"message": {"role": "assistant", **message}}], "usage": events[-1]["usage"]}


def _joined_message(events: list[dict[str, Any]]) -> Mapping[str, Any]:
    if events[-1]["type"] != "message_stop":
        raise ConnectionError("the stream broke off")
    usage = {**events[0]["message"]["usage"], **events[-2]["usage"]}
    return {"content": joined_blocks(events), "usage": usage}


def _joined_response(events: list[dict[str, Any]]) -> Mapping[str, Any]:
    if events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise ConnectionError("the stream broke off")
    response: dict[str, Any] = events[-1]["response"]
    return response


JOINED = {CHAT: _joined_chat, MESSAGES: _joined_message, RESPONSES: _joined_response}
"""What a stream of each protocol says as a whole answer."""


def _counts(path: str, usage: Mapping[str, Any]) -> tuple[int, int, int]:
    if path == CHAT:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    if path == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, usage["output_tokens"]


def _said(path: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer as its client gives it back; noise that looks like a call is left out with its results."""
    if path == RESPONSES:
        return [item for item in answer["output"] if item["type"] != "function_call"]
    if path == MESSAGES:
        blocks = [block for block in answer["content"] if block["type"] != "tool_use"]
        return [{"role": "assistant", "content": blocks or [{"type": "text", "text": "-"}]}]
    message = {name: value for name, value in answer["choices"][0]["message"].items() if value and name != "tool_calls"}
    return [{"content": "-", **message}]


def recorded_loops(num_sessions: int, mark: str) -> list[Loop]:
    """So many sessions, each with first words of its own. Needs the recordings."""
    shared = shared_folder()
    assert shared is not None
    talks = {talk.client: talk for talk in read_recordings(shared) if talk.client in CLIENTS}
    return [_loop(talks[CLIENTS[number % 3]], f"{mark} {number}. ", number) for number in range(num_sessions)]


def _loop(talk: Conversation, first: str, number: int) -> Loop:
    request = talk.requests[0]
    body = _cut({name: request.body[name] for name in KEPT_FIELDS if name in request.body})
    if "tools" in body:
        body["tools"] = body["tools"][:MAX_TOOLS]
    field = "input" if request.path == RESPONSES else "messages"
    length = "max_output_tokens" if request.path == RESPONSES else "max_tokens"
    before = [_cut(entry) for entry in request.body[field] if entry.get("role") in ("system", "developer")][:1]
    if before:
        before[0]["content"] = _marked(before[0]["content"], first)
    else:
        body["system"] = _marked(body["system"], first)
    words = cycle([text for each in talk.requests for text in _user_words(each.body[field])] or ["Go on."])
    body |= {field: [*before, {"role": "user", "content": first + next(words)}], length: MAX_TOKENS, "temperature": 0}
    body |= {
        "stream": number % 4 != 3,
        **({"stream_options": {"include_usage": True}} if request.path == CHAT and number % 4 != 3 else {}),
    }
    headers = {"x-session-id": f"loop-{first.strip()}"} if number // 3 % 2 else {}
    return Loop(request.path, body, words, headers)


def _marked(content: Any, first: str) -> Any:
    """Instructions that are no other session's: what they share would be known wherever one of them was."""
    if isinstance(content, str):
        return first + content
    return [{**content[0], "text": first + content[0]["text"]}, *content[1:]]


def _cut(value: Any) -> Any:
    """A copy whose texts are cut."""
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARACTERS]
    if isinstance(value, list):
        return [_cut(each) for each in value]
    return {name: _cut(each) for name, each in value.items()} if isinstance(value, dict) else value


def _user_words(history: list[dict[str, Any]]) -> list[str]:
    """What its user says in the newest entry."""
    content = history[-1].get("content", history[-1].get("output")) if history else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text", part.get("content")) for part in parts]
    return [text[:MAX_SAID_CHARACTERS] for text in texts if isinstance(text, str) and text.strip()]


def play(loops: list[Loop], asks: list[Ask], num_turns: int) -> None:
    """So many turns of all sessions, a few at a time, each turn through the next door."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in range(num_turns):
            doors = [asks[(number + len(loop.turns)) % len(asks)] for number, loop in enumerate(loops)]
            list(pool.map(lambda loop, door: loop.turn(door), loops, doors))


def reuse(loops: list[Loop]) -> float:
    """The share of prompt tokens that were known, without first requests."""
    later = [turn for loop in loops for turn in loop.turns[1:]]
    return sum(turn.num_cached_tokens for turn in later) / sum(turn.num_prompt_tokens for turn in later)
