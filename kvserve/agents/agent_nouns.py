"""The nouns of agents: frozen values without behaviour. They know messages, no wire form and no database."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core import Message, TokenSequence


@dataclass(frozen=True, slots=True)
class NewAgent:
    """What a client says when it creates an agent. `model` None is the server's default, whichever that is then;
    `max_context` None is the model's own limit, in tokens."""

    agent_id: str
    model: str | None = None
    system_prompt: str | None = None
    max_context: int | None = None
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent as it stands after its last finished turn. `key` is never given out twice, an id can be.

    Times are seconds since the epoch. Its history has `num_turns` turns, of which prompts show those from `first_turn`
    on. `context` are the model's tokens of the conversation after that turn, for the model `context_model`.
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

    @property
    def num_context_tokens(self) -> int:
        return len(self.context)


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A finished turn, to be added: the new messages and the answer, and what it changed of its agent."""

    messages: Sequence[Message]
    model: str | None
    system_prompt: str | None
    first_turn: int
    context_model: str
    context: TokenSequence
