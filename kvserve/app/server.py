"""The process: builds the rooms from the settings, starts and stops them in order, and answers for them to `web/`.

    bind 8080 -> start LiteLLM -> load the default model -> banner -> serve -> end every answer -> stop all

It joins rooms per process, as `requests/serve.py` does per request.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from kvserve import __version__
from kvserve.app.banner import Surroundings, banner_facts
from kvserve.app.blas import active_blas, what_computes
from kvserve.app.catalogue import ModelSource
from kvserve.app.demo_model import DemoModel, demo_model
from kvserve.app.engine_fields import engine_fields
from kvserve.app.forget_owner import Forgetting
from kvserve.app.model_factory import ModelFactory
from kvserve.app.model_pool import Callbacks, ModelPool
from kvserve.app.proxy_wiring import own_backend, proxy_settings, proxy_url, started_proxy, url_host
from kvserve.app.ranks_end import RanksEnd
from kvserve.app.shared_tier import shared_cache, why_records_stay
from kvserve.app.wiring import (
    agent_store,
    catalogue,
    identity_settings,
    observability_settings,
    remote_pictures,
    request_defaults,
    response_store,
    template_file,
    web_settings,
)
from kvserve.config import Launch
from kvserve.core import JsonObject, TokenSequence, Turn
from kvserve.core.keeping import Scope
from kvserve.engine.caches_seen import note_code
from kvserve.engine.hub import fetched_folder
from kvserve.engine.model import expected_sizes
from kvserve.engine.warming import Warming
from kvserve.errors import ModelLoadError, NotFound, NotReady, RequestError
from kvserve.observe.dashboard import Look
from kvserve.observe.observability import Observability
from kvserve.observe.reports import cache_body, image_fields, memory_body, ranks_body
from kvserve.observe.terminal import BannerFacts, Terminal, size_text
from kvserve.protocols.model_cards import ModelCard
from kvserve.proxy.litellm import LitellmProxy
from kvserve.requests.agent_turns import Agents, Models
from kvserve.requests.deferred import TurnInProgress
from kvserve.requests.serve import count_tokens, serve_turn
from kvserve.requests.served_model import ServedModel
from kvserve.sessions.lineage import SessionView
from kvserve.settings.start_checks import DEMO_NAMES, local_folder
from kvserve.warming.prewarming import prewarm
from kvserve.warming.speculative_prefill import SpeculativePrefill
from kvserve.web.http_server import HttpServer
from kvserve.web.routes import make_router

MAX_WATCHERS = 8
"""Pages that may watch at the same time: each holds a connection and its thread."""

STREAMS_END_SECONDS = 3.0
"""Streams look whether they are to end at least once in a second; this is for those whose client does not read."""

ENGINE_STOP_SECONDS = 1.5

DRAIN_FIELDS = ("draining", "num_running", "num_waiting")


class Server:
    """One server process. Implements what `web/` needs (`WebService`); `start` and `stop` belong to the main thread."""

    def __init__(self, launch: Launch, terminal: Terminal) -> None:
        self._launch = launch
        self._settings = settings = launch.settings
        self._terminal = terminal
        self._started_at = time.time()
        self._blas = active_blas()
        self.is_fetching = False
        self.ranks_end = RanksEnd()
        self._demo: DemoModel | None = None
        self._proxy: LitellmProxy | None = None
        self.watchers: threading.Semaphore = threading.BoundedSemaphore(MAX_WATCHERS)
        self.observability = Observability(observability_settings(settings, launch.disk_cache), terminal, self._look)
        self._proxy_secret = settings.proxy_secret or secrets.token_hex(16)
        self._is_draining = False
        web = replace(web_settings(settings), proxy_secret=self._proxy_secret)
        self._server = HttpServer(web, make_router(self), terminal.error)
        self.defaults = request_defaults(settings)
        self._chat_template = template_file(settings.chat_template)
        self._next_turns = SpeculativePrefill(self._loaded_as, terminal.error) if settings.warm_next_turn else None
        self._shared = shared_cache(settings, launch.disk_cache, terminal.error)
        observer = self.observability.observer()
        factory = ModelFactory(
            settings=settings,
            defaults=self.defaults,
            identity=identity_settings(settings),
            observe=self._next_turns.beside(observer) if self._next_turns is not None else observer,
            report=terminal.error,
            note=terminal.note,
            records_dir=settings.disk_cache_dir if launch.disk_cache == "on" else None,
            disk_cache=launch.disk_cache,
            remote=remote_pictures(settings),
            blas=what_computes(self._blas, launch.environment),
            ranks=launch.ranks,
            on_lost=self.ranks_end.come,
            shared=self._shared,
        )
        callbacks = Callbacks(self._submit, self.observability.refused, terminal.note)
        self._pool = ModelPool(factory, callbacks, max_waiting=max(1, settings.max_queued_requests))
        self.responses = response_store(settings, launch.disk_cache, terminal.error)
        self._forgetting = Forgetting(
            self._pool,
            self._next_turns,
            self.responses,
            self.observability,
            self._shared,
            parts_sessions=settings.cache_session_partitioning,
        )
        self._agent_store = agent_store(settings, launch.disk_cache)
        self.agents = Agents(
            self._agent_store,
            Models(
                begin=self._forgetting.begin,
                name_of=self._pool.name_of,
                resolve=self._pool.resolve,
                serve=self.serve,
                count=lambda turn, served: count_tokens(self._pool.countable(turn, served), served),
                kept=self._kept_tokens,
                let_go=self._let_go,
            ),
        )

    # --- start and stop -----------------------------------------------------------------------------------------------

    def start(self, stopping: threading.Event) -> None:
        """Start everything; returns early once `stopping` is set. Raises StartupError."""
        self.ranks_end.stopping = stopping
        note_code()
        self.responses.tidy()
        self.observability.open()
        self._server.bind()
        self._server.start()
        self._find_demo()
        self._start_proxy()
        with self._terminal.loading(self._model_name):
            default = ModelSource(self._model_name, self._model_folder(), self._chat_template, is_default=True)
            served = self._pool.start(catalogue(self._launch, default, self._listed_model_id), stopping)
        if served is None:
            return
        if self._shared is not None:  # what it hears to forget takes a model that is loaded
            self._shared.start(self._forgetting.hear)
            if (reason := why_records_stay(self._settings)) is not None:
                self._terminal.note(f"Only KV travels through the shared cache, no records of conversations: {reason}.")
        self._terminal.ready("kvserve", self._url)
        self._wait_for_proxy(stopping)
        self._terminal.banner(self._banner(served))

    def stop(self, *, is_told: bool = False) -> None:
        """End all answers, the proxy, the engine, then what is left; `is_told`: somebody at the terminal waits."""
        if is_told:
            self._terminal.stopping(self.observability.num_running + len(self._pool.waiting()))
        self._server.stop_accepting()
        self._server.close(STREAMS_END_SECONDS)
        if self._next_turns is not None:
            self._next_turns.stop()
        self._pool.stop(0)
        if self._proxy is not None:
            self._proxy.stop()
        with self._terminal.flushing() as tell:
            self._pool.stop(ENGINE_STOP_SECONDS, tell)
        if self._shared is not None:
            self._shared.close()
        for known in self._pool.known():
            known.conversations.close()
        self.responses.close()
        self._agent_store.close()
        self.observability.close()
        if is_told:
            self._terminal.stopped(self._num_unwritten_bytes)

    @property
    def is_computing(self) -> bool:
        """Whether a pass or a load has outlasted `stop`."""
        return self._pool.is_running

    def abandoned(self) -> str:
        """What is lost when the process ends now."""
        if num_bytes := self._num_unwritten_bytes:
            return f"Stopped at once: {size_text(num_bytes)} of KV were not on disk yet and will be computed again."
        return "Stopped at once: answers were broken off, and KV that was not on disk yet will be computed again."

    @property
    def _num_unwritten_bytes(self) -> int:
        """What the end was to write to disk and has not."""
        return sum(all_ - done for done, all_ in (each.engine.flushed_bytes for each in self._pool.known()))

    @property
    def port(self) -> int:
        """Where kvserve itself listens; known once `start` has bound it."""
        return self._server.port

    @property
    def _model_name(self) -> str:
        if self._launch.demo is None:
            return self._settings.model_path
        return self._demo.name if self._demo is not None else DEMO_NAMES[self._launch.demo]

    def _find_demo(self) -> None:
        """Before anything is told the model's name: where nothing can be fetched it is another one."""
        if self._launch.demo is None:
            return
        self.is_fetching = self._launch.demo == "smollm2"
        try:
            folder, environment, is_fast = self._settings.state_dir, self._launch.environment, self._blas is not None
            self._demo = demo_model(self._launch.demo, folder, environment, self._terminal, is_fast=is_fast)
        finally:
            self.is_fetching = False

    def _model_folder(self) -> Path:
        if self._demo is not None:
            return self._demo.folder
        if (folder := local_folder(self._settings.model_path)) is not None:
            return folder
        self.is_fetching = True
        try:
            return fetched_folder(self._settings.model_path, self._terminal.note)
        finally:
            self.is_fetching = False

    def _start_proxy(self) -> None:
        if not self._launch.with_proxy:
            return
        settings = replace(
            proxy_settings(self._settings, own_backend(self._settings, self._server.port)),
            listed_model_id=self._listed_model_id,
            backend_model_id=self._model_name,
            secret=self._proxy_secret,
        )
        self._proxy = started_proxy(settings, self._launch.environment, self._terminal)

    @property
    def _url(self) -> str:
        return f"http://{url_host(self._settings.mlx_host)}:{self._server.port}"

    @property
    def _listed_model_id(self) -> str:
        return f"openai/{self._model_name}" if self._launch.demo is not None else self._settings.listed_model_id

    def _wait_for_proxy(self, stopping: threading.Event) -> None:
        """Wait for readiness in short steps, so that a signal is not kept waiting."""
        deadline = time.monotonic() + self._settings.proxy_startup_wait_seconds
        while self._proxy is not None and not stopping.is_set():
            if self._proxy.state.status == "ready" or time.monotonic() > deadline:
                return
            stopping.wait(0.1)

    def _banner(self, served: ServedModel) -> BannerFacts:
        around = Surroundings(
            server_url=self._url,
            proxy_url=proxy_url(self._settings) if self._proxy is not None else None,
            is_proxy_ready=self._proxy is not None and self._proxy.state.status == "ready",
            models=self.list_models(),
            demo=self._demo,
            blas=self._blas,
            chat_template=self._template_of(served.name),
        )
        return banner_facts(self._settings, self._launch.warnings, served, around)

    def _template_of(self, model_name: object) -> str | None:
        """The file whose chat template stands for that of the model of this name, None where its own does."""
        template = self._chat_template
        return str(template.path) if template is not None and model_name == self._model_name else None

    # --- what web/ asks -----------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> ServedModel:
        """A turn has been read: it is under way before its model is looked for, which may take seconds."""
        self._forgetting.begin(turn)
        return self.resolve_model(turn.model)

    def resolve_model(self, name: str | None) -> ServedModel:
        """The model that this name means, loaded or not; the default one for names that nobody knows."""
        return self._pool.resolve(name)

    def list_models(self) -> Sequence[ModelCard]:
        """What can be served, the loaded model first; a model's time is that of its folder."""
        cards = []
        for listing in self._pool.listings():
            folder = listing.source.folder
            with contextlib.suppress(ModelLoadError, OSError):  # a folder that is being written or taken away
                context_limit = expected_sizes(folder, self._settings.max_kv_size).context_limit
                cards.append(ModelCard(listing.name, int(folder.stat().st_mtime), context_limit, listing.alias_of))
        return cards

    def health(self) -> tuple[int, JsonObject]:
        pool = self._pool.status()
        body: dict[str, object] = {
            **engine_fields(pool, default_name=self._model_name),
            "blas": self._blas.name if self._blas is not None else None,
            "draining": self._is_draining,
            "num_agents": self.agents.num_agents,
            "num_open_connections": self._server.num_open_connections,
            "proxy": self._proxy.state.status if self._proxy is not None else "off",
            "shared_cache": self._shared.server.state if self._shared is not None else "off",
            "uptime_seconds": round(time.time() - self._started_at, 1),
            "version": __version__,
        }
        body["chat_template"] = self._template_of(body["model"])
        return (200 if body["status"] in ("ok", "swapping") else 503), body

    def drain(self, *, is_draining: bool) -> JsonObject:
        """Whoever asks for /health is told so; what comes all the same is answered."""
        self._is_draining = is_draining
        return {name: value for name, value in self.health()[1].items() if name in DRAIN_FIELDS}

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady."""
        served = self._pool.loaded
        report, totals = served.engine.cache_report(), served.conversations.totals()
        body = cache_body(report, totals, self.observability.num_rejections, self.observability.speculation())
        status = served.engine.status
        memory = memory_body(status.memory) if status.memory is not None else None
        body = {**body, "memory": memory, "ranks": ranks_body(status.ranks)}
        return {**body, **image_fields(served.engine.image_report())}

    def _look(self) -> Look:
        """How the server is at the moment, for those who watch it."""
        cache: JsonObject | None = None
        sessions: Sequence[SessionView] = ()
        with contextlib.suppress(NotReady):
            cache = self.cache_report()
            sessions = self._pool.loaded.conversations.sessions()
        return Look(self.health()[1], cache, sessions, time.time(), self._pool.waiting())

    def clear_cache(self) -> bool:
        """Forget everything that is kept; False where some of it may still be in a file or in the shared cache. Raises
        NotReady."""
        return self._forgetting.clear()

    def forget(self, session: str | None, principal: str | None) -> JsonObject:
        """Forget what is kept of a session, of a principal (by its name), or of a session of a principal; None stands
        for any. Returns how much that was. Raises BadRequest where sessions are not kept apart."""
        return self._forgetting.forget(Scope(session, principal))

    def _loaded_as(self, model_name: str) -> ServedModel | None:
        """The loaded model, if this is its name."""
        with contextlib.suppress(NotReady):
            served = self._pool.loaded
            return served if served.name == model_name else None
        return None

    def _kept_tokens(self, model_name: str, tokens: TokenSequence, used_at: float) -> tuple[int, int]:
        """How much of a conversation's KV is in RAM, and how much there or on disk."""
        with contextlib.suppress(NotReady):
            served = self._pool.loaded
            if served.name == model_name:
                return served.engine.kept_tokens(tokens)
        # what a model has computed goes to the disk before it leaves the memory
        is_fresh = time.time() - used_at < self._settings.disk_cache_ttl_hours * 3_600
        return 0, len(tokens) if self._launch.disk_cache == "on" and is_fresh else 0

    def _let_go(self, model_name: str, tokens: TokenSequence, owner: str) -> None:
        """Forget the KV of an owner's conversation that nobody will go on with; what is not loaded ages out on disk."""
        if (served := self._loaded_as(model_name)) is not None:
            with contextlib.suppress(NotReady):
                served.engine.discard(tokens, owner.__eq__)

    def count_tokens(self, turn: Turn, served: ServedModel) -> int:
        return count_tokens(self._pool.countable(turn, served), served)

    def prewarm(self, turn: Turn, served: ServedModel) -> Warming:
        """Have what requests like this begin with computed soon; no other model is loaded for it."""
        if (loaded := self._loaded_as(served.name)) is None:
            raise NotReady(f"{served.name} is not loaded now.", retry_after_seconds=10)
        return prewarm(turn, loaded)

    def load(self, turn: Turn, served: ServedModel) -> Generator[None]:
        """Have a model loaded that is listed: a name that nobody knows means no other one here. Raises RequestError."""
        if turn.model not in {listing.name for listing in self._pool.listings()}:
            raise NotFound(f"The model {turn.model!r} is not served here.", param="model")
        return self._pool.load(turn, served)

    def serve(self, turn: Turn, served: ServedModel) -> TurnInProgress:
        """Submit a turn; one whose model is not loaded waits for it."""
        return self._pool.serve(turn, served)

    def _submit(self, turn: Turn, served: ServedModel) -> TurnInProgress:
        """Submit a turn to the model that is loaded; one that is refused has its line in the terminal too."""
        self.responses.tidy()
        try:
            return serve_turn(turn, served)
        except RequestError as error:
            self.observability.refused(turn, served.name, error)
            raise
