"""`kvserve doctor` where BACKENDS names servers: what a `kvserve proxy` depends on, and nothing of a model."""

import socket
from pathlib import Path

import pytest

from kvserve.cli.doctor import findings, issue_text
from kvserve.cli.finding import Finding
from kvserve.core import NO_KEY
from tests.cli.running import run
from tests.cli.test_doctor import listening
from tests.ports import free_port

SECRET = "a-secret-of-all-of-them"
READY = {"status": "ok", "version": "0.9.9", "model": "secret-model", "knows_proxy": True}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a proxy, on a free port; of the server behind it nothing is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXY_PORT", str(free_port()))
    monkeypatch.setenv("PROXY_SECRET", SECRET)
    monkeypatch.setenv("STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "no-such-model"))


def found() -> dict[str, Finding]:
    return {each.name: each for each in findings()}


def test_each_server_is_judged_and_no_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ready, one that does not believe the proxy, one that is not there; an issue names none of them."""
    strange = {**READY, "knows_proxy": False}
    with listening(READY) as (ready, seen), listening(strange) as (other, _):
        places = f"secret-a=http://127.0.0.1:{ready},b=http://127.0.0.1:{other},c=http://127.0.0.1:{free_port()}"
        monkeypatch.setenv("BACKENDS", places)
        shown = found()
    assert {name: each.state for name, each in shown.items() if name.startswith("server")} == {
        "server 1": "ok",
        "server 2": "bad",
        "server 3": "note",
    }
    assert "secret-a" in shown["server 1"].text and "version 0.9.9, ok" in shown["server 1"].text
    assert "does not believe this proxy" in shown["server 2"].text and "does not answer" in shown["server 3"].text
    assert shown["PROXY_PORT"].text.endswith("is free") and shown["start"].state == "ok"
    assert not {"device", "BLAS", "MLX_PORT", "disk", "model"} & shown.keys()
    assert "secret" not in issue_text(list(shown.values())) and "127.0.0.1" not in issue_text(list(shown.values()))
    assert [headers["x-kvserve-key"] for headers in seen] == [f"{SECRET} {NO_KEY}"]


def test_what_a_proxy_needs_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret, in the start's own words; a list that cannot be read ends the look."""
    monkeypatch.setenv("BACKENDS", f"a=http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("PROXY_SECRET")
    assert found()["start"].shared == "would be refused (PROXY_SECRET)" and run("doctor").exit_code == 1
    monkeypatch.setenv("BACKENDS", "no address")
    assert found()["settings"].shared == "cannot be read (BACKENDS)"


def test_whoever_holds_the_proxys_port_hears_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy is known by what it says of its servers; another program is in the way, and told once."""
    monkeypatch.setenv("BACKENDS", f"a=http://127.0.0.1:{free_port()}")
    with listening({"status": "loading", "backends": {}}) as (port, seen):
        monkeypatch.setenv("PROXY_PORT", str(port))
        assert found()["PROXY_PORT"].state == "ok" and found()["start"].state == "ok"
    assert seen and all(SECRET not in str(headers) for headers in seen)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PROXY_PORT", str(taken.getsockname()[1]))
        shown = found()
    assert shown["PROXY_PORT"].state == "bad" and shown["start"].state == "ok"
