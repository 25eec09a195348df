"""Which model a request gets: names are resolved, and turns for a model that is not loaded wait until it is.

    drain    running requests of the loaded model finish; new ones wait for their own model
    swap     the model that was waited for longest takes its place (`model_swap.py`); all that wait for it begin

It has no thread of its own: whoever waits or asks takes the swap one step further. It joins rooms per model; what a
request is, is for its callers to say.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from kvserve.app.catalogue import Catalogue, Listing, ModelSource
from kvserve.app.model_factory import ModelFactory
from kvserve.app.model_swap import KnownModel, ModelSwap, Swap
from kvserve.core import Turn
from kvserve.core.keeping import Scope
from kvserve.engine.engine_settings import EngineStatus
from kvserve.errors import ModelLoadError, ModelNotFound, ModelUnavailable, NotReady, QueueFull, RequestError
from kvserve.identity.conversations import ForgottenRecords
from kvserve.requests.deferred import DeferredTurn, TurnInProgress
from kvserve.requests.prompt_of_turn import without_images
from kvserve.requests.request_facts import RunningFacts
from kvserve.requests.serve import preview
from kvserve.requests.served_model import ServedModel

ABANDONED_SECONDS = 60.0
"""A place in the queue that nobody has asked after for this long is given up."""

_LOAD_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the pool asks of the process: to submit a turn, to hear of one that was refused, to tell a person."""

    submit: Callable[[Turn, ServedModel], TurnInProgress]
    refused: Callable[[Turn, str, RequestError], None]
    note: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelPoolStatus:
    """For `/health`: the model that is loaded (None while there is none) and the one that loads, the engine that works
    on it, whether any model has answered yet, requests that wait for another model, and the swaps so far."""

    loaded: ServedModel | None
    loading: str | None
    engine: EngineStatus | None
    has_served: bool
    num_waiting: int
    num_swaps: int
    last_swap: Swap | None


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request's place in the queue for a model; its prompt is `num_prompt_tokens` long as far as that is known."""

    turn: Turn
    num_prompt_tokens: int
    model: str
    since: float
    asked_at: float


class ModelPool:
    """The models of one server. `start` and `stop` belong to the main thread, everything else to any thread."""

    def __init__(
        self,
        factory: ModelFactory,
        callbacks: Callbacks,
        *,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `max_waiting` requests wait for another model than the loaded one."""
        self._factory = factory
        self._callbacks = callbacks
        self._max_waiting = max_waiting
        self._clock = clock
        self._offered: Catalogue | None = None
        self._catalogue: Catalogue | None = None
        self._lock = threading.Lock()
        self._describing = threading.Lock()
        self._swap = ModelSwap(factory, clock)
        self._tickets: list[_Ticket] = []
        self._num_entering = 0
        self._is_closing = False

    # --- start and stop -----------------------------------------------------------------------------------------------

    def start(self, catalogue: Catalogue, stopping: threading.Event) -> ServedModel | None:
        """Load the default model; None once `stopping` is set. Raises ModelLoadError."""
        name = catalogue.default.name
        served = self._described(catalogue.default)
        with self._lock:
            self._offered = catalogue
            self._swap.begin(name, self._clock())
        while not stopping.is_set():
            with self._stepped():
                if self._swap.loaded is not None:
                    return self._swap.loaded
                if (failure := self._swap.known[name].failure) is not None:
                    raise failure.error
            with contextlib.suppress(NotReady, ModelLoadError):  # the next step looks at it
                served.engine.wait_until_ready(_LOAD_POLL_SECONDS)
        return None

    def stop(self, timeout_seconds: float, tell: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """End whatever engine there is; requests that wait are refused. Idempotent. `tell` hears of what is written to
        disk where that takes long: bytes done, and all of them."""
        with self._lock:
            self._is_closing = True
            engines = self._swap.engines()
        for engine in engines:
            engine.stop(timeout_seconds, tell)

    # --- what is here -------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a thread of any engine goes on."""
        with self._lock:
            return any(engine.is_running for engine in self._swap.engines())

    @property
    def loaded(self) -> ServedModel:
        """The model that answers now. Raises NotReady while there is none."""
        loaded = self.status().loaded
        if loaded is None:
            raise NotReady("A model is still loading.", retry_after_seconds=5)
        return loaded

    def known(self) -> tuple[ServedModel, ...]:
        """Every model that was asked for since the start, with what it has read and written."""
        with self._lock:
            return tuple(known.served for known in self._swap.known.values())

    def forget_records(self, scope: Scope) -> list[ForgottenRecords]:
        """Forget those who are meant in every model's records, also of those that nobody asked for since the start."""
        with self._describing:  # whoever describes a model opens its records
            at_rest = self._factory.forget_at_rest(scope)
        session, principal = scope.session, scope.principal
        return [*at_rest, *(each.conversations.forget(session=session, principal=principal) for each in self.known())]

    def listings(self) -> list[Listing]:
        """What can be served, the loaded model first; nothing before the start is over."""
        status, catalogue = self.status(), self._catalogue  # this look may be the one that sees the first model loaded
        first = status.loaded.name if status.loaded is not None else status.loading
        listings = catalogue.listings() if catalogue is not None else []
        return sorted(listings, key=lambda listing: listing.name != first)

    def resolve(self, name: str | None) -> ServedModel:
        """The model that a request means; its prompts can be written, whether it is loaded or not.

        Raises NotReady before the start is over, ModelNotFound, and ModelUnavailable for broken files.
        """
        if self._catalogue is None:
            raise NotReady("The model is still loading.", retry_after_seconds=5)
        source = self._catalogue.source(name)
        try:
            return self._described(source)
        except ModelLoadError as error:
            raise ModelUnavailable(str(error), param="model") from error

    def name_of(self, name: str | None) -> str:
        """What the model is called that a name means; the name itself where there is none, or not yet."""
        try:
            return self._catalogue.source(name).name if self._catalogue is not None else name or ""
        except ModelNotFound:
            return name or ""

    def countable(self, turn: Turn, served: ServedModel) -> Turn:
        """The turn as its prompt can be counted now: a model that was never loaded cannot look at images yet."""
        known = self._known_as(served.name)
        return turn if known is None or known.was_loaded else without_images(turn)

    def status(self) -> ModelPoolStatus:
        """The state of the moment."""
        with self._stepped():
            swap = self._swap
            return ModelPoolStatus(
                loaded=swap.loaded,
                loading=swap.exchange.target if swap.exchange is not None else None,
                engine=swap.engine_status,
                has_served=self._catalogue is not None,
                num_waiting=len(self._tickets),
                num_swaps=swap.num_swaps,
                last_swap=swap.last_swap,
            )

    def waiting(self) -> list[RunningFacts]:
        """The requests that wait for another model to be loaded, in the order of their queue."""
        with self._lock:
            now = self._clock()
            return [_facts(ticket, now) for ticket in self._tickets]

    def _described(self, source: ModelSource) -> ServedModel:
        if (known := self._known_as(source.name)) is not None:
            return known.served
        with self._describing:  # a tokenizer is not read twice because two requests want it
            if (known := self._known_as(source.name)) is not None:
                return known.served
            served = self._factory.describe(source)
            with self._lock:
                self._swap.known[source.name] = KnownModel(source, served)
            return served

    def _known_as(self, name: str) -> KnownModel | None:
        with self._lock:
            return self._swap.known.get(name)

    # --- requests -----------------------------------------------------------------------------------------------------

    def serve(self, turn: Turn, served: ServedModel) -> TurnInProgress:
        """Submit a turn to its model: at once where that is loaded, else as soon as it is.

        Raises RequestError for what cannot be served, also where the turn would have to wait first.
        """
        with self._place(served.name, self._clock()) as loaded:
            if loaded is not None:
                return self._callbacks.submit(turn, loaded)
        with self._telling(turn, served.name):
            prompt = preview(self.countable(turn, served), served)
            ticket = self._queue(turn, served.name, len(prompt.tokens))
        return DeferredTurn(
            turn.request_id,
            lambda: self._begin(turn, ticket),
            lambda: self._leave(ticket),
            num_prompt_tokens=len(prompt.tokens),
            num_marked_tokens=prompt.num_marked_tokens,
        )

    def load(self, turn: Turn, served: ServedModel) -> Generator[None]:
        """Have a model loaded: ends once it is, and gives None until that; closing it gives up. Raises RequestError."""
        ticket: _Ticket | None = None
        try:
            while True:
                with self._place(served.name, ticket.since if ticket is not None else self._clock()) as loaded:
                    if loaded is not None:
                        return
                ticket = ticket or self._queue(turn, served.name, 0)
                self._wait_on(ticket)
                yield
        finally:
            self._leave(ticket)

    @contextlib.contextmanager
    def _place(self, name: str, since: float) -> Iterator[ServedModel | None]:
        """The loaded model, if it is this one and may be asked something; it does not leave within the block."""
        with self._stepped():
            loaded = self._swap.loaded if self._may_enter(name, since) else None
            self._num_entering += loaded is not None
        try:
            yield loaded
        finally:
            if loaded is not None:
                with self._lock:
                    self._num_entering -= 1

    @contextlib.contextmanager
    def _telling(self, turn: Turn, name: str) -> Iterator[None]:
        """A turn that is refused here has its line too."""
        try:
            yield
        except RequestError as error:
            self._callbacks.refused(turn, name, error)
            raise

    def _begin(self, turn: Turn, ticket: _Ticket) -> TurnInProgress | None:
        """Submit a turn that waited; None while it has to wait on. Raises RequestError."""
        with self._place(ticket.model, ticket.since) as loaded:
            if loaded is not None:
                return self._callbacks.submit(turn, loaded)
        with self._telling(turn, ticket.model):
            self._wait_on(ticket)
        return None

    # --- the queue ----------------------------------------------------------------------------------------------------

    def _queue(self, turn: Turn, name: str, num_prompt_tokens: int) -> _Ticket:
        """A place in the queue. Raises ModelUnavailable for a model that failed just now, QueueFull, NotReady."""
        with self._lock:
            self._check_open()
            if (failure := self._swap.fresh_failure(name)) is not None:
                raise ModelUnavailable(str(failure.error), param="model")
            if len(self._tickets) >= self._max_waiting:
                raise QueueFull(f"{len(self._tickets)} requests wait for another model already.", retry_after_seconds=5)
            now = self._clock()
            ticket = _Ticket(turn, num_prompt_tokens, name, now, now)
            self._tickets.append(ticket)
            return ticket

    def _wait_on(self, ticket: _Ticket) -> None:
        """Keep a place. Raises ModelUnavailable where the model failed to load meanwhile, NotReady."""
        with self._lock:
            self._check_open()
            failure = self._swap.known[ticket.model].failure
            if failure is not None and failure.at >= ticket.since:
                raise ModelUnavailable(str(failure.error), param="model")
            ticket.asked_at = self._clock()
            if ticket not in self._tickets:  # its thread was held up for so long that the place was given up
                self._tickets.append(ticket)

    def _leave(self, ticket: _Ticket | None) -> None:
        with self._lock:
            if ticket in self._tickets:
                self._tickets.remove(ticket)

    def _check_open(self) -> None:
        if self._is_closing:
            raise NotReady("The server is shutting down.", retry_after_seconds=10)

    def _may_enter(self, name: str, since: float) -> bool:
        """All that waited when a model was loaded may enter. While others wait, it takes later requests only until its
        stay is over: it has to become idle at last."""
        if self._is_closing or not self._swap.is_loaded(name):
            return False
        swap = self._swap
        if since <= swap.loaded_at or self._clock() < swap.stay_until:
            return True
        return all(ticket.model == name for ticket in self._tickets)

    @contextlib.contextmanager
    def _stepped(self) -> Iterator[None]:
        """The lock, after one step; what that has to say is said when the lock is free: a terminal may be slow."""
        notes: list[str] = []
        try:
            with self._lock:
                self._advance()
                notes = self._swap.take_notes()
                yield
        finally:
            for note in notes:
                self._callbacks.note(note)

    def _advance(self) -> None:
        """One step further: begin a swap where one is wanted and nothing computes, or go on with it."""
        if self._is_closing:
            return
        if self._swap.exchange is not None:
            self._swap.advance()
            if self._swap.loaded is not None:  # at the start: whoever sees it loaded may ask it from now on
                self._catalogue = self._offered
            return
        oldest = self._clock() - ABANDONED_SECONDS
        self._tickets = [ticket for ticket in self._tickets if ticket.asked_at >= oldest]
        wanted = next((ticket for ticket in self._tickets if not self._swap.is_loaded(ticket.model)), None)
        is_busy = self._num_entering or any(self._may_enter(ticket.model, ticket.since) for ticket in self._tickets)
        if wanted is not None and not is_busy and not self._swap.has_rows:
            self._swap.begin(wanted.model, wanted.since)


def _facts(ticket: _Ticket, now: float) -> RunningFacts:
    """A request that waits, as those see it who watch the server."""
    return RunningFacts(
        request_id=ticket.turn.request_id,
        protocol=ticket.turn.protocol,
        model=ticket.model,
        session=ticket.turn.session.session_id,
        stage="waiting for model",
        num_prompt_tokens=ticket.num_prompt_tokens,
        seconds=now - ticket.since,
    )
