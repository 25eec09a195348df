"""The servers that are compared: how each is installed and started, watched, stopped for a while and ended.

It knows commands, environments and processes; no prompt and no figure but how long a start took and how much memory a
process and its children have. Each process gets an empty home of its own, so that no cache of an earlier one helps it.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.client import BenchmarkError
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES
from benchmarks.rig import START_SCRIPT, free_port
from kvserve.config import Settings, setting_key

INSTALL_SECONDS = 20 * 60
START_SECONDS, END_SECONDS = 600, 20
POLL_SECONDS, SAMPLE_SECONDS = 0.05, 1.0
LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm", "transformers")
LISTED = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"

type Command = Callable[[Path, Path, int, Path], list[str]]
"""Interpreter, model's folder, port and home -> what is executed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server as a user starts it. `package` is its name, `pin` what is installed for it, empty where it is in this
    environment. On Linux `without` is taken away again and `instead` put in its place, whatever others ask for.
    `model_name` is what a request calls the only model, the folder's path where it is empty. `variables` may name
    `{home}`. What of this is not its default is told in `remark`."""

    name: str
    package: str
    command: Command
    endpoints: frozenset[str]
    pin: str = ""
    instead: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    ready_path: str = "/health"
    model_name: str = ""
    variables: Mapping[str, str] | None = None
    remark: str = "as it is by default"

    def model_id(self, model: Path) -> str:
        return self.model_name or str(model)


def _script(name: str, *arguments: str) -> Command:
    """A command that the package installs beside the interpreter; `{model}`, `{port}` and `{home}` are filled in."""

    def command(python: Path, model: Path, port: int, home: Path) -> list[str]:
        return [str(python.with_name(name)), *(each.format(model=model, port=port, home=home) for each in arguments)]

    return command


def _module(*arguments: str) -> Command:
    """The interpreter itself, with the same filled in."""

    def command(python: Path, model: Path, port: int, home: Path) -> list[str]:
        return [str(python), *(each.format(model=model, port=port, home=home) for each in arguments)]

    return command


ALL_ENDPOINTS = frozenset({CHAT, MESSAGES, RESPONSES})

PEERS: tuple[Peer, ...] = (
    Peer(
        "kvserve",
        "",
        _module(str(START_SCRIPT), "--model", "{model}", "--port", "{port}", "--no-proxy"),
        ALL_ENDPOINTS,
        variables={"BLAS_LIBRARY": "off"},
        remark="without LiteLLM; looks for no BLAS of its own",
    ),
    Peer(
        "mlx-lm",
        "mlx-lm",
        _module("-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}"),
        frozenset({CHAT}),
        model_name="default_model",
    ),
    Peer(
        "mlx-vlm",
        "mlx-vlm",
        _module("-m", "mlx_vlm.server", "--model", "{model}", "--port", "{port}"),
        ALL_ENDPOINTS,
        variables={"APC_ENABLED": "1", "APC_DISK_PATH": "{home}/apc"},
        remark="prefix cache on, in RAM and on disk (by default it is off)",
    ),
    Peer(
        "Rapid-MLX",
        "rapid-mlx",
        _script("rapid-mlx", "serve", "{model}", "--port", "{port}", "--served-model-name", "peer", "--yes"),
        ALL_ENDPOINTS,
        pin="rapid-mlx==0.16.10",
        model_name="peer",
    ),
    Peer(
        "vllm-mlx",
        "vllm-mlx",
        _script(
            "vllm-mlx",
            *("serve", "{model}", "--port", "{port}", "--served-model-name", "peer", "--offline"),
            *("--continuous-batching", "--ssd-cache-dir", "{home}/ssd"),
        ),
        ALL_ENDPOINTS,
        pin="vllm-mlx==0.6.0",
        model_name="peer",
        remark="with continuous batching and its cache on disk (by default off)",
    ),
    Peer(
        "mlx-openai-server",
        "mlx-openai-server",
        _script(
            "mlx-openai-server",
            *("launch", "--model-path", "{model}", "--model-type", "lm", "--port", "{port}"),
            *("--served-model-name", "peer"),
        ),
        frozenset({CHAT, RESPONSES}),
        pin="mlx-openai-server",
        instead=("mlx-openai-server==1.8.1", "mlx==0.32.4", "mlx-cpu==0.32.4"),
        without=("mlx-cuda-13",),
        model_name="peer",
        remark="as it is by default; installed past its pins, which on Linux want CUDA and an older MLX",
    ),
)
"""In the order of every table."""


# --- where each is installed ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installed:
    """An interpreter that has the server, or why there is none. `versions` of the server and of what it computes with,
    by name of the package."""

    python: str
    versions: Mapping[str, str]
    fault: str = ""


def installed(peer: Peer, cache: Path, tell: Callable[[str], None]) -> Installed:
    """The environment of a peer; made in `cache` once, and what came of it is kept there."""
    if not peer.pin:
        names = [name for name in (peer.package, *LIBRARIES) if name]
        found = {name: version(name) for name in dict.fromkeys(names)}
        return Installed(sys.executable, {"kvserve": version_of_tree(), **found} if not peer.package else found)
    folder = cache / peer.name
    kept = folder / "made.json"
    if kept.is_file() and (known := json.loads(kept.read_text("utf-8"))).get("recipe") == recipe(peer):
        return Installed(known["python"], known["versions"], known["fault"])
    tell(f"{peer.name}: an environment is made, which may take {INSTALL_SECONDS // 60} minutes")
    made = _make(peer, folder)
    kept.write_text(json.dumps({"recipe": recipe(peer), **asdict(made)}, indent=1), "utf-8")
    return made


def recipe(peer: Peer) -> list[str]:
    """What decides the packages of its environment."""
    return [peer.pin, *peer.instead, *(f"-{name}" for name in peer.without)]


def version_of_tree() -> str:
    """kvserve's own version, as its project file has it."""
    text = (START_SCRIPT.parent / "pyproject.toml").read_text("utf-8")
    match = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    return match[1] if match else "unknown"


def _make(peer: Peer, folder: Path) -> Installed:
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    end = time.monotonic() + INSTALL_SECONDS
    with (folder / "pip.log").open("wb") as log:
        for command in install_commands(peer, python, is_linux=sys.platform == "linux"):
            try:
                left = max(1.0, end - time.monotonic())
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=left)
            except subprocess.TimeoutExpired:
                return Installed("", {}, f"not installed within {INSTALL_SECONDS // 60} minutes")
            except subprocess.CalledProcessError:
                return Installed("", {}, f"not installed: {last_error((folder / 'pip.log').read_text('utf-8'))}")
    return Installed(str(python), _versions(python, peer.package))


def install_commands(peer: Peer, python: Path, *, is_linux: bool) -> list[list[str]]:
    """What makes an environment around this interpreter, in order."""
    pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    install = [*pip, "install", "--progress-bar", "off"]
    # They ask for the wheel of MLX that is for Macs.
    commands = [[sys.executable, "-m", "venv", str(python.parent.parent)], [*install, peer.pin]]
    if is_linux:
        commands[-1].append("mlx[cpu]")
        commands += [[*pip, "uninstall", "--yes", *peer.without]] if peer.without else []
        commands += [[*install, "--no-deps", "--force-reinstall", *peer.instead]] if peer.instead else []
    return commands


def _versions(python: Path, package: str) -> dict[str, str]:
    listed = subprocess.run([str(python), "-c", LISTED], check=True, capture_output=True, text=True).stdout
    found = dict(line.split("==", 1) for line in listed.lower().replace("_", "-").splitlines())
    return {name: found[name] for name in dict.fromkeys((package, *LIBRARIES)) if name in found}


def last_error(said: str) -> str:
    """The last line of a program's output that tells a fault, without the folders of this machine."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and "startup failed" not in line]
    faults = [line for line in lines if re.search(r"error|exception|no module|cannot|failed", line, re.IGNORECASE)]
    found = (faults or lines or ["it said nothing"])[-1]
    found = re.sub(r"\x1b\[[0-9;]*m", "", found).replace("|", "/")
    return re.sub(r"(?:/[\w.+@-]+)+/", "", found)[:160]


# --- processes --------------------------------------------------------------------------------------------------------


class ServerProcess:
    """A server on a model, from `start` to `end`; what it keeps on disk stays in its home, so it can be started again.
    Raises BenchmarkError where it does not start."""

    def __init__(
        self, peer: Peer, found: Installed, model: Path, home: Path, preloaded: Mapping[str, str] | None = None
    ) -> None:
        self.peer, self.model = peer, model
        self.port = 0
        self.start_seconds = 0.0
        self.peak_bytes = 0
        self._python, self._home, self._preloaded = Path(found.python), home, preloaded or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_going = threading.Event()
        self._is_over = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(signal.SIGTERM)

    @property
    def log(self) -> Path:
        return self._home / "server.log"

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self._home.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = self.peer.command(self._python, self.model, self.port, self._home)
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(began + START_SECONDS)
        except BaseException:
            self.end(signal.SIGTERM)
            raise
        self.start_seconds = time.monotonic() - began
        self._is_going.set()
        self._is_over.clear()
        self._sampler = threading.Thread(target=self._sample, args=(self._is_over,), daemon=True)
        self._sampler.start()

    def stand_still(self) -> None:
        """Let it and its children compute nothing until `go_on`: another server is measured."""
        self._look()
        self._signal(signal.SIGSTOP)
        self._is_going.clear()

    def go_on(self) -> None:
        self._is_going.set()
        self._signal(signal.SIGCONT)

    def end(self, how: signal.Signals) -> None:
        """End it: SIGTERM asks it to stop and waits, SIGKILL ends it and its children as a crash does."""
        if (process := self._process) is None:
            return
        self._process = None
        self._is_over.set()
        if self._sampler is not None:
            self._sampler.join()
        group = process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)
            process.send_signal(how) if how is signal.SIGTERM else os.killpg(group, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)  # what is left of it: children, or itself where it did not hear
        process.wait()

    def fault(self) -> str:
        """The last error in its log."""
        return last_error(self.log.read_text("utf-8", "replace"))

    def _environment(self) -> dict[str, str]:
        """This one without settings of kvserve and of kernels, with an empty home and nothing to fetch."""
        own = {setting_key(name) for name in Settings.model_fields} | {"PYTHONPATH", "MLX_DISABLE_COMPILE"}
        kept = {name: value for name, value in os.environ.items() if name.upper() not in own}
        home = {"HOME": str(self._home), "XDG_CACHE_HOME": str(self._home / ".cache"), "HF_HUB_OFFLINE": "1"}
        variables = {name: value.format(home=self._home) for name, value in (self.peer.variables or {}).items()}
        return {**kept, **home, **self._preloaded, **variables}

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchmarkError(f"does not start here: {self.fault()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if status(self.port, self.peer.ready_path) == 200:
                    return
            time.sleep(POLL_SECONDS)
        raise BenchmarkError(f"not ready within {START_SECONDS} seconds: {self.fault()}")

    def _signal(self, which: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, which)

    def _sample(self, is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            if self._is_going.is_set():
                self._look()

    def _look(self) -> None:
        if (process := self._process) is not None:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(process.pid, _processes()))


def status(port: int, path: str) -> int:
    """Of an answer to GET. Raises OSError or HTTPException where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def tree_bytes(pid: int, processes: Sequence[tuple[int, int, int]]) -> int:
    """Physical memory of a process and all below it, of (pid, parent, bytes)."""
    children: dict[int, list[int]] = {}
    sizes = {}
    for child, parent, size in processes:
        children.setdefault(parent, []).append(child)
        sizes[child] = size
    total, waiting = 0, [pid]
    while waiting:
        found = waiting.pop()
        total += sizes.get(found, 0)
        waiting += children.get(found, [])
    return total


def _processes() -> list[tuple[int, int, int]]:
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in shown.splitlines())
    return [(int(pid), int(parent), int(kibibytes) * 1024) for pid, parent, kibibytes in rows]
