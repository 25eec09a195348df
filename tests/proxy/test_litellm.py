"""The life of the child process: readiness, death and restart, stop, and the end of its server."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.errors import PortTaken, StartupError
from kvserve.proxy import litellm
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.generate import ProxySettings
from kvserve.proxy.litellm import LitellmProxy
from kvserve.proxy.ownership import identify, is_port_free
from tests.laws import sampled_cells
from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def make_settings(folder: Path, startup_timeout_seconds: float = 60.0) -> ProxySettings:
    return ProxySettings(
        port=free_port(),
        backends=(BackendAddress("kvserve", "http://127.0.0.1:9"),),
        listed_model_id="openai/m",
        backend_model_id="m",
        state_dir=folder,
        startup_timeout_seconds=startup_timeout_seconds,
    )


def fake_command(settings: ProxySettings, *flags: str) -> list[str]:
    """A fast child that carries our proof on its command line."""
    script = str(HERE / "fake_child.py")
    return [sys.executable, script, "--config", str(settings.files.config), "--port", str(settings.port), *flags]


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in vain is not waited for long: a stubborn child's end, the first new try."""
    monkeypatch.setattr(litellm, "_DRAIN_SECONDS", 0.5)
    monkeypatch.setattr(litellm, "_FIRST_DELAY_SECONDS", 0.1)


@contextmanager
def running(settings: ProxySettings, *flags: str) -> Iterator[tuple[LitellmProxy, list[str]]]:
    """A started proxy with a fake child, and what it reports."""
    reports: list[str] = []
    proxy = LitellmProxy(settings, dict(os.environ), reports.append, fake_command(settings, *flags))
    try:
        proxy.start()
        yield proxy, reports
    finally:
        proxy.stop()


@contextmanager
def server(settings: ProxySettings, *command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another server process with a proxy of its own; yields it and the proxy's pid."""
    arguments = [sys.executable, str(HERE / "fake_server.py"), str(settings.state_dir), str(settings.port), *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            yield process, pid
        finally:
            process.kill()
            process.wait()
            if identify(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def is_free(settings: ProxySettings) -> bool:
    return is_port_free(settings.host, settings.port)


def eventually(happened: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.02)
    return happened()


def test_it_becomes_ready_and_stops(tmp_path: Path) -> None:
    """Ready once it answers; after stop the process, the thread and the pid file are gone, and stop may be repeated."""
    settings = make_settings(tmp_path)
    others = set(threading.enumerate())
    with running(settings) as (proxy, reports):
        proxy.wait_until_ready()
        assert proxy.state.status == "ready"
        pid = proxy.state.pid
        assert pid is not None
        assert settings.files.pid.is_file()
        proxy.stop()
        proxy.stop()
        assert (proxy.state.status, proxy.state.pid) == ("stopped", None)
        assert identify(pid) is None
        assert not settings.files.pid.exists()
        assert "litellm-watcher" not in {thread.name for thread in set(threading.enumerate()) - others}
        assert reports == []


def test_it_is_told_that_it_became_ready(tmp_path: Path) -> None:
    """Each time that a child begins to answer, the one that takes the place of a dead one too; never one that does
    not."""
    settings, told = make_settings(tmp_path), []
    proxy = LitellmProxy(
        settings, dict(os.environ), lambda _: None, fake_command(settings), lambda: told.append(proxy.state.pid)
    )
    try:
        proxy.start()
        first = proxy.state.pid
        assert eventually(lambda: len(told) == 1) and first is not None
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: len(told) == 2)
        assert told[0] == first != told[1]
    finally:
        proxy.stop()
    with running(make_settings(tmp_path / "mute", startup_timeout_seconds=0.5), "--mute") as (mute, reports):
        assert eventually(lambda: len(reports) == 1) and mute.state.status != "ready"


def test_it_can_be_started_again(tmp_path: Path) -> None:
    """Start after stop gives a fresh child."""
    with running(make_settings(tmp_path)) as (proxy, _):
        proxy.wait_until_ready()
        proxy.stop()
        proxy.start()
        proxy.wait_until_ready()
        assert proxy.state.num_restarts == 0


def test_a_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    """Stop gives it a moment, then does not ask again."""
    with running(make_settings(tmp_path), "--stubborn") as (proxy, _):
        proxy.wait_until_ready()
        pid = proxy.state.pid
        assert pid is not None
        started = time.monotonic()
        proxy.stop()
        assert time.monotonic() - started < 60
        assert identify(pid) is None


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    """One report per death with its last words; the next child becomes ready."""
    with running(make_settings(tmp_path)) as (proxy, reports):
        proxy.wait_until_ready()
        first = proxy.state.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: proxy.state.status == "restarting")
        assert eventually(lambda: proxy.state.status == "ready")
        assert proxy.state.pid != first
        assert proxy.state.num_restarts == 1
        assert proxy.state.last_error == "signal SIGKILL: hello"
        assert len(reports) == 1
        assert "SIGKILL" in reports[0]


def test_a_child_that_dies_at_once_is_a_startup_error(tmp_path: Path) -> None:
    """Whoever waits learns the reason at once; trying goes on with growing delays until stop."""
    with running(make_settings(tmp_path), "--crash", "0", "--mute") as (proxy, reports):
        with pytest.raises(StartupError, match=r"exit code 7: .*ValueError: these are my last words"):
            proxy.wait_until_ready()
        assert eventually(lambda: len(reports) == 2)
        assert ["in 0.1 s" in reports[0], "in 0.2 s" in reports[1]] == [True, True]


def test_stop_does_not_wait_for_the_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is until the next child would be started."""
    monkeypatch.setattr(litellm, "_FIRST_DELAY_SECONDS", 600.0)
    with running(make_settings(tmp_path), "--crash", "0", "--mute") as (proxy, reports):
        assert eventually(lambda: len(reports) == 1) and "in 600 s" in reports[0]
        started = time.monotonic()
        proxy.stop()
        assert time.monotonic() - started < 60


def test_a_child_that_never_answers_is_killed_and_replaced(tmp_path: Path) -> None:
    """A hanging start-up counts as a death."""
    with running(make_settings(tmp_path, startup_timeout_seconds=0.5), "--mute") as (proxy, reports):
        with pytest.raises(StartupError):
            proxy.wait_until_ready(60.0)
        assert eventually(lambda: len(reports) == 1)
        assert "not ready in time" in reports[0]


def test_waiting_has_an_end(tmp_path: Path) -> None:
    """The error names the log."""
    settings = make_settings(tmp_path)
    with running(settings, "--mute") as (proxy, _), pytest.raises(StartupError) as caught:
        proxy.wait_until_ready(0.3)
    assert str(settings.files.log) in str(caught.value)


def test_a_command_that_does_not_exist_is_a_startup_error(tmp_path: Path) -> None:
    """No traceback of the system's, and stop still works."""
    proxy = LitellmProxy(make_settings(tmp_path), {}, lambda text: None, ["/nonexistent/python"])
    with pytest.raises(StartupError, match="could not be started"):
        proxy.start()
    proxy.stop()


def test_a_foreign_process_is_left_alone(tmp_path: Path) -> None:
    """It is named in the error, keeps running, and nothing is launched."""
    settings = make_settings(tmp_path)
    foreign = fake_command(settings, "--deaf")  # even with our configuration on its command line: nobody wrote it down
    with subprocess.Popen(foreign, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert eventually(lambda: not is_free(settings))
            proxy = LitellmProxy(settings, dict(os.environ), lambda text: None, fake_command(settings))
            with pytest.raises(PortTaken, match=rf"process {process.pid} .*fake_child"):
                proxy.start()
            proxy.stop()
            assert process.poll() is None
        finally:
            process.kill()


@sampled_cells(lambda flags: "--stubborn" not in flags)
@pytest.mark.parametrize("flags", [("--deaf",), ("--deaf", "--stubborn")], ids=["stale", "stale and stubborn"])
def test_a_stale_proxy_of_ours_is_replaced(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The proxy of a server that was killed is ended, and the new one takes the port."""
    settings = make_settings(tmp_path)
    with server(settings, *fake_command(settings, *flags)) as (process, stale):
        assert eventually(lambda: not is_free(settings))
        process.kill()
        process.wait()
        assert identify(stale) is not None
        with running(settings) as (proxy, reports):
            proxy.wait_until_ready()
            assert identify(stale) is None
            assert reports == [f"Replaced the LiteLLM proxy of a former run (pid {stale})."]


def test_the_proxy_of_a_living_server_is_left_alone(tmp_path: Path) -> None:
    """A second server with the same port and state folder is told so; the first one's proxy goes on."""
    settings = make_settings(tmp_path)
    with server(settings, *fake_command(settings)) as (process, pid):
        assert eventually(lambda: not is_free(settings))
        config = settings.files.config.read_bytes()
        proxy = LitellmProxy(settings, dict(os.environ), lambda text: None, fake_command(settings))
        with pytest.raises(PortTaken, match=f"pid {process.pid}"):
            proxy.start()
        proxy.stop()
        assert identify(pid) is not None
        assert settings.files.config.read_bytes() == config
        assert settings.files.pid.is_file()


def test_the_real_child_ends_with_its_server(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up; LiteLLM's process goes all the same."""
    with server(make_settings(tmp_path)) as (process, pid):
        time.sleep(0.5)
        assert identify(pid) is not None
        process.kill()
        process.wait()
        assert eventually(lambda: identify(pid) is None)
