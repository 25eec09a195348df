"""Encodes answers of `/v1/messages` as named events of a stream or as one message. This file knows the wire form only.

A whole message is joined from the events that a stream would send, so the two cannot differ. A whole message holds
arguments that are not a JSON object (those of a cut call) as `{"INVALID_JSON": text}`, as Anthropic documents it.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    Finished,
    FinishReason,
    JsonObject,
    ReasoningDelta,
    RequestId,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
    Waiting,
)
from kvserve.protocols.error_bodies import encode_anthropic_error
from kvserve.protocols.sealed_thinking import sign

type Event = dict[str, object]

INVALID_JSON = "INVALID_JSON"

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_id(request_id: RequestId) -> str:
    """The id in the body."""
    return f"msg_{request_id}"


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Tokens of a prompt, and how many of them from its beginning the client marked for caching."""

    num_prompt_tokens: int
    num_marked_tokens: int = 0

    def usage(self, num_cached_tokens: int, num_output_tokens: int) -> Event:
        """Input, what was read from the cache and what was marked and computed add up to the prompt."""
        created = max(0, self.num_marked_tokens - num_cached_tokens)
        return {
            "input_tokens": self.num_prompt_tokens - num_cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": num_output_tokens,
        }


@dataclass(slots=True)
class _OpenBlock:
    """The thinking or text block that is being sent. `held` is its leading white space until text follows."""

    kind: Literal["thinking", "text"]
    held: str = ""
    is_sent: bool = False
    said: list[str] = field(default_factory=list)


class MessageStreamEncoder:
    """Turns the events of one answer into events of the wire, in order. No block is empty.

    `message_start` is sent as soon as the number of cached tokens is known; `counts` is called then and at the end.
    """

    def __init__(
        self, request_id: RequestId, model: str, counts: Callable[[], PromptCounts], *, shows_thinking: bool
    ) -> None:
        self._id = message_id(request_id)
        self._model = model
        self._counts = counts
        self._shows_thinking = shows_thinking
        self._is_started = False
        self._num_blocks = 0
        self._has_broken_call = False
        self._open: _OpenBlock | None = None

    def keep_alive(self) -> Event:
        """A ping; `message_start` if nothing was sent yet."""
        return {"type": "ping"} if self._is_started else self._start(0)[0]

    error_chunk = staticmethod(encode_anthropic_error)
    """The last event of a stream that failed after it began."""

    def encode(self, event: AnswerEvent) -> list[Event]:
        """The wire's events for `event`; none while waiting."""
        match event:
            case Waiting(num_cached_tokens=cached):
                return self._start(cached) if cached is not None else []
            case ReasoningDelta(text):
                return [*self._start(0), *self._piece("thinking", text)]
            case ContentDelta(text):
                return [*self._start(0), *self._piece("text", text)]
            case ToolCallStart(call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._start(0), *self._close(), self._block_start(block)]
            case ToolCallPiece(text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case ToolCallEnd(call):
                self._has_broken_call |= _object(call.arguments) is None
                return [self._block_stop()]
            case Finished(reason, usage, stop_string):
                delta = {
                    "stop_reason": self._stop_reason(event),
                    "stop_sequence": stop_string if reason == "stop" else None,
                }
                counts = self._counts().usage(usage.num_cached_tokens, usage.num_completion_tokens)
                counts["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
                end: list[Event] = [
                    {"type": "message_delta", "delta": delta, "usage": counts},
                    {"type": "message_stop"},
                ]
                return [*self._start(usage.num_cached_tokens), *self._close(), *end]

    def _stop_reason(self, end: Finished) -> str:
        """`tool_use` only if every call can be run: SDKs take the readable part of broken arguments for all of them."""
        if end.reason == "stop" and end.stop_string:
            return "stop_sequence"
        if end.is_context_full:
            return "model_context_window_exceeded"
        return _STOP_REASONS["stop" if end.reason == "tool_calls" and self._has_broken_call else end.reason]

    def _start(self, num_cached_tokens: int) -> list[Event]:
        if self._is_started:
            return []
        self._is_started = True
        message: Event = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts().usage(num_cached_tokens, 0),
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _piece(self, kind: Literal["thinking", "text"], text: str) -> list[Event]:
        """A piece of a block; the first piece that is not only white space opens the block."""
        events: list[Event] = []
        if not text:
            return events
        if self._open is None or self._open.kind != kind:
            events += self._close()
            self._open = _OpenBlock(kind)
        block = self._open
        said = block.held + text
        if not block.is_sent and not said.strip():
            block.held = said
            return events
        if not block.is_sent:
            block.is_sent, block.held = True, ""
            events.append(self._block_start(_EMPTY_BLOCKS[kind]))
        block.said.append(said)
        if kind == "text":
            events.append(self._delta({"type": "text_delta", "text": said}))
        elif self._shows_thinking:
            events.append(self._delta({"type": "thinking_delta", "thinking": said}))
        return events

    def _close(self) -> list[Event]:
        """The end of the open block, if it was sent."""
        block, self._open = self._open, None
        if block is None or not block.is_sent:
            return []
        events = []
        if block.kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": sign("".join(block.said))}))
        return [*events, self._block_stop()]

    def _block_start(self, block: JsonObject) -> Event:
        return {"type": "content_block_start", "index": self._num_blocks, "content_block": dict(block)}

    def _delta(self, delta: JsonObject) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _block_stop(self) -> Event:
        self._num_blocks += 1
        return {"type": "content_block_stop", "index": self._num_blocks - 1}


_EMPTY_BLOCKS: dict[str, JsonObject] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


# --- whole answers ---------------------------------------------------------------------------------------------------


def whole_message(events: Iterable[Event]) -> Event:
    """The message that clients make of a complete stream's events. Raises ValueError without end.

    Deltas are joined per block; `usage` and stop reason are those of the end.
    """
    message: Event = {}
    blocks: list[_Joined] = []
    for event in events:
        match event:
            case {"type": "message_start", "message": dict(begun)}:
                message = dict(begun)
            case {"type": "content_block_start", "content_block": dict(block)}:
                blocks.append(_Joined(block))
            case {"type": "content_block_delta", "delta": dict(delta)}:
                blocks[-1].add(delta)
            case {"type": "message_delta", "delta": dict(end), "usage": usage}:
                return {**message, **end, "content": [block.whole() for block in blocks], "usage": usage}
    raise ValueError("the events have no end")


class _Joined:
    """One content block and the pieces of its fields."""

    def __init__(self, block: JsonObject) -> None:
        self._block = block
        self._pieces: dict[str, list[str]] = {}

    def add(self, delta: JsonObject) -> None:
        for name, piece in delta.items():
            if name != "type":
                self._pieces.setdefault(name, []).append(str(piece))

    def whole(self) -> Event:
        said = {name: "".join(pieces) for name, pieces in self._pieces.items()}
        arguments = said.pop("partial_json", None)
        return {**self._block, **said, **({"input": _input(arguments)} if arguments is not None else {})}


def _input(arguments: str) -> Event:
    given = _object(arguments)
    return {INVALID_JSON: arguments} if given is None else given


def _object(arguments: str) -> Event | None:
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None
