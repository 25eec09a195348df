"""The nouns of a turn for those who hear of it: its prompt, the turn while it runs and when it is over, and the
observer that is told. Values and contracts only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvserve.core import Awaiting, Message, MessageStart, RequestId, TokenSequence, Turn
from kvserve.explain.explanation import Explanation
from kvserve.identity.owner import Owner
from kvserve.identity.reading import RecognisedTurn
from kvserve.requests.deferred import TurnInProgress
from kvserve.requests.request_facts import RequestFacts, RunningFacts
from kvserve.sessions.lineage import Branch


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model will see of a turn.

    `opens_reasoning`: the model's text begins inside its thinking. `continues`: it goes on with the last message, an
    assistant's, whose text so far is `begun`. `tail_ids` are the tokens from the opener of that message on, or of those
    that the template itself wrote before it. `num_replayed_turns` turns of the history have the very ids that the model
    emitted. `num_marked_tokens` reach up to where the client marked the prompt for caching.
    """

    text: str
    tokens: TokenSequence
    opens_reasoning: bool = False
    continues: bool = False
    message_starts: tuple[MessageStart, ...] = ()
    tail_ids: tuple[int, ...] = ()
    num_replayed_turns: int = 0
    num_marked_tokens: int = 0
    notes: tuple[str, ...] = ()
    begun: str = ""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that is over, for logs: what was asked and how it was understood (None for a raw prompt), what the model
    saw, why that much of it was reused, and the facts of the request line. `owner`: whose records it found and left;
    `said`: what was answered."""

    turn: Turn
    owner: Owner
    reading: RecognisedTurn | None
    prompt: Prompt
    explanation: Explanation | None
    branch: Branch | None
    facts: RequestFacts
    said: Message


class WatchedTurn(TurnInProgress, Protocol):
    """A turn that runs, as those need it who look on."""

    @property
    def progress(self) -> RunningFacts:
        """How far it is; from any thread."""


type OtherModel = Callable[[str, Sequence[bytes]], str | None]
"""Which model but this one (by its name) has read what has these digests."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Who hears of a request besides its client; called from web threads. `finished` follows every `started`.
    `other_model` says which model but this one (by its name) has read what has these digests. `drafts_failed`: what was
    done for an answer's drafts raised this, and it goes on without."""

    prefill: Callable[[RequestId, int, int, float | None], None]
    finished: Callable[[FinishedTurn], None]
    started: Callable[[WatchedTurn], None] = lambda _: None
    awaits: Callable[[RequestId, Awaiting], None] = lambda _, __: None
    other_model: OtherModel = lambda _, __: None
    drafts_failed: Callable[[str], None] = lambda _: None
