"""One real LiteLLM proxy for the whole session, and one with a key in `make full`: each costs 10 to 20 seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import ProxySettings
from kvserve.proxy.litellm import LitellmProxy
from tests.ports import free_port
from tests.proxy.reached import Reached
from tests.proxy.stubs import KEY, LISTED, SERVED, Backend, Client, Running, Script


@pytest.fixture(scope="session")
def session_backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Reached:
    """What the proxies of the session speak to."""
    return Reached(tmp_path_factory.mktemp("reached"))


@contextmanager
def running(backend: Backend, reached: Reached, folder: Path, key: str | None) -> Iterator[Running]:
    """A LiteLLM that is ready."""
    reports: list[str] = []
    settings = ProxySettings(
        port=free_port(),
        backends=(BackendAddress("kvserve", backend.url, key),),
        listed_model_id=LISTED,
        backend_model_id=SERVED,
        state_dir=folder,
        api_key=key,
        allowed_origins=("https://allowed.example",),
        max_body_bytes=4 * 2**20,
        keep_alive_seconds=1.0,
    )
    proxy = LitellmProxy(settings, reached.watching(os.environ), reports.append)
    try:
        proxy.start()
        proxy.wait_until_ready()
        yield Running(proxy, settings.port, reports)
    finally:
        proxy.stop()


@pytest.fixture(scope="session")
def open_proxy(
    session_backend: Backend, reached: Reached, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The LiteLLM that takes any key or none."""
    with running(session_backend, reached, tmp_path_factory.mktemp("open"), None) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def keyed_proxy(
    session_backend: Backend, reached: Reached, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The LiteLLM with a key: its tests are long, the guard that asks for the key is tested without one."""
    with running(session_backend, reached, tmp_path_factory.mktemp("keyed"), KEY) as proxy:
        yield proxy


@pytest.fixture
def backend(session_backend: Backend) -> Backend:
    """The backend, following its default script."""
    session_backend.follow(Script())
    return session_backend


@pytest.fixture
def client(open_proxy: Running) -> Client:
    """A client of the proxy without a key."""
    return Client(open_proxy.port)


@pytest.fixture
def keyed_client(keyed_proxy: Running) -> Client:
    """A client of the proxy with a key."""
    return Client(keyed_proxy.port)
