"""`start_llm.py` as a process of its own, started the way a person starts it: on free ports, in a folder of its own.

It speaks HTTP and signals to the process and reads its files; of the package it uses only the names of settings, files
and trace lines.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.config import Settings, setting_key
from kvserve.proxy.generate import ProxyFiles
from kvserve.proxy.ownership import PidFile, ProcessIdentity, identify
from tests.ports import free_port
from tests.trace_lines import parse_line

ROOT = Path(__file__).resolve().parents[2]
START_SCRIPT = ROOT / "start_llm.py"
START_SECONDS = 180.0
PROXY_START_SECONDS = 100.0
STOP_SECONDS = 60.0
"""Far more than the few seconds that an end takes: the machine may be busy."""

_POLL_SECONDS = 0.01
_SETTING_KEYS = frozenset(map(setting_key, Settings.model_fields))


def environment(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """This process's environment with all of kvserve's settings replaced: state and traces go to `folder`."""
    inherited = {name: value for name, value in os.environ.items() if name.upper() not in _SETTING_KEYS}
    own = {"STATE_DIR": folder / "state", "LOG_ROOT": folder / "logs", "DISK_CACHE_DIR": folder / "kv"}
    return inherited | {name: str(value) for name, value in {**own, "BLAS_LIBRARY": "off", **settings}.items()}


def spawn(folder: Path, *flags: str, script: Path = START_SCRIPT, **settings: object) -> "subprocess.Popen[bytes]":
    """Start the server in `folder`, where its screen is kept; settings are given by their keys."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "screen.txt").open("ab") as screen:
        return subprocess.Popen(
            [sys.executable, str(script), *flags],
            cwd=folder,
            env=environment(folder, settings),
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )


def wait_until[T](look: Callable[[], T | None], seconds: float, otherwise: Callable[[], str]) -> T:
    """The first true thing that `look` sees. Fails with what `otherwise` says when the time is over."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(_POLL_SECONDS)
    return seen


class ServerProcess:
    """One running server. `proxy_port` is None without LiteLLM."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        with_proxy: bool = True,
        port: int | None = None,
        proxy_port: int | None = None,
        script: Path = START_SCRIPT,
        **settings: object,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.proxy_port = (proxy_port or free_port()) if with_proxy else None
        ports = [f"--port={self.port}", f"--proxy-port={self.proxy_port}" if with_proxy else "--no-proxy"]
        self.process = spawn(folder, *flags, *ports, script=script, **settings)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def screen(self) -> str:
        """What a person would have seen so far."""
        return (self.folder / "screen.txt").read_text("utf-8")

    def port_of(self, front: str) -> int:
        """The port of "litellm" or of "kvserve"."""
        port = {"litellm": self.proxy_port, "kvserve": self.port}[front]
        assert port is not None, "this server has no LiteLLM"
        return port

    def health(self) -> tuple[int, dict[str, Any]] | None:
        """Status and body of /health; None while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (ConnectionError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_until_healthy(self) -> "ServerProcess":
        """Until /health is 200; that does not include LiteLLM."""
        self._wait(lambda health: health[0] == 200, START_SECONDS)
        return self

    def wait_until_proxy_ready(self) -> "ServerProcess":
        """Until the model answers and LiteLLM does too."""
        self.wait_until_healthy()
        self._wait(lambda health: health[1]["proxy"] == "ready", PROXY_START_SECONDS)
        return self

    def wait_for(self, **counts: int) -> None:
        """Until /health shows these figures, e.g. `num_running=1`."""
        self._wait(lambda health: all(health[1][name] == value for name, value in counts.items()), START_SECONDS)

    def _wait(self, is_so: Callable[[tuple[int, dict[str, Any]]], bool], seconds: float) -> None:
        def look() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.screen}"
            health = self.health()
            return health is not None and is_so(health)

        wait_until(look, seconds, lambda: f"not within {seconds:g} s: {self.health()}\n{self.screen}")

    def proxy_process(self) -> ProcessIdentity | None:
        """The LiteLLM that this server's pid file names, if it is alive."""
        if self.proxy_port is None:
            return None
        written = PidFile.read(ProxyFiles(self.folder / "state" / f"litellm-{self.proxy_port}").pid)
        return written.proxy if written is not None and is_alive(written.proxy) else None

    def prompts(self) -> list[str]:
        """What the model saw, request after request, from the trace files."""
        texts = [path.read_text("utf-8") for path in self.folder.glob("logs/*/*.log")]
        events = [parse_line(line) for text in texts for line in text.splitlines()]
        events.sort(key=lambda event: str(event.fields["time"]))
        return [str(event.fields["prompt"]) for event in events if event.name == "turn"]

    def end(self, number: signal.Signals, seconds: float = STOP_SECONDS) -> float:
        """Send a signal and wait for the end; returns the seconds that it took."""
        sent = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(seconds)
        return time.monotonic() - sent

    def close(self) -> None:
        """End the process if it still runs, whatever it takes; only this one."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """A server process that is started and not waited for, options as of ServerProcess; at the end it is gone."""
    server = ServerProcess(folder, *flags, **options)
    try:
        yield server
    finally:
        server.close()


def is_alive(process: ProcessIdentity) -> bool:
    """Whether exactly this process still runs (one that ended and was not collected yet does not)."""
    running = identify(process.pid)
    return running is not None and running.started == process.started


def can_listen(port: int) -> bool:
    """Whether nobody else has the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A whole streamed answer: its events, without the closing [DONE], and when its last byte came."""

    events: list[dict[str, Any]]
    ended_at: float

    @property
    def finish_reasons(self) -> list[str]:
        """Every finish reason that was sent; a well-formed chat answer has exactly one."""
        reasons = (choice.get("finish_reason") for event in self.events for choice in event.get("choices", ()))
        return [reason for reason in reasons if reason is not None]

    @property
    def was_stopped(self) -> bool:
        """Whether the stream says that its answer was not finished, and has no finish reason."""
        return "error" in self.events[-1] and not self.finish_reasons


class ChatStream:
    """One streamed chat answer, read to its end by a thread of its own. Knows no SDK: the bytes count."""

    def __init__(self, port: int, **fields: Any) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, **fields}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self._raw = bytearray()
        self._failure: Exception | None = None
        self._ended_at = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while piece := self._response.read1():
                self._raw += piece
        except (OSError, http.client.HTTPException) as error:
            self._failure = error
        self._ended_at = time.monotonic()

    def wait_for_output(self, num_events: int = 5) -> None:
        """Until so many events have come: the stream is in the middle of its answer."""
        wait_until(
            lambda: self._raw.count(b"\n\n") >= num_events, 60, lambda: f"{self._failure!r}: {bytes(self._raw)!r}"
        )

    def finish(self, seconds: float) -> StreamEnd:
        """The answer once it has ended; fails where it broke off: without [DONE], or the error after which LiteLLM
        sends none. Raises what broke it."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream goes on"
        self._connection.close()
        if self._failure is not None:
            raise self._failure
        text = self._raw.decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        assert text.endswith("data: [DONE]\n\n") or "error" in events[-1], text[-600:]
        return StreamEnd(events, self._ended_at)
