"""`kvserve proxy`: what it asks for before it starts, what it starts, and that it needs no model. LiteLLM's place is
taken by a small child, the servers' by web servers with a scripted service."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvserve.app import proxy_alone
from kvserve.app.proxy_alone import ProxyAlone, ProxyReady, main
from kvserve.config import Settings, load_launch, setting_key
from kvserve.core import JsonObject
from kvserve.errors import StartupError
from kvserve.observe.terminal import Terminal
from kvserve.proxy import litellm
from tests.ports import free_port
from tests.proxy.test_litellm import fake_command
from tests.web.fakes import FakeService, serving

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a-secret-of-sixteen"


class Named(FakeService):
    """A server that says which model it has, or that it loads it still."""

    def health(self) -> tuple[int, JsonObject]:
        status, body = super().health()
        return status, {**body, "model": self.name}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but the test's own, and no LiteLLM."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(setting_key(name), raising=False)
    monkeypatch.setenv("STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(litellm, "child_command", fake_command)
    monkeypatch.setattr(proxy_alone, "ANSWER_SECONDS", 0.3)


@contextmanager
def servers(*services: FakeService, secret: str = SECRET) -> Iterator[str]:
    """BACKENDS of so many running servers, named a, b, ..."""
    with ExitStack() as stack:
        ports = [stack.enter_context(serving(each, proxy_secret=secret)).server.port for each in services]
        yield ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip("abc", ports, strict=False))


def started(monkeypatch: pytest.MonkeyPatch, backends: str) -> tuple[ProxyReady | None, str, dict[str, Any]]:
    """What it says once it is ready, its screen, and what its child was told."""
    port, screen = free_port(), io.StringIO()
    monkeypatch.setenv("BACKENDS", backends)
    monkeypatch.setenv("PROXY_SECRET", SECRET)
    launch = load_launch(["--no-proxy", f"--proxy-port={port}"], env_file=None)
    proxy = ProxyAlone(launch, Terminal(Console(file=screen, width=300)))
    try:
        ready = proxy.start(threading.Event())
        told = json.loads((Path("state") / f"litellm-{port}" / "guard.json").read_text("utf-8"))
    finally:
        proxy.stop()
    return ready, screen.getvalue(), told


def test_it_stands_in_front_of_the_servers_and_lists_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads says which model it will have; the child is told all of them, and to look at them."""
    with servers(Named(is_ready=False), Named()) as backends:
        ready, screen, told = started(monkeypatch, backends)
    assert ready is not None and (ready.model, ready.backends) == ("openai/tiny/model", ("a", "b"))
    assert [each["name"] for each in told["backends"]] == ["a", "b"]
    assert (told["secret"], told["watches_backends"]) == (SECRET, True)
    assert "Warning" not in screen


def test_it_says_what_is_odd_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another secret, another model; it starts all the same."""
    with servers(Named(), secret="another-secret-yet") as other, servers(Named(name="big/model")) as own:
        _, screen, _ = started(monkeypatch, f"{other},{own.replace('a=', 'b=')}")
    assert "a does not believe this proxy" in screen and "b does not believe" not in screen
    assert "different models: big/model, tiny/model" in screen


def test_without_an_answer_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names them, without their keys."""
    with pytest.raises(StartupError, match=r"None of BACKENDS answered.*: box\.$") as refused:
        started(monkeypatch, f"box=http://very-secret@127.0.0.1:{free_port()}")
    assert "very-secret" not in str(refused.value)


@pytest.mark.parametrize("missing", ["BACKENDS", "PROXY_SECRET"])
def test_it_needs_servers_and_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    """Without a secret every user would be the same one to them."""
    for name, value in (("BACKENDS", "http://127.0.0.1:9"), ("PROXY_SECRET", SECRET)):
        if name != missing:
            monkeypatch.setenv(name, value)
    assert main([]) == 1
    assert missing in capsys.readouterr().err


def test_it_imports_neither_model_nor_engine() -> None:
    """It runs where MLX does not."""
    code = "import sys, kvserve.app.proxy_alone; print([n for n in sys.modules if n.startswith(FOREIGN)])"
    code = code.replace("FOREIGN", "('mlx', 'kvserve.engine')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
