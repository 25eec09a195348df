"""`kvserve launch`: each client is told what the README tells, and started with it in a folder of ours. Programs that
write down how they were started stand for the clients; tests/e2e has the real ones."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dotenv import dotenv_values

from kvserve.cli import launching
from kvserve.cli.asking import Address
from kvserve.protocols.client_configs import CLAUDE_ELSEWHERE, CLIENTS, NO_KEY, ClientSetUp, Endpoint
from tests.cli.running import run, told
from tests.e2e import pasted
from tests.web.fakes import eventually

README_SERVER = Endpoint("http://127.0.0.1:4000", NO_KEY, 131_072)
FOLDER = Path("/folder")

RECORDER = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
files = {{}}
for value in [*os.environ.values(), *sys.argv[1:]]:
    path = pathlib.Path(value)
    if "kvserve-launch-" in value or "kept" in value:
        for each in [path] if path.is_file() else path.glob("*"):
            files[str(each)] = [each.read_text(), each.stat().st_mode] if each.is_file() else None
print(json.dumps({{"arguments": sys.argv[1:], "variables": dict(os.environ), "files": files}}))
sys.exit(7)
"""


def set_up(client: str, server: Endpoint = README_SERVER) -> ClientSetUp:
    return CLIENTS[client].set_up(server, FOLDER)


# --- what the README says ---------------------------------------------------------------------------------------------


def test_pi_has_the_readmes_file() -> None:
    """For its port and its context."""
    found = set_up("pi")
    assert json.loads(found.files["models.json"]) == json.loads(pasted.block("PI", "json", 4000))
    assert found.arguments == pasted.command("PI")


def test_opencode_has_the_readmes_file_as_a_variable() -> None:
    """With the model in it that the README names on the command line, where it stands before any command of its own."""
    found = set_up("opencode")
    configuration = json.loads(found.variables["OPENCODE_CONFIG_CONTENT"])
    assert ("--model", configuration.pop("model")) == pasted.command("opencode")
    assert configuration == json.loads(pasted.block("opencode", "json", 4000)) and not found.arguments


def test_openclaw_has_the_readmes_file_and_a_workspace_of_its_own() -> None:
    """In a home that is not a person's own no file is put into theirs."""
    found = set_up("openclaw")
    configuration = json.loads(found.files["openclaw.json"])
    assert configuration["agents"]["defaults"].pop("workspace") == "/folder/workspace"
    assert configuration == json.loads(pasted.block("OpenClaw", "json", 4000))
    assert found.arguments == pasted.command("OpenClaw")


def test_codex_is_told_on_its_command_line_what_the_readme_writes_into_its_file() -> None:
    """Each argument is a line of TOML, and all of them are that file."""
    found = set_up("codex")
    assert set(found.arguments[::2]) == {"-c"} and not found.files
    lines = tomllib.loads("\n".join(found.arguments[1::2]))
    assert lines == tomllib.loads(pasted.block("Codex", "toml", 4000))


@pytest.mark.parametrize(("client", "section"), [("claude", "Claude Code"), ("aider", "aider")])
def test_variables_are_those_of_the_readme(client: str, section: str) -> None:
    """aider's context is in a file besides, as docs/clients.md has it."""
    found = set_up(client)
    assert found.variables == pasted.variables(section, 4000)
    wanted = pasted.arguments(section, 4000)
    assert found.arguments[: len(wanted)] == wanted
    if client == "aider":
        assert json.loads(found.files["metadata.json"]) == {"openai/local": {"max_input_tokens": 131_072}}
        assert found.arguments[-4:-2] == ("--model-metadata-file", "/folder/metadata.json")


def test_no_settings_of_a_person_lead_claude_code_elsewhere(
    installed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `env` of their files wins over variables, and that of the file on the command line over theirs, name by name:
    all that leads elsewhere is empty there, and nothing of it is inherited."""
    for name in CLAUDE_ELSEWHERE:
        monkeypatch.setenv(name, "elsewhere")
    assert {"ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"} <= set(CLAUDE_ELSEWHERE)
    done, seen = launched(capfd, "claude", "-p", "hello")
    assert done.exit_code == 7, done.output
    option, path, *own = seen["arguments"]
    assert option == "--settings" and own == ["-p", "hello"]
    settings = json.loads(seen["files"][path][0])["env"]
    assert settings["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080" and settings["ANTHROPIC_API_KEY"] == NO_KEY
    merged = {**dict.fromkeys(CLAUDE_ELSEWHERE, "elsewhere"), "ANTHROPIC_BASE_URL": "http://elsewhere", **settings}
    assert "elsewhere" not in str(merged)
    assert "elsewhere" not in seen["variables"].values()
    own_variables = {name: seen["variables"][name] for name in set_up("claude").variables}
    assert settings == own_variables | dict.fromkeys(CLAUDE_ELSEWHERE, "")
    assert run("launch", "claude", "--print").stdout.splitlines()[-1].startswith("env -u ANTHROPIC_AUTH_TOKEN -u ")


def test_no_file_of_a_person_leads_aider_elsewhere() -> None:
    """The file of variables that is named on the command line is read last, and has all by which a server is named; all
    models that it asks are this one."""
    found = set_up("aider", Endpoint("http://127.0.0.1:8080", "it's a \\ key", 8_000))
    assert found.arguments[-2:] == ("--env-file", "/folder/aider.env")
    settings = dotenv_values(stream=io.StringIO(found.files["aider.env"]))
    urls = {"OPENAI_API_BASE", "OPENAI_BASE_URL", "AIDER_OPENAI_API_BASE"}
    assert {settings.pop(name) for name in urls} == {"http://127.0.0.1:8080/v1"}
    assert {settings.pop(name) for name in ("OPENAI_API_KEY", "AIDER_OPENAI_API_KEY")} == {"it's a \\ key"}
    assert settings == {
        "AIDER_SET_ENV": "OPENAI_API_BASE=http://127.0.0.1:8080/v1",
        "AIDER_API_KEY": "openai=it's a \\ key",
    }
    asked = [found.arguments[place + 1] for place, word in enumerate(found.arguments) if word.endswith("model")]
    assert asked == ["openai/local"] * 3


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_and_a_short_context_reach_every_client(client: str) -> None:
    """The key is where the client looks for it and nowhere else; no answer is longer than a quarter of the context."""
    found = set_up(client, Endpoint("http://127.0.0.1:8080", "sk-1", 8_000))
    everything = json.dumps([found.arguments, dict(found.variables), dict(found.files)])
    assert "sk-1" in everything and NO_KEY not in everything.replace("none of", "")
    assert "8000" in everything and "131072" not in everything and "8192" not in everything
    assert ("2000" in everything) == (client in ("opencode", "pi", "openclaw"))


# --- starting it ------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that write down how they were started, and a server of 65,536 tokens."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for each in CLIENTS.values():
        (programs / each.program).write_text(RECORDER)
        (programs / each.program).chmod(0o700)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Address, "get", lambda *_: {"data": [{"id": "m", "max_model_len": 65_536}]})
    return programs


def launched(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[Result, dict[str, Any]]:
    """What was said, and what the client wrote down."""
    done = run("launch", *words)
    return done, json.loads(capfd.readouterr().out or "{}")


def test_a_client_runs_with_its_configuration_and_nothing_is_left(
    installed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own arguments follow ours, its exit code is ours, its files can be read by their owner alone and go."""
    monkeypatch.setenv("API_KEY", "sk-secret")
    done, seen = launched(capfd, "pi", "-c", "--", "--json", "hello")
    assert done.exit_code == 7, done.output
    assert seen["arguments"] == ["--provider", "kvserve", "--model", "local", "-c", "--json", "hello"]
    [(path, (text, mode))] = seen["files"].items()
    assert Path(path).name == "models.json" and "sk-secret" in text and stat.S_IMODE(mode) == 0o600
    assert seen["variables"]["PI_CODING_AGENT_DIR"] == str(Path(path).parent)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs"], "nothing is left"


def test_a_folder_that_was_asked_for_is_kept_and_is_no_other(
    installed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So that a conversation goes on. One that holds something else, such as a person's own, is not touched."""
    kept = tmp_path / "kept"
    for _ in range(2):
        done, seen = launched(capfd, "openclaw", "--folder", str(kept), "-m", "hi")
        assert done.exit_code == 7 and seen["arguments"][-2:] == ["-m", "hi"]
        assert (kept / "openclaw.json").exists()
    own = tmp_path / "own"
    own.mkdir()
    (own / "models.json").write_text("mine")
    done, seen = launched(capfd, "pi", "--folder", str(own))
    assert done.exit_code == 1 and "not of kvserve" in done.stderr and seen == {}
    assert (own / "models.json").read_text() == "mine"


def test_nobody_else_reads_a_folder_that_was_there(
    installed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An empty one that all could read, and one with a file of a run before that all could read."""
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    for _ in range(2):
        done, _seen = launched(capfd, "pi", "--folder", str(kept))
        assert done.exit_code == 7
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (kept, kept / "models.json")]
        assert modes == [0o700, 0o600]
        kept.chmod(0o755)
        (kept / "models.json").chmod(0o644)
        (kept / "models.json").write_text("x" * 10_000)


@pytest.mark.parametrize("client", CLIENTS)
def test_what_would_be_started_is_printed_and_nothing_is_written(installed: Path, tmp_path: Path, client: str) -> None:
    """In words to paste and as JSON; FOLDER stands for the temporary one."""
    shown, body = run("launch", client, "--print", "x y").stdout, told("launch", client, "x y")
    assert body["command"][0] == CLIENTS[client].program and body["command"][-1] == "x y"
    assert shown.rstrip().endswith("'x y'") and "65536" in shown
    assert all(f"# FOLDER/{name}\n{text}" in shown for name, text in body["files"].items())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs"]


def test_a_client_that_is_not_there_says_how_it_is_installed(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one is refused with the list."""
    monkeypatch.setenv("PATH", "/nowhere")
    done = run("launch", "codex")
    assert done.exit_code == 1 and "npm install -g @openai/codex" in done.stderr
    done = run("launch", "cursor")
    assert done.exit_code == 2 and "opencode" in done.stderr


def test_a_server_that_does_not_tell_its_context_is_none(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some other program listens there."""
    monkeypatch.setattr(Address, "get", lambda *_: {"data": [{"id": "m"}]})
    assert run("launch", "pi").exit_code == 2


def test_who_ends_the_command_ends_the_client(
    installed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM is handed on, and the folder goes."""
    script = f"import time\nprint('{{}}', flush=True)\nopen({str(tmp_path / 'started')!r}, 'w')\ntime.sleep(100)\n"
    (installed / "aider").write_text(f"#!{sys.executable} -IS\n{script}")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def end() -> None:
        if eventually((tmp_path / "started").exists):
            seen.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    seen: list[bool] = []
    killer = threading.Thread(target=end)
    killer.start()
    try:
        done, _ = launched(capfd, "aider")
    finally:
        killer.join()
    assert seen == [True]
    assert {number: signal.getsignal(number) for number in before} == before
    assert done.exit_code == 128 + signal.SIGTERM
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs", "started"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_who_ends_it_before_the_client_runs_leaves_no_key(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    number: signal.Signals,
) -> None:
    """A signal between the configuration and the client; who runs these tests in the background has them ignored."""
    before = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))
    write = launching._write

    def write_and_end(files: Mapping[str, str], folder: Path) -> None:
        write(files, folder)
        assert list(tmp_path.glob("kvserve-launch-*/models.json"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(launching, "_write", write_and_end)
    assert run("launch", "pi").exit_code == 128 + number
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_folder_stays_as_long_as_its_client(
    installed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """What a terminal sends reaches the client by itself, which may go on; here it alone is not sent it."""
    script = "import os, pathlib, signal, sys, time\n"
    script += f"os.kill(os.getppid(), {int(number)})\ntime.sleep(0.1)\n"
    script += "print('[]' if pathlib.Path(os.environ['PI_CODING_AGENT_DIR'], 'models.json').exists() else '')\n"
    (installed / "pi").write_text(f"#!{sys.executable} -IS\n{script}sys.exit(5)\n")
    assert run("launch", "pi").exit_code == 5
    assert json.loads(capfd.readouterr().out) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs"]


def test_a_signal_while_the_client_is_started_reaches_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the fork and the moment from which it is known."""
    start = subprocess.Popen

    def started(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process: subprocess.Popen[bytes] = start(*words, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    (installed / "pi").write_text(f"#!{sys.executable} -IS\nimport time\ntime.sleep(100)\n")
    monkeypatch.setattr(subprocess, "Popen", started)
    assert run("launch", "pi").exit_code == 128 + signal.SIGTERM
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "programs"]
