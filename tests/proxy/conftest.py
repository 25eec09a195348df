"""Two real LiteLLM proxies for the whole session, no more: each costs 10 to 20 seconds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.proxy.litellm import LitellmProxy
from kvserve.proxy.settings import ProxySettings
from tests.proxy.reached import Reached
from tests.proxy.stubs import KEY, LISTED, Backend, Client, Proxies, Script, free_port


@pytest.fixture(scope="session")
def session_backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Reached:
    """What the proxies of the session speak to."""
    return Reached(tmp_path_factory.mktemp("reached"))


@pytest.fixture(scope="session")
def proxies(session_backend: Backend, reached: Reached, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    """Both LiteLLMs, started side by side: that costs 10 to 20 seconds once."""
    folder: Path = tmp_path_factory.mktemp("state")
    environment = reached.watching(os.environ)
    reports: list[str] = []
    ports = free_port(), free_port()
    started: list[LitellmProxy] = []
    try:
        for port, key in zip(ports, (None, KEY), strict=True):
            settings = ProxySettings(
                port=port,
                backend_url=session_backend.url,
                listed_model_id=LISTED,
                state_dir=folder,
                api_key=key,
                allowed_origins=("https://allowed.example",),
                max_body_bytes=4 * 2**20,
                keep_alive_seconds=1.0,
            )
            proxy = LitellmProxy(settings, environment, reports.append)
            started.append(proxy)
            proxy.start()
        for proxy in started:
            proxy.wait_until_ready()
        yield Proxies(started[0], started[1], ports[0], ports[1], reports)
    finally:
        for proxy in started:
            proxy.stop()


@pytest.fixture
def backend(session_backend: Backend) -> Backend:
    """The backend, following its default script."""
    session_backend.follow(Script())
    return session_backend


@pytest.fixture
def client(proxies: Proxies) -> Client:
    """A client of the proxy without a key."""
    return Client(proxies.open_port)


@pytest.fixture
def keyed_client(proxies: Proxies) -> Client:
    """A client of the proxy with a key."""
    return Client(proxies.keyed_port)
