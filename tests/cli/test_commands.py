"""The table of commands, its help, and errors in words."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvserve.cli import fitting
from kvserve.cli.commands import COMMANDS, kvserve
from kvserve.errors import ModelLoadError
from tests.cli.running import run, words_of

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100

HELP_ALONE = """
import sys
from kvserve.cli.commands import kvserve
try:
    kvserve(["--help"], prog_name="kvserve")
except SystemExit as end:
    heavy = ("mlx", "transformers", "huggingface_hub", "pydantic", "rich", "kvserve.config", "kvserve.app")
    print("code", end.code, *(name for name in heavy if name in sys.modules))
"""


def commands() -> dict[str, click.Command]:
    """Every command by its words; of a group those in it."""
    context, found = click.Context(kvserve), {}
    for name in COMMANDS:
        command = kvserve.get_command(context, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {each}": inner[each] for each in inner} or {name: command}
    return found


def test_every_command_has_its_help_and_takes_json() -> None:
    """The list names each; its own help says more, and has `--json`."""
    listed = words_of(run("--help").stdout)
    for words, command in commands().items():
        shown = run(*words.split(), "--help")
        assert shown.exit_code == 0 and command.help, words
        assert "--json" in shown.stdout, words
    assert all(f"{name} {help_line}" in listed for name, (_, help_line) in COMMANDS.items())


def test_help_imports_nothing_that_takes_long() -> None:
    """Neither MLX nor the settings' library, nor what a command needs."""
    done = subprocess.run(
        [sys.executable, "-c", HELP_ALONE], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stdout.endswith("code 0\n"), done


def test_an_error_has_its_words_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package raises on purpose ends a command with 1; a setting that cannot be used, too."""
    monkeypatch.chdir(tmp_path)
    done = run("fit", "no/such/model")
    assert done.exit_code == 1 and done.stderr.startswith("Error: MODEL_PATH='no/such/model' is not a folder.")
    monkeypatch.setenv("MAX_KV_SIZE", "many")
    done = run("models")
    assert done.exit_code == 1 and done.stderr.startswith("Error: MAX_KV_SIZE='many' cannot be used")


def test_what_a_hub_says_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with the words of somebody else."""

    def refuse(_: str) -> None:
        raise ModelLoadError("the hub said \x1b[2J\x1b]0;mine\x07")

    monkeypatch.setattr(fitting, "local_folder", refuse)
    done = run("fit", "some/model")
    assert done.exit_code == 1 and done.stderr == "Error: the hub said \\x1b[2J\\x1b]0;mine\\x07\n"


@pytest.mark.parametrize("words", [("service", "print", "--systemd"), ("service", "print", "--launchd")])
def test_what_is_pasted_has_its_own_lines_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """However narrow it is: the same text as in a pipe."""
    flags = ("--model", "some/model-of-a-long-name " * 8)
    piped = run(*words, *flags).stdout
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    assert run(*words, *flags).stdout == piped and max(map(len, piped.splitlines())) > 200


def test_the_page_has_every_command() -> None:
    """One row each in docs/command.md, with its group's words; no other."""
    page = (ROOT / "docs" / "command.md").read_text("utf-8")
    rows = re.findall(r"^\| `kvserve ([a-z ]+?)(?= \[| [A-Z]|`)", page, re.MULTILINE)
    assert sorted(rows) == sorted(commands())


def test_an_unknown_command_is_refused() -> None:
    assert run("sreve").exit_code == 2
