"""Servers with a model, and proxies in front of them, each a process of its own as a person starts it; ended by pid."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.servers import (
    PROXY_START_SECONDS,
    ROOT,
    START_SCRIPT,
    STOP_SECONDS,
    ServerProcess,
    environment,
    wait_until,
)
from tests.ports import free_port

SECRET = "a-secret-of-all-of-them"
FRONT_KEY = "the-key-of-clients"
NAMES = ("a", "b")
NO_SETTINGS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def backend(self) -> str | None:
        """Which server gave it."""
        return self.headers.get("x-kvserve-backend")

    def json(self) -> Any:
        return json.loads(self.raw)

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, without the closing [DONE]."""
        lines = [line for line in self.raw.decode("utf-8").split("\n") if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    key: str = FRONT_KEY,
) -> Reply:
    """One request on a connection of its own. Raises OSError and http.client's errors where the answer breaks off."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    own = {"content-type": "application/json", "authorization": f"Bearer {key}", **(headers or {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), own)
        response = connection.getresponse()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


class ProxyProcess:
    """One `kvserve proxy`."""

    def __init__(self, folder: Path, backends: str, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._screen = free_port(), folder / "screen.txt"
        own = {"BACKENDS": backends, "PROXY_SECRET": SECRET, "API_KEY": FRONT_KEY, **settings}
        with self._screen.open("ab") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvserve.cli", "proxy", "--port", str(self.port)],
                cwd=folder,
                env={**environment(folder, own), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether LiteLLM answers and a server behind it is ready."""
        assert self.process.poll() is None, self._screen.read_text("utf-8")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(self.port, "GET", "/health").status == 200
        return False

    def states(self) -> dict[str, str]:
        """How it sees each server."""
        return self.seen("state")

    def seen(self, field: str) -> dict[str, Any]:
        """What each server said of itself last, in one field of its health."""
        return {name: each.get(field) for name, each in ask(self.port, "GET", "/health").json()["backends"].items()}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(STOP_SECONDS)


@dataclass
class Cluster:
    """Two servers and two proxies."""

    folder: Path
    ports: dict[str, int]
    script: Path = START_SCRIPT
    settings: Mapping[str, object] = field(default_factory=dict)
    servers: dict[str, ServerProcess] = field(default_factory=dict)
    proxies: list[ProxyProcess] = field(default_factory=list)

    def start_server(self, name: str, script: Path | None = None) -> ServerProcess:
        """Start it, on its own port and with what it kept; it is not waited for. `script`: that of another version."""
        settings = {"API_KEY": f"key-of-{name}", "PROXY_SECRET": SECRET, "TENANT_ISOLATION": "true", **self.settings}
        folder, port, script = self.folder / name, self.ports[name], script or self.script
        server = ServerProcess(folder, "--demo=tiny", with_proxy=False, port=port, script=script, **settings)
        self.servers[name] = server
        return server

    def wait_until_seen(self, **states: str) -> None:
        """Until both proxies see the servers so."""

        def look() -> bool:
            return all(proxy.states().items() >= states.items() for proxy in self.proxies)

        wait_until(look, 60, lambda: f"{[proxy.states() for proxy in self.proxies]} is not {states}")

    def close(self) -> None:
        for process in (*self.proxies, *self.servers.values()):
            process.close()


@contextlib.contextmanager
def cluster(
    folder: Path, script: Path = START_SCRIPT, *, of_proxies: Mapping[str, object] = NO_SETTINGS, **settings: object
) -> Iterator[Cluster]:
    """All of them, ready; servers are started by this script, with these settings besides, proxies with theirs."""
    started = Cluster(folder, {name: free_port() for name in NAMES}, script, settings)
    backends = ",".join(f"{name}=http://key-of-{name}@127.0.0.1:{port}" for name, port in started.ports.items())
    try:
        for name in NAMES:
            started.start_server(name)
        started.proxies += [ProxyProcess(folder / f"proxy-{number}", backends, **of_proxies) for number in (1, 2)]
        for server in started.servers.values():
            server.wait_until_healthy()
        for proxy in started.proxies:
            wait_until(proxy.is_ready, 3 * PROXY_START_SECONDS, lambda: "LiteLLM does not answer")
        started.wait_until_seen(a="ready", b="ready")
        yield started
    finally:
        started.close()
