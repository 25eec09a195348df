"""The nouns of agents, whose history the server keeps: frozen values without behaviour. They know messages, no wire
form and no database."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core.generation import TokenSequence
from kvserve.core.messages import Message


def held_id(holder: str, agent_id: str) -> str:
    """The id under which an agent is kept: behind the digest of its holder, whose agents are nobody else's; "" holds
    those that all may talk to. No client can choose an id with a slash in it."""
    return f"{holder}/{agent_id}" if holder else agent_id


def holder_of(agent_id: str) -> str:
    """The digest of the holder of an agent that is kept under this id; "" for one that all may talk to."""
    return agent_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class NewAgent:
    """A client's request for an agent; "" leaves its id to the server. `model` None is the server's default at each
    turn; `max_context` None is the model's own limit, in tokens."""

    agent_id: str = ""
    model: str | None = None
    system_prompt: str | None = None
    max_context: int | None = None
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent after its last finished turn. A `key` is never reused, an id can be.

    Times are seconds since the epoch. Its history has `num_turns` turns; prompts show those from `first_turn` on.
    `context` are the conversation's tokens after that turn, for the model `context_model`.
    """

    key: int
    agent_id: str
    model: str | None
    system_prompt: str | None
    max_context: int | None
    is_persistent: bool
    created_at: float
    last_accessed: float
    num_turns: int
    first_turn: int
    context_model: str | None
    context: TokenSequence


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A finished turn to add: the new messages and the answer, and the agent's new values."""

    messages: Sequence[Message]
    model: str | None
    system_prompt: str | None
    first_turn: int
    context_model: str
    context: TokenSequence
