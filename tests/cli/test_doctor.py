"""`kvserve doctor`: what it finds, and that what it gives to others holds nothing private."""

import getpass
import platform
import socket
import sys
from pathlib import Path

import pytest

from kvserve.cli import doctor
from kvserve.cli.doctor import Finding, findings, issue_text, pins, unpinned
from kvserve.engine.device import DeviceFacts
from tests.cli.running import run, told
from tests.models import tiny_model
from tests.proxy.stubs import free_port


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Free ports, a folder for KV, and a model that is there."""
    monkeypatch.chdir(tmp_path)
    for key in ("MLX_PORT", "PROXY_PORT"):
        monkeypatch.setenv(key, str(free_port()))
    monkeypatch.setenv("DISK_CACHE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("MODEL_PATH", str(tiny_model("qwen3")))
    return tmp_path


def found() -> dict[str, Finding]:
    return {each.name: each for each in findings()}


def first(name: str) -> Finding:
    """One of them, without a look at what comes behind it."""
    return next(each for each in findings() if each.name == name)


def test_where_nothing_is_in_the_way_all_is_well() -> None:
    """Exit code 0; versions, device, ports, disk and model are named, as JSON and in words."""
    body = told("doctor")
    states = {each["name"]: each["state"] for each in body["findings"]}
    assert set(states.values()) <= {"ok", "note"}
    named = {"kvserve", "python", "packages", "device", "BLAS", "MLX_PORT", "PROXY_PORT", "disk", "model"}
    assert named <= states.keys() and "### Where" in body["issue"] and "shared" not in str(body)


def test_it_is_told_in_words_or_as_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is private in the one only; what came from elsewhere moves no cursor."""
    known = [Finding("model", "bad", "/home/me/x\x1b[2J: broken", "broken")]
    monkeypatch.setattr(doctor, "findings", lambda: known)
    shown, issue = run("doctor"), run("doctor", "--issue")
    assert shown.exit_code == issue.exit_code == 1
    assert shown.stdout.startswith("BAD   model      /home/me/x\\x1b[2J: broken\n")
    assert issue.stdout == issue_text(known) + "\n" and "/home/me" not in issue.stdout


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_an_empty_folder: Path) -> None:
    """A taken port, a folder that is a file, a model that is none: each with its reason, exit code 1."""
    (tmp_path / "kv").write_text("")
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "model"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PROXY_PORT", str(taken.getsockname()[1]))
        assert run("doctor").exit_code == 1
        bad = {name: each.text for name, each in found().items() if each.state == "bad"}
    assert bad.keys() == {"PROXY_PORT", "disk", "model"}
    assert "is taken by" in bad["PROXY_PORT"] and "config.json" in bad["model"]


def test_settings_that_cannot_be_read_end_the_look_and_not_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on them is told all the same; the value stays here."""
    monkeypatch.setenv("MAX_KV_SIZE", "my-secret")
    shown = found()
    assert shown["settings"].state == "bad" and "my-secret" in shown["settings"].text
    assert "MAX_KV_SIZE" in shown["settings"].shared and "my-secret" not in issue_text(list(shown.values()))
    assert "device" in shown and "disk" not in shown


def test_nothing_private_stands_in_the_text_for_an_issue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, path, host, user, alias, model or command line of whoever holds a port; numbers that were set do."""
    private = {
        "API_KEY": "sk-very-secret",
        "MODEL_ALIASES": "secret-project=default",
        "ALLOWED_HOSTS": "secret-host.example",
        "CHAT_TEMPLATE": "secret-template.jinja",
        "BLAS_LIBRARY": str(tmp_path / "secret-blas.so"),
    }
    (tmp_path / "secret-template.jinja").write_text("{{ messages }}")
    for key, value in private.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "3")
    monkeypatch.setenv("DISK_CACHE_DIR", str(tmp_path / "secret-folder"))
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "secret-model"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PROXY_PORT", str(taken.getsockname()[1]))
        text = issue_text(list(findings()))
    assert "MAX_CONCURRENT_REQUESTS=3" in text and "API_KEY=(set)" in text
    names = [*private.values(), "secret", str(tmp_path), str(Path.home()), socket.gethostname(), sys.executable]
    assert [name for name in names if name in text] == []
    if getpass.getuser() not in ("root", "kvserve"):
        assert getpass.getuser() not in text


def test_packages_that_are_not_as_tried_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version and a missing one; a build's own mark behind a plus does not count."""
    wanted = pins()
    assert {"mlx", "mlx-lm", "litellm", "rich"} <= wanted.keys() and unpinned(wanted) == []
    there = {"mlx": "0.32.4+cpu", "rich": "1.0"}
    monkeypatch.setattr(doctor, "_installed", there.get)
    assert unpinned({"mlx": "0.32.4", "rich": "13.9.4", "gone": "1"}) == [
        "rich 1.0 instead of 13.9.4",
        "gone missing instead of 1",
    ]
    assert first("packages").state == "bad"


def test_a_mac_without_metal_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python for another processor, or a virtual machine: MLX would compute, and take for ever."""
    facts = DeviceFacts("cpu", False, None, 2**34)
    monkeypatch.setattr("kvserve.engine.device.device_facts", lambda: facts)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    assert first("device").state == "ok"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert first("device").state == "bad" and "Metal off, 16.0 GiB" in first("device").text
