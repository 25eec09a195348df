"""Agents: the history in front of new messages, and the answer behind it.

    wait      one turn of an agent at a time, in the order they came
    show      system prompt, as many of the oldest turns less as do not fit, the new messages -> a turn like any other
    keep      before the client hears of the end: new messages and answer, in one transaction

It joins the store of `agents/` with the models. A turn that fails, or that its client leaves, changes no history.
"""

import secrets
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from kvserve.agents.agent_store import AgentStore
from kvserve.core import (
    AGENTS,
    AnswerEvent,
    Finished,
    Message,
    Principal,
    RequestId,
    TextBlock,
    TokenSequence,
    Turn,
)
from kvserve.core.agent_nouns import Agent, NewAgent, TurnDone, held_id, holder_of
from kvserve.errors import BadRequest, ContextOverflow, NotFound, QueueFull, StorageFailure
from kvserve.identity.owner import AGENT_SESSION, Owner
from kvserve.protocols.agents import AgentCard, AgentNote
from kvserve.requests.deferred import Begin, DeferredTurn, TurnInProgress
from kvserve.requests.served_model import ServedModel

NUM_QUEUED_TURNS = 64
"""More turns than this do not wait for one agent."""


@dataclass(frozen=True, slots=True)
class Models:
    """What agents ask of the process: to know of a turn that has come, what a model is called, the model itself, to
    submit a turn, to count its prompt, of how much of a conversation, last used at some time, KV is kept: (tokens in
    RAM, tokens in RAM or on disk), and to let a conversation's KV go: the model's name, its tokens, and the name of its
    turns' owner."""

    begin: Callable[[Turn], None]
    name_of: Callable[[str | None], str]
    resolve: Callable[[str | None], ServedModel]
    serve: Callable[[Turn, ServedModel], TurnInProgress]
    count: Callable[[Turn, ServedModel], int]
    kept: Callable[[str, TokenSequence, float], tuple[int, int]]
    let_go: Callable[[str, TokenSequence, str], None]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A turn as the model is to see it, and what of the history that leaves out. `system_prompt` is the agent's, also
    where this turn brings it; `messages` are those to be kept."""

    agent: Agent
    turn: Turn
    served: ServedModel
    system_prompt: str | None
    messages: tuple[Message, ...]
    first_turn: int


class Agents:
    """Every agent of one server. Any thread may call it.

    `holder` is the digest of who asks where an operator gave out keys: it finds its own agents, under the ids that it
    gave them, and no others. "" is everybody else: all agents are there, those of a holder as `DIGEST/ID`.
    """

    def __init__(self, store: AgentStore, models: Models) -> None:
        self._store = store
        self._models = models
        self._lock = threading.Lock()
        self._queues: defaultdict[str, list[object]] = defaultdict(list)

    # --- agents -------------------------------------------------------------------------------------------------------

    def create(self, new: NewAgent, holder: str = "") -> AgentCard:
        """A new agent. Raises Conflict for a taken id, ModelNotFound for a model that is not here."""
        if new.model is not None:
            self._models.resolve(new.model)
        agent_id = held_id(holder, new.agent_id or f"agent-{secrets.token_hex(8)}")
        return self._card(self._store.create(replace(new, agent_id=agent_id)), holder)

    @property
    def num_agents(self) -> int | None:
        """How many there are; None where their file cannot be read."""
        try:
            return self._store.num_agents()
        except StorageFailure:
            return None

    def cards(self, holder: str = "") -> list[AgentCard]:
        """All agents that are there for who asks, the oldest first."""
        found = [agent for agent in self._store.agents() if not holder or holder_of(agent.agent_id) == holder]
        return [self._card(agent, holder) for agent in found]

    def card(self, agent_id: str, holder: str = "") -> AgentCard:
        """Raises NotFound."""
        return self._card(self._store.agent(held_id(holder, agent_id)), holder)

    def history(self, agent_id: str, holder: str = "") -> list[Message]:
        """The whole history, with the system prompt in front. Raises NotFound."""
        agent = self._store.agent(held_id(holder, agent_id))
        turns = self._store.history(agent)
        return [*_system(agent.system_prompt), *(message for turn in turns for message in turn)]

    def delete(self, agent_id: str, holder: str = "") -> None:
        """Take an agent, its history and its KV away; a turn of it that runs is answered, but kept nowhere.

        Raises NotFound.
        """
        agent = self._store.delete(held_id(holder, agent_id))
        if agent.context_model is not None:
            self._models.let_go(agent.context_model, agent.context, _owner(agent.agent_id).name)

    def _card(self, agent: Agent, holder: str) -> AgentCard:
        status = self._status(agent)
        return AgentCard(_shown_to(holder, agent), self._models.name_of(agent.model), status)

    def _status(self, agent: Agent) -> str:
        """Where most of the conversation's KV is."""
        if agent.context_model is None:
            return "cold"
        in_ram, kept = self._models.kept(agent.context_model, agent.context, agent.last_accessed)
        half = len(agent.context) / 2
        return "hot" if in_ram > half else "warm" if kept > half else "cold"

    # --- turns --------------------------------------------------------------------------------------------------------

    def generate(self, agent_id: str, turn: Turn, holder: str = "") -> "AgentTurn":
        """Answer the new messages of `turn` in the agent's conversation.

        Raises NotFound, and what else can be said before anything is computed, unless other turns come before it.
        """
        asked_for, agent_id = agent_id, held_id(holder, agent_id)
        agent = self._store.agent(agent_id)
        # whatever session and key its client has of its own: who knows an agent's name talks to that agent
        owner = _owner(agent_id)
        hint = replace(turn.session, session_id=owner.session, principal=owner.principal, is_shared_id=False)
        turn = replace(turn, session=hint)
        self._models.begin(turn)
        ticket = object()
        with self._lock:
            queue = self._queues[agent_id]
            if len(queue) > NUM_QUEUED_TURNS:
                raise QueueFull(f"{len(queue)} turns of agent {asked_for!r} are open already.", retry_after_seconds=5)
            queue.append(ticket)
        shown: _Shown | None = None

        def begin() -> TurnInProgress | None:
            """None while other turns of the agent come first."""
            nonlocal shown
            with self._lock:
                if next(iter(self._queues.get(agent_id, ())), None) is not ticket:
                    return None
            shown = self._shown(self._store.agent(agent_id), turn)
            return self._models.serve(shown.turn, shown.served)

        def keep(running: TurnInProgress, is_whole: bool) -> AgentNote:
            if shown is None:
                raise RuntimeError("the turn has not begun")
            note = self._keep(shown, running, is_stored=is_whole and not turn.session.wants_nothing_kept)
            return replace(note, agent_id=asked_for)

        leave = partial(self._leave, agent_id, ticket)
        running = AgentTurn(turn.request_id, self._models.name_of(turn.model or agent.model), begin, leave, keep)
        weakref.finalize(running, leave).atexit = False  # the agent's next turn must not wait for ever
        try:
            running.begin()
        except BaseException:
            leave()
            raise
        return running

    def _leave(self, agent_id: str, ticket: object) -> None:
        with self._lock:
            queue = self._queues.get(agent_id, [])
            if ticket in queue:
                queue.remove(ticket)
            if not queue:
                self._queues.pop(agent_id, None)

    def _keep(self, shown: _Shown, running: TurnInProgress, *, is_stored: bool) -> AgentNote:
        """Add a turn to the history, where it came to its own end and its client wants it kept. Raises NotFound if the
        agent is gone, StorageFailure."""
        agent = shown.agent
        if is_stored:
            done = TurnDone(
                messages=(*shown.messages, running.said),
                model=shown.turn.model,
                system_prompt=shown.system_prompt,
                first_turn=shown.first_turn,
                context_model=shown.served.name,
                context=running.context,
            )
            try:
                agent = self._store.append(agent, done)
            except NotFound:  # deleted while it answered
                self._models.let_go(shown.served.name, running.context, "")  # the id may be another's by now
                raise
        return AgentNote(
            agent_id=agent.agent_id,
            num_turns=agent.num_turns,
            num_dropped_turns=shown.first_turn,
            num_context_tokens=len(agent.context),
            is_stored=is_stored,
        )

    def _shown(self, agent: Agent, turn: Turn) -> _Shown:
        """The turn with as much of the history as fits. Raises BadRequest, ContextOverflow."""
        model = turn.model or agent.model
        served = self._models.resolve(model)
        system_prompt, new = _with_system(agent, turn.messages)
        turns = self._store.history(agent)
        turn = replace(turn, model=model)

        def shown_from(first: int) -> Turn:
            history = (message for each in turns[first:] for message in each)
            return replace(turn, messages=(*_system(system_prompt), *history, *new))

        beginnings = [number for number, messages in enumerate([*turns, new]) if _begins(messages)]
        max_context = min(agent.max_context or served.context_limit, served.context_limit)
        max_tokens = served.defaults.max_tokens if turn.max_tokens is None else turn.max_tokens
        first, num_tokens = first_turn_shown(
            beginnings,
            agent.first_turn,
            lambda first: self._models.count(shown_from(first), served),
            max_context - answer_room(max_context, max_tokens),
        )
        if num_tokens >= max_context:
            raise ContextOverflow(num_tokens, max_context)
        if max_tokens > max_context - num_tokens:
            turn = replace(turn, max_tokens=max_context - num_tokens)
        return _Shown(agent, shown_from(first), served, system_prompt, new, first)


class AgentTurn(DeferredTurn):
    """One turn of an agent: it waits for those before it, and its answer is kept before `Finished` is told."""

    def __init__(
        self,
        request_id: RequestId,
        model_name: str,
        begin: Begin,
        leave: Callable[[], None],
        keep: Callable[[TurnInProgress, bool], AgentNote],
    ) -> None:
        """`keep` takes the turn, and whether its answer came to its own end."""
        super().__init__(request_id, begin, leave, holds_place=True)
        self.model_name = model_name
        self._keep = keep
        self._note: AgentNote | None = None

    @property
    def note(self) -> AgentNote:
        """What the answer says of its agent, once it is finished."""
        if self._note is None:
            raise RuntimeError("the turn is not finished yet")
        return self._note

    def events(self, poll_seconds: float) -> Generator[AnswerEvent]:
        """`Waiting` until it is its turn, then the answer; ends without `Finished` where it was cancelled before."""
        with closing(super().events(poll_seconds)) as events:
            for event in events:
                if isinstance(event, Finished):
                    self._note = self._keep(self, not (self._cancelled.is_set() or self.is_lost))
                yield event


def _owner(agent_id: str) -> Owner:
    """Whose records an agent's turns find and leave: its holder's, else no client's, whichever session it names."""
    holder = holder_of(agent_id)
    return Owner(Principal(holder) if holder else AGENTS, f"{AGENT_SESSION}{agent_id}", is_one_client=True)


def _shown_to(holder: str, agent: Agent) -> Agent:
    """The agent as who asks has named it."""
    return replace(agent, agent_id=agent.agent_id.removeprefix(held_id(holder, ""))) if holder else agent


def _system(prompt: str | None) -> tuple[Message, ...]:
    return (Message("system", (TextBlock(prompt),)),) if prompt else ()


def _with_system(agent: Agent, new: tuple[Message, ...]) -> tuple[str | None, tuple[Message, ...]]:
    """The agent's system prompt and the new messages; a system message at the very beginning of a conversation is the
    system prompt. Raises BadRequest where there is one already."""
    if agent.num_turns or new[0].role != "system":
        return agent.system_prompt, new
    if agent.system_prompt is not None:
        raise BadRequest(
            "messages[0]: the agent has a system prompt already; send the new messages only.", param="messages[0]"
        )
    if len(new) == 1:
        raise BadRequest("messages: there is nothing to answer, only a system prompt.", param="messages")
    return new[0].text or None, new[1:]


def _begins(messages: tuple[Message, ...]) -> bool:
    """Whether a conversation may begin with these messages: with a user's words, not with the result of a call."""
    first = next((message for message in messages if message.role != "system"), None)
    return first is not None and first.role == "user"


# --- what a prompt shows ---------------------------------------------------------------------------------------------
#
# The oldest whole turns are dropped, several at once: if every prompt had one turn less, nothing behind the system
# prompt could be reused.


SHARE_KEPT = 0.75
"""The part of the room that is filled after turns were dropped."""

ANSWER_SHARE = 0.25
"""The largest part of the context that is kept free for the answer."""


def answer_room(max_context: int, max_tokens: int) -> int:
    """The tokens that a prompt leaves to its answer."""
    return min(max_tokens, max(1, int(max_context * ANSWER_SHARE)))


def first_turn_shown(
    beginnings: Sequence[int], shown_from: int, num_tokens_from: Callable[[int], int], room: int
) -> tuple[int, int]:
    """The first turn that a prompt within `room` tokens shows, and the prompt's tokens.

    `beginnings` are the turns with which a prompt may begin, in order, perhaps with the new one last; so far it began
    with `shown_from`. `num_tokens_from(turn)` counts a prompt and does not grow with the turn. If nothing fits, it is
    the last beginning.
    """
    num_tokens = num_tokens_from(shown_from)
    later = [turn for turn in beginnings if turn > shown_from]
    if num_tokens <= room or not later:
        return shown_from, num_tokens
    counted = {later[-1]: num_tokens_from(later[-1])}
    low, high = 0, len(later) - 1
    while low < high:
        middle = (low + high) // 2
        counted[later[middle]] = num_tokens_from(later[middle])
        if counted[later[middle]] <= room * SHARE_KEPT:
            high = middle
        else:
            low = middle + 1
    return later[low], counted[later[low]]
