"""`kvserve proxy`: the process that has LiteLLM and no model, in front of servers elsewhere. It joins settings, the
terminal and `proxy/`, and imports neither the engine nor a web server.

    settings, port -> ask the servers which model they have -> start LiteLLM -> wait for a signal -> stop
"""

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import httpx
from rich.console import Console

from kvserve.app.proxy_wiring import access_warnings, named_backends, proxy_settings, proxy_url, started_proxy
from kvserve.config import Launch, Settings, load_launch
from kvserve.core import KEY_HEADER, NO_KEY, JsonObject
from kvserve.errors import KvserveError, SettingError, StartupError
from kvserve.observe.terminal import Terminal
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import proxy_files
from kvserve.proxy.keys_file import refuse_unusable_keys
from kvserve.proxy.litellm import LitellmProxy
from kvserve.proxy.ownership import refuse_foreign_holder
from kvserve.settings.start_checks import refuse_unusable_start

ANSWER_SECONDS = 30.0
"""How long a start waits for the first server that says which model it has."""

_PATIENCE_SECONDS = 2.0
_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ProxyReady:
    """What is said of a proxy that answers: its URL without a path, the model that it lists, the servers behind it."""

    proxy_url: str
    model: str
    backends: tuple[str, ...]


class ProxyAlone:
    """The process, from `start` to `stop`, on the main thread."""

    def __init__(self, launch: Launch, terminal: Terminal) -> None:
        self._settings = launch.settings
        self._environment: Mapping[str, str] = launch.environment
        self._terminal = terminal
        self._backends = named_backends(launch.settings)
        self._proxy: LitellmProxy | None = None

    def start(self, stopping: threading.Event) -> ProxyReady | None:
        """Start LiteLLM and wait until it answers; None once `stopping` is set. Raises StartupError."""
        for warning in access_warnings(self._settings, has_model=False):
            self._terminal.note(f"Warning: {warning}")
        model = self._find_model(stopping)
        if model is None:
            return None
        listed = self._settings.proxy_model_id.replace("{MODEL_PATH}", model)
        settings = replace(
            proxy_settings(self._settings, self._backends),
            listed_model_id=listed,
            backend_model_id=model,
            secret=self._settings.proxy_secret or "",
            watches_backends=True,
        )
        self._proxy = started_proxy(settings, self._environment, self._terminal)
        while not stopping.is_set() and self._proxy.state.status == "starting":
            stopping.wait(0.1)
        names = tuple(backend.name for backend in self._backends)
        return ProxyReady(proxy_url(self._settings), listed, names)

    def stop(self) -> None:
        """End LiteLLM."""
        if self._proxy is not None:
            self._proxy.stop()

    def _find_model(self, stopping: threading.Event) -> str | None:
        """The model that the servers say they have, also while they load it. Says what is odd about them. Raises
        StartupError if none of them answers in time."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not stopping.is_set():
            said = {each.name: body for each in self._backends if (body := health_of(each, self._secret)) is not None}
            models = {str(body["model"]) for body in said.values() if body.get("model")}
            if models:
                self._tell(said, models)
                return sorted(models)[0]
            if time.monotonic() > deadline:
                names = ", ".join(backend.name for backend in self._backends)
                raise StartupError(f"None of BACKENDS answered within {ANSWER_SECONDS:g} seconds: {names}.")
            stopping.wait(_AGAIN_SECONDS)
        return None

    @property
    def _secret(self) -> str | None:
        return self._settings.proxy_secret

    def _tell(self, said: Mapping[str, JsonObject], models: set[str]) -> None:
        for backend in self._backends:
            body = said.get(backend.name)
            if body is None:
                self._terminal.note(f"{backend.name} does not answer yet.")
            elif body.get("knows_proxy") is not True:
                self._terminal.note(
                    f"Warning: {backend.name} does not believe this proxy and is never asked: it needs the same "
                    "PROXY_SECRET, and a version that knows it."
                )
        if len(models) > 1:
            self._terminal.note(f"Warning: the servers have different models: {', '.join(sorted(models))}.")


def health_of(backend: BackendAddress, secret: str | None) -> JsonObject | None:
    """What GET /health says there, whatever its status; None without an answer. No secret is told where there is
    none."""
    headers = {KEY_HEADER: f"{secret} {NO_KEY}"} if secret else {}
    try:
        response = httpx.get(f"{backend.base}/health", headers=headers, timeout=_PATIENCE_SECONDS, trust_env=False)
        body = response.json()
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def main(argv: Sequence[str], on_ready: Callable[[ProxyReady], None] | None = None) -> int:
    """Serve until a signal; returns the exit code. `argv` are the server's flags; `on_ready` is told once LiteLLM
    answers."""
    terminal = Terminal(Console(stderr=True))
    stopping = threading.Event()
    try:
        app = ProxyAlone(_launch(argv), terminal)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: stopping.set())
        try:
            ready = app.start(stopping)
            if ready is not None and on_ready is not None:
                on_ready(ready)
            stopping.wait()
        finally:
            app.stop()
    except KvserveError as error:
        terminal.error(str(error))
        return 1
    return 0


def _launch(argv: Sequence[str]) -> Launch:
    """The settings, once what they name can be used. Raises StartupError."""
    launch = load_launch(("--no-proxy", *argv))
    settings = launch.settings
    refuse_unusable_settings(settings)
    refuse_foreign_holder(
        settings.proxy_host, settings.proxy_port, proxy_files(settings.state_dir, settings.proxy_port)
    )
    return launch


def refuse_unusable_settings(settings: Settings, told: Collection[str] = ()) -> None:
    """Raises StartupError for the first setting of a proxy that is missing or leads nowhere; those that were `told` are
    not looked at."""
    if not settings.backends:
        raise SettingError("BACKENDS", "", "the servers to stand in front of, such as http://a:8080,http://b:8080")
    if settings.proxy_secret is None:
        raise SettingError(
            "PROXY_SECRET", "", "the secret that the servers of BACKENDS have too, 16 characters or more"
        )
    names = {"proxy_host", "proxy_port", "state_dir"}.difference(told)
    own = {name: getattr(settings, name) for name in names}
    refuse_unusable_start(own, demo=None, with_proxy=True, writes_kv=False)
    refuse_unusable_keys(settings.api_keys_file)
