"""The queue for models under any order of events: nobody starves, no row is cut, one engine at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvserve.app.model_pool
import kvserve.app.model_swap
from kvserve.app.catalogue import Catalogue, CatalogueSettings, Disk, ModelSource
from kvserve.app.model_pool import Callbacks, ModelPool
from kvserve.core import AnswerEvent, Finished, RequestId, SamplingParams, Turn, Usage, Waiting
from kvserve.errors import ModelLoadError, ModelUnavailable, NotReady
from tests.laws import num_examples

MODELS = ("a", "b", "c", "broken")
DONE = Finished("stop", Usage(1, 0, 1))


@dataclass
class World:
    """What the engines share: the clock, which of them run, how many looks a load and an end take, and what other
    threads do while somebody waits for a load."""

    patience: int
    meanwhile: Callable[[], None] = lambda: None
    now: float = 100.0
    alive: list["FakeEngine"] = field(default_factory=list)
    num_loads: int = 0


class FakeEngine:
    """An engine that counts rows and takes its time. It must never be told to end while it has any."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.num_rows = 0
        self.num_looks = 0
        self.is_stopped = self.has_failed = False

    def start(self) -> None:
        assert not self.world.alive, "two models in memory"
        self.world.alive.append(self)
        self.world.num_loads += 1

    def wait_until_ready(self, timeout_seconds: float) -> object:
        if timeout_seconds > 0:
            self.world.meanwhile()
        self.num_looks += 1
        if self.num_looks <= self.world.patience:
            raise NotReady("loading")
        if self.name == "broken":
            self.has_failed = True
            self.world.alive.remove(self)
            raise ModelLoadError("broken")
        return object()

    def stop(self, timeout_seconds: float, tell: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        assert self.num_rows == 0, "a row was cut"
        self.is_stopped = True
        self.num_looks = 0

    @property
    def has_ended(self) -> bool:
        self.num_looks += 1
        is_over = self.has_failed or (self.is_stopped and self.num_looks > self.world.patience)
        if is_over and self in self.world.alive:
            self.world.alive.remove(self)
        return is_over

    @property
    def status(self) -> Any:
        return SimpleNamespace(num_waiting=0, num_prefilling=0, num_decoding=self.num_rows, active_memory_bytes=0)


class FakeMaker:
    """Models that are a name and an engine."""

    def __init__(self, world: World) -> None:
        self.world = world

    def describe(self, source: ModelSource) -> Any:
        return SimpleNamespace(name=source.name, engine=FakeEngine(self.world, source.name))

    def renewed(self, served: Any, source: ModelSource) -> Any:
        return self.describe(source)

    def refreshed(self, served: Any, source: ModelSource) -> Any:
        return served

    def completed(self, served: Any, model: object) -> Any:
        return served


class FakeRunning:
    """A row: it is over when somebody says so."""

    request_id = RequestId("r")
    num_prompt_tokens = num_marked_tokens = 0
    is_lost = False

    def __init__(self, engine: FakeEngine) -> None:
        assert engine in engine.world.alive and not engine.is_stopped
        self.engine = engine
        self.is_over = self.has_left = False
        engine.num_rows += 1

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        while not self.is_over:
            yield Waiting(0, 0)
        self.cancel()
        yield DONE

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        """Whoever looks step by step waits for nothing."""

    def cancel(self) -> None:
        self.engine.num_rows -= not self.has_left
        self.is_over = self.has_left = True


class Client:
    """A request, looked at step by step."""

    def __init__(self, pool: ModelPool, model: str) -> None:
        self.model = model
        self.outcome: object = None
        turn = Turn(RequestId("r"), "test", model, SamplingParams())
        try:
            self.turn = pool.serve(turn, pool.resolve(model))
        except ModelUnavailable as error:
            self.outcome = error
            return
        self.events = self.turn.events(0)

    def look(self) -> None:
        if self.outcome is None:
            try:
                event = next(self.events, None)
            except ModelUnavailable as error:
                event = error  # type: ignore[assignment]
            if not isinstance(event, Waiting):
                self.outcome = event

    def leave(self) -> None:
        if self.outcome is None:
            self.turn.cancel()
            self.events.close()  # type: ignore[attr-defined]
            self.outcome = "left"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(MODELS)),
        st.tuples(st.just("look"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.5, 5.0])),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def no_prompts() -> Iterator[None]:
    """Prompts are not what this is about, nor is the collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kvserve.app.model_pool, "preview", lambda turn, served: SimpleNamespace(tokens=(), num_marked_tokens=0)
        )
        patch.setattr(kvserve.app.model_swap, "gc", SimpleNamespace(freeze=int, unfreeze=int, collect=int))
        yield


def a_pool(world: World, submit: Callable[[Turn, Any], FakeRunning]) -> tuple[ModelPool, Catalogue]:
    """A pool of fake models that has not started, and what it may serve; the default model is `a`."""
    pool = ModelPool(
        FakeMaker(world),
        Callbacks(submit, lambda *_: None, lambda _: None),  # type: ignore[arg-type]
        max_waiting=1000,
        clock=lambda: world.now,
    )
    root = Path("/nowhere")
    settings = CatalogueSettings(folders=(root,))
    return pool, Catalogue(ModelSource("a", root / "a"), settings, Disk(lambda _: None, lambda _: True))


def test_who_sees_the_first_model_loaded_may_ask_it() -> None:
    """A look at the server takes the start a step further, too: what it sees holds before the start has seen it."""
    world, seen = World(patience=3), list[tuple[bool, bool]]()
    pool, catalogue = a_pool(world, lambda _, served: FakeRunning(served.engine))

    def look() -> None:
        is_loaded = pool.status().loaded is not None
        try:
            seen.append((is_loaded, pool.resolve(None).name == "a" and len(pool.listings()) > 0))
        except NotReady:
            seen.append((is_loaded, False))

    world.meanwhile = look
    assert pool.start(catalogue, Event()) is not None
    assert (False, False) in seen and (True, True) in seen
    assert {is_loaded for is_loaded, may_ask in seen if is_loaded != may_ask} == set()
    pool.stop(0)


@settings(max_examples=num_examples(60), deadline=None)
@given(STEPS, st.integers(0, 3))
def test_every_request_is_answered_by_its_model_or_told_why_not(steps: list[Any], patience: int) -> None:
    """Whatever comes in whichever order: at the end all rows that stayed have had their answer."""
    world = World(patience)
    running: list[FakeRunning] = []

    def submit(turn: Turn, served: Any) -> FakeRunning:
        assert served.name == turn.model
        running.append(FakeRunning(served.engine))
        return running[-1]

    pool, catalogue = a_pool(world, submit)
    assert pool.start(catalogue, Event()) is not None
    clients: list[Client] = []
    for kind, value in steps:
        if kind == "ask":
            clients.append(Client(pool, value))
        elif kind == "wait":
            world.now += value
        elif kind == "finish" and running:
            running[value % len(running)].is_over = True
        elif clients:
            client = clients[value % len(clients)]
            client.look() if kind == "look" else client.leave()
    num_loads, waited = world.num_loads, {client.model for client in clients if client.outcome is None}
    for _ in range(60 + 20 * len(clients)):
        world.now += 0.05
        for row in running:
            row.is_over = True
        for client in clients:
            client.look()
    for client in clients:
        is_told = isinstance(client.outcome, ModelUnavailable)
        assert client.outcome == "left" or (is_told if client.model == "broken" else client.outcome == DONE)
    assert world.num_loads - num_loads <= 2 * len(waited) + 3, "all that wait for a model are served together"
    pool.stop(0)
