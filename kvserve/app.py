"""The process: builds the rooms from the settings, starts and stops them in order, and answers for them to `web/`.

    bind 8080 -> start LiteLLM -> load tokenizer and model -> banner -> wait for a signal -> end streams -> stop all

It joins rooms per process, as `pipeline.py` does per request.
"""

import gc
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import llguidance
from rich.console import Console

from kvserve import __version__
from kvserve.config import Launch, Settings, load_launch, settings_acting_later
from kvserve.core import JsonObject, RequestDefaults, Turn
from kvserve.demo.build import build_model
from kvserve.engine.model import check_folder, resolve_model_folder
from kvserve.engine.tool_parser import library_tool_parser
from kvserve.engine.worker import Engine
from kvserve.errors import KvserveError, NotFound, NotReady, RequestError, StartupError
from kvserve.identity import Conversations
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.tool_parsers.foreign import ForeignToolForm
from kvserve.pipeline import ServedModel, serve_turn
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from kvserve.protocols.openai_models import ModelCard
from kvserve.proxy.litellm import LitellmProxy
from kvserve.reports import cache_body, explanation_body, trace_fields
from kvserve.running import FinishedTurn, Observer, RunningTurn
from kvserve.sessions.explanations import ExplanationBook
from kvserve.telemetry.terminal import BannerFacts, RequestFacts, Terminal
from kvserve.telemetry.trace import TraceLog
from kvserve.web.routes import make_router
from kvserve.web.server import HttpServer
from kvserve.wiring import (
    engine_settings,
    identity_settings,
    proxy_settings,
    request_defaults,
    url_host,
    web_settings,
)

DEMO_MODEL_NAME = "kvserve-demo-qwen3"
OWN_TOOL_TAGS = ("<tool_call>", "<function=", "<|channel|>")
SESSION_HASH_TOKENS = 128
STREAMS_END_SECONDS = 1.5
ENGINE_STOP_SECONDS = 1.5


def main(argv: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit code: 0 after a signal, 1 when the server could not start."""
    terminal = Terminal(Console(stderr=True))
    stopping = threading.Event()
    try:
        app = App(load_launch(argv), terminal)
    except StartupError as error:
        terminal.error(str(error))
        return 1
    _on_signals(stopping, app)
    try:
        app.start(stopping)
        stopping.wait()
    except KeyboardInterrupt:
        terminal.note("Interrupted while the model was fetched.")
    except KvserveError as error:
        terminal.error(str(error))
        return 1
    finally:
        app.stop()
    return 0


def _on_signals(stopping: threading.Event, app: "App") -> None:
    """A signal sets the event; a download, which looks at no event, is interrupted."""

    def stop(_signal_number: int, _frame: FrameType | None) -> None:
        stopping.set()
        if app.is_fetching:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


class App:
    """One server process. Implements what `web/` needs (`Service`); `start` and `stop` belong to the main thread."""

    def __init__(self, launch: Launch, terminal: Terminal) -> None:
        self._launch = launch
        self._settings = launch.settings
        self._terminal = terminal
        self._started_at = time.time()
        self.is_fetching = False
        self._served: ServedModel | None = None
        self._engine: Engine | None = None
        self._proxy: LitellmProxy | None = None
        self._trace = TraceLog(
            self._settings.log_root, self._settings.enable_request_logging, time.time, terminal.error
        )
        self._server = HttpServer(web_settings(self._settings), make_router(self), terminal.error)
        self._defaults = request_defaults(self._settings)
        self._identity = identity_settings(self._settings)
        self._explanations = ExplanationBook()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def start(self, stopping: threading.Event) -> None:
        """Start everything; returns early once `stopping` is set. Raises StartupError."""
        self._server.bind()
        self._server.start()
        self._start_proxy()
        with self._terminal.loading(self._model_name):
            served = self._load(stopping)
        if served is None:
            return
        gc.freeze()  # what is loaded stays: the collector need not walk over it again on the engine's time
        self._served = served
        self._wait_for_proxy(stopping)
        self._terminal.banner(self._banner(served))

    def stop(self) -> None:
        """End streams well-formed, then the proxy, the engine and what is left of the sockets."""
        self._server.stop_accepting()
        self._server.close(STREAMS_END_SECONDS)
        if self._engine is not None:
            self._engine.stop(0)
        if self._proxy is not None:
            self._proxy.stop()
        if self._engine is not None:
            self._engine.stop(ENGINE_STOP_SECONDS)

    @property
    def port(self) -> int:
        """Where kvserve itself listens; known once `start` has bound it."""
        return self._server.port

    @property
    def _model_name(self) -> str:
        return DEMO_MODEL_NAME if self._launch.is_demo else self._settings.model_path

    def _load(self, stopping: threading.Event) -> ServedModel | None:
        """The served model, or None when the server is told to stop while it loads."""
        folder = self._model_folder()
        check_folder(folder)
        tokenizer = load_tokenizer(folder)
        self._engine = Engine(
            folder,
            engine_settings(self._settings),
            grammar_tokenizer=_grammar_tokenizer(tokenizer),
            report=self._terminal.error,
        )
        self._engine.start()
        template = ChatTemplate(tokenizer)
        added_tokens = frozenset(token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
        output_format = _output_format(self._settings, folder, tokenizer, added_tokens)
        while not stopping.is_set():
            try:
                model = self._engine.wait_until_ready(0.2)
            except NotReady:
                continue
            markers = learn_markers(tokenizer, template)
            return ServedModel(
                name=self._model_name,
                tokenizer=tokenizer,
                template=template,
                markers=markers,
                stitcher=Stitcher.of(tokenizer, template, markers),
                conversations=Conversations(self._identity),
                output_format=output_format,
                added_tokens=added_tokens,
                engine=self._engine,
                defaults=self._defaults,
                vocab_size=model.vocab_size,
                context_limit=model.context_limit,
                observe=Observer(self._terminal.prefill, self._finished),
            )
        return None

    def _model_folder(self) -> Path:
        if self._launch.is_demo:
            return build_model("qwen3", self._settings.state_dir / DEMO_MODEL_NAME)
        self.is_fetching = True
        try:
            return resolve_model_folder(self._settings.model_path, self._terminal.note)
        finally:
            self.is_fetching = False

    def _start_proxy(self) -> None:
        if not self._launch.with_proxy:
            return
        settings = replace(proxy_settings(self._settings, self._server.port), listed_model_id=self._listed_model_id)
        self._proxy = LitellmProxy(settings, self._launch.environment, self._terminal.note)
        self._proxy.start()

    @property
    def _listed_model_id(self) -> str:
        return f"openai/{DEMO_MODEL_NAME}" if self._launch.is_demo else self._settings.listed_model_id

    def _wait_for_proxy(self, stopping: threading.Event) -> None:
        """Wait for readiness in short steps, so that a signal is not kept waiting."""
        deadline = time.monotonic() + self._settings.proxy_startup_wait_seconds
        while self._proxy is not None and not stopping.is_set():
            if self._proxy.state.status == "ready" or time.monotonic() > deadline:
                return
            stopping.wait(0.1)

    def _banner(self, served: ServedModel) -> BannerFacts:
        warnings = [f"{key} is set, but what it controls is not there yet" for key in self._settings_without_effect()]
        if self._settings.normalize_write_tool_content_for_prompt:
            warnings.append("The model does not see the contents of its past write calls, only their digests.")
        if (support := served.engine.status.cache_support) is not None:
            warnings += support.notes
        if self._proxy is not None and self._proxy.state.status != "ready":
            warnings.append("LiteLLM is still starting (10 to 20 s); until then use the second URL.")
        return BannerFacts(
            version=__version__,
            model_name=served.name,
            context_limit=served.context_limit,
            server_url=f"http://{url_host(self._settings.mlx_host)}:{self._server.port}",
            proxy_url=f"http://127.0.0.1:{self._settings.proxy_port}" if self._proxy is not None else None,
            is_demo=self._launch.is_demo,
            needs_api_key=self._settings.api_key is not None,
            warnings=tuple(warnings),
        )

    def _settings_without_effect(self) -> tuple[str, ...]:
        flag = {"on": (), "ephemeral": ("--ephemeral-cache",), "off": ("--no-disk-cache",)}[self._launch.disk_cache]
        return (*settings_acting_later(self._settings), *flag)

    # --- what web/ asks -----------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> RequestDefaults:
        return self._defaults

    def resolve_model(self, name: str | None) -> ServedModel:
        """The loaded model answers to every name, unless MODEL_STRICT is set."""
        served = self._served
        if served is None:
            raise NotReady("The model is still loading.", retry_after_seconds=5)
        if self._settings.model_strict and name not in (None, served.name, self._listed_model_id):
            raise NotFound(f"The model {name!r} is not served here; {served.name!r} is.", param="model")
        return served

    def list_models(self) -> Sequence[ModelCard]:
        served = self._served
        return [ModelCard(served.name, int(self._started_at), served.context_limit)] if served else []

    def health(self) -> tuple[int, JsonObject]:
        status = self._engine.status if self._engine is not None else None
        is_ready = self._served is not None and status is not None and status.state == "ready"
        support = status.cache_support if status is not None else None
        body: dict[str, object] = {
            "status": "ok" if is_ready else status.state if status is not None else "loading",
            "model": self._model_name,
            "num_running": status.num_prefilling + status.num_decoding if status else 0,
            "num_prefilling": status.num_prefilling if status else 0,
            "num_decoding": status.num_decoding if status else 0,
            "num_waiting": status.num_waiting if status else 0,
            "active_memory_bytes": status.active_memory_bytes if status else 0,
            "is_batched": support.can_batch if support else None,
            "is_prefix_cached": support.can_keep if support else None,
            "num_open_connections": self._server.num_open_connections,
            "proxy": self._proxy.state.status if self._proxy is not None else "off",
            "uptime_seconds": round(time.time() - self._started_at, 1),
            "version": __version__,
        }
        return (200 if is_ready else 503), body

    def cache_report(self) -> JsonObject:
        """The body of GET /v1/cache. Raises NotReady."""
        served = self._loaded
        report, totals = served.engine.cache_report(), served.conversations.totals()
        return cache_body(report, totals, self._explanations.num_rejections)

    def explain(self, request_id: str) -> JsonObject:
        """The body of GET /v1/cache/explain/{request_id}. Raises NotFound."""
        explanation = self._explanations.get(request_id.rpartition("-")[2])
        if explanation is None:
            raise NotFound(f"The request {request_id!r} is not known; the last thousand are.", param="request_id")
        return explanation_body(explanation)

    def clear_cache(self) -> None:
        """Forget everything that is kept. Raises NotReady."""
        served = self._loaded
        served.conversations.clear()
        self._explanations.clear()
        served.engine.clear_cache()

    @property
    def _loaded(self) -> ServedModel:
        if self._served is None:
            raise NotReady("The model is still loading.", retry_after_seconds=5)
        return self._served

    def serve(self, turn: Turn, served: ServedModel) -> RunningTurn:
        """Submit a turn; one that is refused has its line in the terminal too."""
        try:
            return serve_turn(turn, served)
        except RequestError as error:
            self._terminal.request_line(
                RequestFacts(turn.request_id, turn.protocol, served.name, error_status=error.status, cause=str(error))
            )
            raise

    def _finished(self, finished: FinishedTurn) -> None:
        """The request line, the explanation, and the turn in its session's trace file."""
        facts = finished.facts
        self._terminal.request_line(facts)
        if finished.explanation is not None:
            self._explanations.put(finished.explanation)
        if self._settings.enable_request_logging:
            session = facts.session or _first_tokens_hash(finished.prompt.tokens.ids)
            self._trace.write(session, "turn", **trace_fields(finished))


def _first_tokens_hash(ids: tuple[int, ...]) -> str:
    """The session of a request that names none: conversations that begin alike share a file."""
    return hashlib.sha256(repr(ids[:SESSION_HASH_TOKENS]).encode()).hexdigest()[:16]


def _grammar_tokenizer(tokenizer: Tokenizer) -> Callable[[int], llguidance.LLTokenizer]:
    """Makes llguidance's view of the tokenizer when the first request needs one, and keeps it: it takes a second."""
    made: dict[int, llguidance.LLTokenizer] = {}

    def make(vocab_size: int) -> llguidance.LLTokenizer:
        if vocab_size not in made:
            made[vocab_size] = llguidance.LLTokenizer(
                tokenizer.backend.to_str(),
                n_vocab=max(vocab_size, tokenizer.vocab_size),
                eos_token=sorted(tokenizer.stop_token_ids),
            )
        return made[vocab_size]

    return make


def _output_format(
    settings: Settings, folder: Path, tokenizer: Tokenizer, added_tokens: frozenset[str]
) -> OutputFormat:
    """How the model marks its output; mlx-lm is asked only where the forms read here do not occur in the template."""
    template = tokenizer.chat_template or ""
    foreign = None
    if not any(tag in template for tag in OWN_TOOL_TAGS):
        parser = library_tool_parser(folder)
        foreign = ForeignToolForm(parser.open_tag, parser.close_tag, parser.parse) if parser else None
    return select_format(settings.model_family, template, added_tokens, foreign)
