"""The servers that the end-to-end tests share: at most one with LiteLLM runs at a time, for it takes 10 to 20 s."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.five_turns import SCALES
from tests.e2e.scripted import ScriptedServer, scripted_server
from tests.e2e.servers import ServerProcess
from tests.models import tiny_model

API_KEY = "a-secret-key"
CONTEXT_LIMIT = 8192
KINDS: Mapping[str, Mapping[str, Any]] = {
    "open": {},
    "strict": {
        "API_KEY": API_KEY,
        "MODEL_STRICT": "true",
        "MAX_KV_SIZE": CONTEXT_LIMIT,
        "MAX_CONCURRENT_REQUESTS": 1,
        "MAX_QUEUED_REQUESTS": 1,
    },
}


class Stage:
    """Holds the one running server; who asks for another kind ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kind: str | None = None
        self._server: ServerProcess | None = None
        self._num_started = 0

    def serve(self, kind: str) -> ServerProcess:
        """The demo model behind LiteLLM, ready to answer."""
        if self._server is None or self._kind != kind or self._server.process.poll() is not None:
            self.clear()
            self._num_started += 1
            folder = self._folder / f"{kind}-{self._num_started}"
            self._kind, self._server = kind, ServerProcess(folder, "--demo=tiny", **KINDS[kind])
            self._server.wait_until_proxy_ready()
        return self._server

    def clear(self) -> None:
        """End the running server, if there is one."""
        if self._server is not None:
            self._server.close()
        self._kind = self._server = None


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("e2e"))
    yield stage
    stage.clear()


@pytest.fixture(scope="module", params=SCALES)
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stage: Stage
) -> Iterator[ScriptedServer]:
    """A server whose model writes what a test says, on a dense model and on a hybrid one."""
    stage.clear()
    model = tiny_model(request.param, scale=SCALES[request.param])
    with scripted_server(tmp_path_factory.mktemp("scripted"), model) as server:
        yield server


@pytest.fixture
def open_server(stage: Stage) -> ServerProcess:
    """A server with the default settings: no key, any model name."""
    return stage.serve("open")


@pytest.fixture
def strict_server(stage: Stage) -> ServerProcess:
    """A server with an API key, strict model names, one row at a time, one place in the queue, a small context."""
    return stage.serve("strict")


@pytest.fixture(params=["kvserve", "litellm"])
def front(request: pytest.FixtureRequest) -> str:
    """Which port a test speaks to: kvserve's own, or LiteLLM's in front of it."""
    return str(request.param)


@pytest.fixture
def client(open_server: ServerProcess, front: str) -> Iterator[OpenAI]:
    """The SDK, pointed at one port of the server with the default settings."""
    with connect(open_server, front) as client:
        yield client


def connect(server: ServerProcess, front: str, api_key: str = "any") -> OpenAI:
    """The SDK without retries, so that each error is seen as it comes."""
    base_url = f"http://127.0.0.1:{server.port_of(front)}/v1"
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=100)
