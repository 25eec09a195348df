"""Whose records a request finds and adds to, and whether a request shows that its client was given the answers which it
sends back.

Clients without a session of their own share records, so a path that was found proves nothing: two people may have said
"hello". An answer that the client sends back does, as only one client was given it. It must be longer than what a model
writes to everybody, or carry an id that only this server gave.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvserve.core import Message, Principal, SessionHint, TextBlock, ToolCallBlock, Written
from kvserve.core.keeping import Scope

AGENT_SESSION = "agent:"
"""The name of an agent's session begins so."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A principal and, where sessions are kept apart, a session of it. Owners share no records.

    `is_one_client`: the name is one client's, as it names a session of its own. Clients without a session, or with a
    `prompt_cache_key` that an application may give to all its users, share their records and have to show which of them
    are theirs (`num_shown`).
    """

    principal: Principal
    session: str | None
    is_one_client: bool

    @classmethod
    def of(cls, hint: SessionHint, *, parts_sessions: bool = True) -> "Owner":
        """The owner of a request. `parts_sessions`: sessions of one principal share no records."""
        if not parts_sessions or hint.session_id is None:
            return cls(hint.principal, None, is_one_client=False)
        return cls(hint.principal, hint.session_id, is_one_client=not hint.is_shared_id)

    @property
    def name(self) -> str:
        """A unique name: `principal/session`, either of which may be empty."""
        return f"{self.principal}/{self.session or ''}"

    @property
    def root(self) -> bytes:
        """The root of the chains of its conversations."""
        return self.name.encode("utf-8", "surrogatepass")

    @property
    def is_shared_by_servers(self) -> bool:
        """Whether its records may be another server's too: clients that share records show there what was said to them
        here, and an agent stays with the server that has its history."""
        return self.is_one_client and self.session is not None and not self.session.startswith(AGENT_SESSION)

    @property
    def session_name(self) -> str | None:
        """The name, if it is a session's."""
        return None if self.session is None else self.name


def belongs_to(name: str, scope: Scope) -> bool:
    """Whether the scope covers the owner of this name."""
    principal, _, session = name.partition("/")
    return scope.covers(principal, session or None)


MIN_ANSWER_CHARACTERS = 250
"""An answer of so many characters, without white space, shows it: about fifty words. What a model writes to everybody
is shorter: greetings and refusals with their reason have up to 120 characters, the longest known answer to who it is
239. This is a heuristic; a session or a call id is proof."""

type Wrote = Callable[[bytes], Written | None]
"""What the model wrote at a place of a conversation; None where it did not, or where that is unknown."""

_MIN_ID_CHARACTERS = 16


def num_shown(messages: Sequence[Message], chains: Sequence[bytes], wrote: Wrote) -> int:
    """How many messages from the beginning are this client's: up to the last answer that it sends back, if the answers
    show it. `chains[i]` is the place of message i, which covers all messages before it."""
    answers = {
        index: written.message
        for index, (message, place) in enumerate(zip(messages, chains, strict=True))
        if message.role == "assistant" and (written := wrote(place)) is not None
    }
    return max(answers) + 1 if answers and is_shown([messages[index] for index in answers], answers.values()) else 0


def is_shown(sent: Iterable[Message], wrote: Iterable[Message]) -> bool:
    """Whether the client that sends these answers was given them: an answer that the model wrote is long enough, or one
    of its calls has the id that was given."""
    wrote = list(wrote)
    return any(map(is_telling, wrote)) or not _call_ids(sent).isdisjoint(_call_ids(wrote))


def is_telling(answer: Message) -> bool:
    """Whether an answer, as the model wrote it, is long enough in text and arguments that only a client that was given
    it sends it. Thinking, which many clients do not show, does not count."""
    return sum(map(_num_characters, _texts(answer))) >= MIN_ANSWER_CHARACTERS


def is_telling_text(text: str) -> bool:
    """The same of an answer without messages."""
    return _num_characters(text) >= MIN_ANSWER_CHARACTERS


def _call_ids(answers: Iterable[Message]) -> set[str]:
    """The call ids of these answers that are too long to be guessed, in the form that every client leaves: some clients
    remove all but letters and digits."""
    calls = (block for answer in answers for block in answer.blocks if isinstance(block, ToolCallBlock))
    ids = ("".join(filter(str.isalnum, call.call_id)) for call in calls)
    return {call_id for call_id in ids if len(call_id) >= _MIN_ID_CHARACTERS}


def _texts(answer: Message) -> list[str]:
    said: list[str] = []
    for block in answer.blocks:
        match block:
            case TextBlock(text):
                said.append(text)
            case ToolCallBlock(arguments=arguments):
                said.append(arguments)
    return said


def _num_characters(text: str) -> int:
    return sum(map(len, text.split()))
