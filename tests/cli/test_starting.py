"""`kvserve serve` and `kvserve demo` start what the starters start."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.cli import starting
from kvserve.settings.flags import DISK_FLAGS, FLAGS
from tests.cli.running import run, words_of
from tests.e2e.servers import ROOT, environment

SECONDS = 100


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The flags of every start, none of which starts anything."""
    seen: list[list[str]] = []

    def start(argv: list[str], *_: object) -> int:
        seen.append(list(argv))
        return 7

    monkeypatch.setattr(starting, "start", start)
    return seen


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["serve"], []),
        (["serve", "--model", "a/b", "--port=0", "--json", "--no-proxy"], ["--model", "a/b", "--port=0", "--no-proxy"]),
        (["demo"], ["--demo", "smollm2"]),
        (["demo", "--tiny", "--port", "1"], ["--demo", "tiny", "--port", "1"]),
        (["demo", "--remove"], ["--demo-remove"]),
    ],
)
def test_flags_are_handed_on_and_the_exit_code_comes_back(
    started: list[list[str]], words: list[str], flags: list[str]
) -> None:
    """As they stand, less the command's own."""
    assert run(*words).exit_code == 7
    assert started == [flags]


def test_what_contradicts_itself_starts_nothing(started: list[list[str]]) -> None:
    assert run("demo", "--tiny", "--remove").exit_code == 2
    assert started == []


def test_the_help_names_every_flag_of_the_server() -> None:
    """As the tables have them."""
    shown = words_of(run("serve", "--help").stdout)
    assert all(flag in shown and str(row["help"]) in shown for flag, row in (*FLAGS, *DISK_FLAGS))


def test_a_start_that_is_refused_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same code and in the same words as `start_llm.py`."""
    monkeypatch.chdir(tmp_path)
    done = run("serve", "--modle", "x")
    assert done.exit_code == 1 and "There is no flag --modle (did you mean --model?)." in done.stderr


@pytest.mark.long
def test_a_program_is_told_once_the_model_answers(tmp_path: Path) -> None:
    """One line of JSON on stdout; all else is on stderr, and a signal ends it as ever."""
    command = [sys.executable, "-m", "kvserve.cli", "demo", "--tiny", "--no-proxy", "--port=0", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path, {}) | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline())
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(SECONDS) == 0 and rest == b""
    assert facts["demo"] == "tiny" and facts["server_url"].startswith("http://127.0.0.1:")
    assert facts["context_limit"] > 0 and facts["proxy_url"] is None
