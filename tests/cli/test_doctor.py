"""`kvserve doctor`: what it finds, and that what it gives to others holds nothing private."""

import getpass
import json
import platform
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvserve.app.blas import Blas
from kvserve.cli import doctor
from kvserve.cli.doctor import OWN_FIELDS, Finding, findings, issue_text, pins, unpinned
from kvserve.engine.device import DeviceFacts
from tests.cli.running import run, told
from tests.models import tiny_model
from tests.ports import free_port


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
    named = {"kvserve", "python", "packages", "device", "BLAS", "MLX_PORT", "PROXY_PORT", "disk", "model", "start"}
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("CHAT_TEMPLATE", "no-such-template.jinja"),
        ("MODEL_FOLDERS", "no-such-folder"),
        ("DRAFT_MODEL", "no-such-model"),
        ("STATE_DIR", "a-file"),
        ("CACHE_RULE_POLICIES", "no-such-rule=always"),
    ],
)
def test_what_a_start_would_refuse_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    """In the start's own words; others are told the setting's name alone."""
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv(key, value)
    start = found()["start"]
    assert start.state == "bad" and start.text.startswith(f"{key}=") and value.partition("=")[0] in start.text
    assert start.shared == f"would be refused ({key})"


def test_a_file_of_keys_that_is_none_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the start's own words; others are told neither its path nor a holder's name."""
    (tmp_path / "keys.toml").write_text("[anna]\nrows = 1\n", "utf-8")
    monkeypatch.setenv("API_KEY", "k")
    monkeypatch.setenv("API_KEYS_FILE", str(tmp_path / "keys.toml"))
    start = found()["start"]
    assert start.state == "bad" and "[anna] has 'rows', which is none of" in start.text
    assert start.shared == "would be refused (API_KEYS_FILE)"
    (tmp_path / "keys.toml").write_text("", "utf-8")
    assert found()["start"].state == "ok"


def test_a_model_with_code_of_its_own_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a start refuses it."""
    put_model(tmp_path / "model", model_type="qwen3", model_file="own.py")
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "model"))
    model = found()["model"]
    assert model.state == "bad" and "brings code of its own" in model.text


def put_model(folder: Path, **config: str) -> None:
    """A config, and weights that are whole."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "model.safetensors").symlink_to(tiny_model("qwen3") / "model.safetensors")


# --- who listens ------------------------------------------------------------------------------------------------------

HEALTH = dict.fromkeys(OWN_FIELDS, "ready")


@contextmanager
def listening(answer: Mapping[str, object]) -> Iterator[tuple[int, list[Message]]]:
    """Somebody who answers every GET so; yields the port, and the headers of what was asked."""
    seen: list[Message] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers)
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port, seen
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "state"),
    [(HEALTH, "ok"), ({"version": "1.0", "status": "ok"}, "bad"), ({"version": "1.0", "proxy": "ready"}, "bad")],
)
def test_whoever_holds_the_port_gets_no_key(
    monkeypatch: pytest.MonkeyPatch, answer: Mapping[str, object], state: str
) -> None:
    """A kvserve is known by all of its own fields; for a start its port is no trouble, another program's is told
    once."""
    monkeypatch.setenv("API_KEY", "sk-secret")
    with listening(answer) as (port, seen):
        monkeypatch.setenv("MLX_PORT", str(port))
        shown = found()
    assert shown["MLX_PORT"].state == state and shown["start"].state == "ok"
    assert seen and all("sk-secret" not in str(headers) and not headers["Authorization"] for headers in seen)


# --- what others are told ---------------------------------------------------------------------------------------------


def test_an_architecture_is_told_by_the_name_that_mlx_lm_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else a config says is anybody's words."""
    assert found()["model"].shared.startswith("qwen3, ")
    monkeypatch.setattr("kvserve.engine.model.is_for_mlx_vlm", lambda _: True)
    put_model(tmp_path / "model", model_type="secret-project\x1b[2J")
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "model"))
    model = found()["model"]
    assert model.state == "ok" and "secret-project" in model.text
    assert model.shared.startswith("an architecture of mlx-vlm alone, ")


def test_a_text_for_an_issue_moves_no_cursor() -> None:
    """Whatever stands in it: it may be printed."""
    text = issue_text([Finding("model", "ok", "", "x\x1b[2J\ny")])
    assert "x\\x1b[2J\\ny" in text and "\x1b" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux there is a choice")
@pytest.mark.parametrize(("setting", "shared"), [("auto", "libsecret.so"), ("file", "the one of BLAS_LIBRARY")])
def test_the_file_of_a_blas_is_told_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, shared: str
) -> None:
    """A file that a person named may have any name."""
    library = tmp_path / "libsecret.so"
    library.write_text("")
    monkeypatch.setenv("BLAS_LIBRARY", str(library) if setting == "file" else "auto")
    monkeypatch.setattr(doctor, "active_blas", lambda: None)
    monkeypatch.setattr(doctor, "computes_on_gpu", lambda _: False)
    monkeypatch.setattr(doctor, "library_files", lambda *_: [library])
    monkeypatch.setattr(doctor, "fault_of", lambda *_: None)
    assert first("BLAS") == Finding("BLAS", "ok", str(library), shared)


@pytest.mark.parametrize(("name", "shared"), [("OpenBLAS 0.3", "OpenBLAS 0.3"), ("mine.so", "one that does not tell")])
def test_a_blas_that_was_preloaded_is_told_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, name: str, shared: str
) -> None:
    """Not by that of its file."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor, "active_blas", lambda: Blas(name, "/home/me/mine.so"))
    assert first("BLAS").shared.startswith(shared)


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
    assert unpinned({"mlx": "0.32.4", "rich": "13.9.4", "gone": "1", "pip": "23.2.1"}) == [
        "rich 1.0 instead of 13.9.4",
        "gone missing instead of 1",
        "pip missing instead of 23.2.1",
    ]
    there["pip"] = "26.0"
    assert unpinned({"pip": "23.2.1"}) == [], "any fetches the demo"
    assert first("packages").state == "bad"


def test_a_mac_without_metal_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python for another processor, or a virtual machine: MLX would compute, and take for ever."""
    facts = DeviceFacts("cpu", False, None, 2**34)
    monkeypatch.setattr("kvserve.engine.device.device_facts", lambda: facts)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    assert first("device").state == "ok"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert first("device").state == "bad" and "Metal off, 16.0 GiB" in first("device").text


def test_a_shared_cache_that_does_not_answer_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place alone; where none is named nothing is looked for."""
    assert not any(each.name == "shared" for each in doctor._shared_cache(doctor.load_launch(()).settings))
    monkeypatch.setenv("REMOTE_CACHE_URL", f"redis://me:a-secret@127.0.0.1:{free_port()}/0")
    [finding] = doctor._shared_cache(doctor.load_launch(()).settings)
    assert (finding.state, finding.shared) == ("bad", "REMOTE_CACHE_URL: unreachable")
    assert "127.0.0.1" in finding.text and "secret" not in finding.text


# --- several ranks ----------------------------------------------------------------------------------------------------


def be_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: str, hosts: object) -> None:
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts), "utf-8")
    monkeypatch.setenv("MLX_HOSTFILE", str(path))
    monkeypatch.setenv("MLX_RANK", rank)


def test_a_rank_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its own address is free; a follower needs no port for clients. Others are told no address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        be_rank(monkeypatch, tmp_path, "1", [[f"127.0.0.1:{free_port()}"], [f"127.0.0.1:{port}"]])
        monkeypatch.setenv("MLX_PORT", str(port))
        seen = found()
        assert seen["ranks"].state == "bad" and "is taken by" in seen["ranks"].text
        assert "rank 1 of 2" in seen["ranks"].shared and str(port) not in seen["ranks"].shared
        assert "MLX_PORT" not in seen and seen["start"].state == "ok"
    assert first("ranks").state == "ok"
    be_rank(monkeypatch, tmp_path, "0", [["192.0.2.1:5000"], ["192.0.2.2:5000"]])
    assert first("ranks").state == "bad" and "192.0.2.1:5000" in first("ranks").text


@pytest.mark.parametrize(("rank", "hosts"), [("2", [["a:1"], ["b:1"]]), ("0", {"a": 1}), ("0", [["a:1"], ["b:"]])])
def test_half_a_hostfile_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, hosts: object
) -> None:
    be_rank(monkeypatch, tmp_path, "1" if hosts == [["a:1"], ["b:"]] else rank, hosts)
    ranks = first("ranks")
    assert ranks.state == "bad" and "MLX_" in ranks.text and str(tmp_path) not in ranks.shared


def test_a_variable_that_starts_no_ranks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a rank without a hostfile."""
    assert "ranks" not in found()
    monkeypatch.setenv("MLX_RANK", "0")
    assert first("ranks").state == "note" and "MLX_RANK" in first("ranks").text
