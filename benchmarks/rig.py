"""What a benchmark measures on: one demo model, served by a process of its own and loaded bare in this one.

Server and bare model take turns, never both at once, so that noise of the machine falls on both alike.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bare import BareModel
from benchmarks.client import BenchmarkError
from benchmarks.prompts import Prompts
from kvserve.config import Settings, setting_key
from kvserve.demo.build import ModelScale, build_model

START_SECONDS = 600
IDLE_WORK_SECONDS = 0.2
START_SCRIPT = Path(__file__).resolve().parent.parent / "start_llm.py"


@dataclass(frozen=True, slots=True)
class Rig:
    """A served model beside the same model bare."""

    port: int
    bare: BareModel
    prompts: Prompts
    server_pid: int

    def health(self) -> dict[str, Any]:
        """The body of `/health`."""
        return ask(self.port, "GET", "/health")[1]

    def cache(self) -> dict[str, Any]:
        """The body of `GET /v1/cache`."""
        return ask(self.port, "GET", "/v1/cache")[1]

    def clear_cache(self) -> None:
        """Let the server forget all KV."""
        forget(self.port)

    def server_rss_bytes(self) -> int:
        """Physical memory of the server's process."""
        return rss_bytes(self.server_pid)

    def settle(self) -> None:
        """Wait until the server computes nothing and what it keeps is on disk, with a moment for its idle work. Raises
        BenchmarkError where the disk is not through in a minute."""
        settle(self.port)


def settle(port: int) -> None:
    """The same for the server on this port."""
    while (health := ask(port, "GET", "/health")[1])["num_running"] or health["num_waiting"]:
        time.sleep(0.02)
    time.sleep(IDLE_WORK_SECONDS)
    ends_at = time.monotonic() + 60
    while (disk := ask(port, "GET", "/v1/cache")[1]["disk"]) and disk["num_queued_bytes"]:
        if time.monotonic() > ends_at:
            raise BenchmarkError("the server's disk is not through with what it has to write")
        time.sleep(0.02)


def forget(port: int) -> None:
    """Let the server on this port forget all KV and all conversations."""
    ask(port, "DELETE", "/v1/cache")


def rss_bytes(pid: int) -> int:
    """Physical memory of a process. Raises BenchmarkError where there is none."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    if shown.returncode:
        raise BenchmarkError("the server is gone")
    return int(shown.stdout) * 1024


def rounds(num_rounds: int, *measure: Callable[[], Any]) -> list[list[Any]]:
    """Let measurements take turns, the order turned each round; returns the values of each, one per round.

    A round before the first is thrown away: kernels are compiled at their first use.
    """
    found: list[list[Any]] = [[] for _ in measure]
    for number in range(-1, num_rounds):
        turns = list(zip(found, measure, strict=True))
        for values, call in turns[:: -1 if number % 2 else 1]:
            value = call()
            if number >= 0:
                values.append(value)
    return found


@contextlib.contextmanager
def open_rig(scale: ModelScale, family: str = "qwen3", **settings: object) -> Iterator[Rig]:
    """Build a model of this scale that never ends an answer by itself, load it, and serve it.

    `settings` are named as in `Settings`; the others have their defaults.
    """
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folder = build_model(family, Path(scratch) / "model", scale=scale, answer_tokens=None)
        given = {setting_key(name): str(value) for name, value in settings.items()}
        with serving(folder, Path(scratch), given) as (port, pid):
            yield Rig(port, BareModel(folder), Prompts(folder), pid)


@contextlib.contextmanager
def serving(
    folder: Path,
    scratch: Path,
    given: Mapping[str, str],
    *,
    script: Path = START_SCRIPT,
    proxy_port: int | None = None,
) -> Iterator[tuple[int, int]]:
    """The real server on a free port, with no settings but these: its port and process id. With a `proxy_port` LiteLLM
    is in front of it and answers too."""
    port = free_port()
    command = [sys.executable, str(script), "--model", str(folder), "--port", str(port)]
    command += ["--no-proxy"] if proxy_port is None else ["--proxy-port", str(proxy_port)]
    own = {setting_key(name) for name in Settings.model_fields}
    environment = {key: value for key, value in os.environ.items() if key.upper() not in own}
    environment |= {"STATE_DIR": str(scratch / "run"), "LOG_ROOT": str(scratch / "logs"), "HF_HUB_OFFLINE": "1"}
    # idle work of the server would fall on whatever is measured meanwhile
    environment |= {"DISK_CACHE_DIR": str(scratch / "disk"), "WARM_NEXT_TURN": "false"}
    environment |= {"BLAS_LIBRARY": "off", **given}  # the bare model in this process has the wheel's too
    log = scratch / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=output, stderr=output)
    try:
        _wait_until_ready(process, port, log, "off" if proxy_port is None else "ready")
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, proxy: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            status, health = ask(port, "GET", "/health")
            if status == 200 and health["proxy"] == proxy:
                return
        time.sleep(0.02)
    raise BenchmarkError(f"the server did not start:\n{log.read_text('utf-8')[-2000:]}")


def ask(port: int, method: str, path: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
