"""Parses and encodes `/v1/agents`. Answers are those of chat/completions with one object more, `agent`. This file knows
the wire form, not where agents are stored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kvserve.core import (
    Answer,
    AnswerEvent,
    Finished,
    ImageBlock,
    JsonObject,
    Message,
    RequestDefaults,
    RequestId,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
)
from kvserve.core.agent_nouns import Agent, NewAgent
from kvserve.errors import BadRequest
from kvserve.protocols.fields import MAX_TOKEN_COUNT, Fields, flag, integer, mistyped, text
from kvserve.protocols.openai_chat import ChatEncoder, ChatRequest, parse_chat
from kvserve.protocols.openai_messages import PLAIN_PARTS, content_reader

PROTOCOL = "agents"
MIN_CONTEXT_TOKENS = 16

_AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_SYSTEM_FIELDS = ("system_prompt", "system")


# --- requests --------------------------------------------------------------------------------------------------------


def parse_create(body: JsonObject) -> NewAgent:
    """The body of POST /v1/agents. Raises BadRequest naming the field, also where the system prompt is given under both
    of its names."""
    fields = Fields(body)
    persist = fields.optional("persist", flag)
    return NewAgent(
        agent_id=fields.optional("agent_id", _read_agent_id) or "",
        model=fields.optional("model", text) or None,
        system_prompt=_read_system(fields),
        max_context=fields.optional("max_context", integer(MIN_CONTEXT_TOKENS, MAX_TOKEN_COUNT)),
        is_persistent=persist is not False,
    )


def parse_generate(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> ChatRequest:
    """An agent's new messages and every other field of chat/completions. Raises BadRequest."""
    fields = Fields(body)
    for name in _SYSTEM_FIELDS:
        if fields.locate(name)[0] is not None:
            raise BadRequest(f"{name} is given when an agent is created, not with its messages.", param=name)
    request = parse_chat(body, headers, defaults, request_id)
    last = len(request.turn.messages) - 1
    if request.turn.messages[last].role == "assistant":
        raise BadRequest(f"messages[{last}]: the agent itself writes the answer.", param=f"messages[{last}]")
    return replace(request, turn=replace(request.turn, protocol=PROTOCOL))


def _read_agent_id(value: object, path: str) -> str:
    if not isinstance(value, str) or _AGENT_ID.fullmatch(value) is None:
        raise mistyped(path, "up to 128 letters, digits and . _ : @ -, the first a letter or digit", value)
    return value


def _read_system(fields: Fields) -> str | None:
    """A string, or the text parts of one; under either of two names. Raises BadRequest where both are given."""
    found = {name: fields.optional(name, _read_system_text) for name in _SYSTEM_FIELDS}
    said = [name for name, value in found.items() if value is not None]
    if len(said) > 1:
        raise BadRequest("system_prompt and system are both given: give one of them.", param="system")
    return found[said[0]] or None if said else None


def _read_system_text(value: object, path: str) -> str:
    said, was_ours = "", False
    for block in _read_content(value, path):
        if not isinstance(block, TextBlock):
            raise mistyped(path, "text", value)
        said += "\n" * bool(said and (was_ours or block.is_ours)) + block.text  # a file's lines are its own
        was_ours = block.is_ours
    return said


_read_content = content_reader(PLAIN_PARTS)


# --- agents ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentCard:
    """An agent as clients see it, with the name of its model; `status`: its KV is in RAM (hot), on disk (warm), or only
    its history is kept (cold)."""

    agent: Agent
    model: str
    status: str


def encode_listed(card: AgentCard) -> dict[str, object]:
    """An agent in the list."""
    return {
        "agent_id": card.agent.agent_id,
        "model": card.model,
        "status": card.status,
        "context_tokens": len(card.agent.context),
        "last_accessed": iso_time(card.agent.last_accessed),
    }


def encode_list(cards: Sequence[AgentCard]) -> dict[str, object]:
    """The body of GET /v1/agents."""
    return {"agents": [encode_listed(card) for card in cards]}


def encode_agent(card: AgentCard, history: Sequence[Message] | None = None) -> dict[str, object]:
    """The body of POST /v1/agents and, with the whole history, of GET /v1/agents/{agent_id}."""
    agent = card.agent
    body = {
        **encode_listed(card),
        "system_prompt": agent.system_prompt,
        "max_context": agent.max_context,
        "persist": agent.is_persistent,
        "created_at": iso_time(agent.created_at),
        "num_turns": agent.num_turns,
        "num_dropped_turns": agent.first_turn,
    }
    return body if history is None else {**body, "messages": [encode_message(message) for message in history]}


def encode_deleted(agent_id: str) -> dict[str, object]:
    """The body of DELETE /v1/agents/{agent_id}."""
    return {"agent_id": agent_id, "object": "agent.deleted", "deleted": True}


def iso_time(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond: 2026-11-21T20:00:00.000Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_message(message: Message) -> dict[str, object]:
    """A message as chat/completions writes it: with `reasoning_content` and `tool_calls` where there are any."""
    body: dict[str, object] = {"role": message.role, "content": _content(message)}
    if message.name is not None:
        body["name"] = message.name
    thinking = "".join(block.text for block in message.blocks if isinstance(block, ThinkingBlock))
    if thinking:
        body["reasoning_content"] = thinking
    if message.calls:
        body["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    results = [block for block in message.blocks if isinstance(block, ToolResultBlock)]
    if results:
        body["tool_call_id"] = results[0].call_id
        body["content"] = _parts([block for block in results[0].blocks if isinstance(block, TextBlock | ImageBlock)])
    return body


def _content(message: Message) -> object:
    return _parts([block for block in message.blocks if isinstance(block, TextBlock | ImageBlock)])


def _parts(blocks: Sequence[TextBlock | ImageBlock]) -> object:
    """Text as a string; with images an array of parts."""
    if all(isinstance(block, TextBlock) for block in blocks):
        return "".join(block.text for block in blocks if isinstance(block, TextBlock))
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": {"url": block.source}}
        for block in blocks
    ]


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentNote:
    """What an answer reports of its agent: turns of the history, turns that the prompt left out, tokens, and whether
    this turn was added to the history (a turn that the server broke off is not)."""

    agent_id: str
    num_turns: int
    num_dropped_turns: int
    num_context_tokens: int
    is_stored: bool


def encode_note(note: AgentNote) -> dict[str, object]:
    """The object `agent` of an answer."""
    return {
        "agent_id": note.agent_id,
        "num_turns": note.num_turns,
        "num_dropped_turns": note.num_dropped_turns,
        "context_tokens": note.num_context_tokens,
        "stored": note.is_stored,
    }


class AgentEncoder:
    """The chunks of a chat, or its whole body; what has the finish reason has `agent` too."""

    def __init__(self, chat: ChatEncoder, note: Callable[[], AgentNote]) -> None:
        self._chat = chat
        self._note = note
        self.role_chunk = chat.role_chunk
        self.keep_alive = chat.keep_alive
        self.error_chunk = chat.error_chunk

    def encode(self, event: AnswerEvent) -> list[dict[str, object]]:
        chunks = self._chat.encode(event)
        if isinstance(event, Finished):
            chunks[0] = {**chunks[0], "agent": encode_note(self._note())}
        return chunks

    def encode_whole(self, answer: Answer) -> dict[str, object]:
        return {**self._chat.encode_whole(answer), "agent": encode_note(self._note())}
