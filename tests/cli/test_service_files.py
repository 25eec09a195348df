"""`kvserve service print`: what launchd and systemd are given reads back as what was meant, whatever stands in it."""

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cli.service_files import COMMANDS_OF, FILES, property_list, unit
from tests.cli.running import run, told
from tests.laws import num_examples

SECONDS = 60
COMMAND = [sys.executable, "-m", "kvserve.cli", "serve", "--model", 'my "own" 100 % $HOME\\model', "--port=0"]


def service_of(text: str) -> dict[str, str]:
    """The settings of a unit."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_flags_go_into_the_command_and_the_folder_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter starts the command; with --json it is said where the file goes and how it is switched on."""
    monkeypatch.chdir(tmp_path)
    listed = plistlib.loads(run("service", "print", "--launchd", "--model", "a/b").stdout.encode())
    assert listed["ProgramArguments"] == [sys.executable, "-m", "kvserve.cli", "serve", "--model", "a/b"]
    assert listed["WorkingDirectory"] == str(tmp_path) and listed["RunAtLoad"] is True
    body = told("service", "print", "--systemd", "--no-proxy")
    assert service_of(body["text"])["ExecStart"] == f"{sys.executable} -m kvserve.cli serve --no-proxy"
    assert body["file"].endswith("kvserve.service") and any("enable" in line for line in body["on"])


def test_the_page_has_the_commands_that_are_told() -> None:
    """A folder that is not there yet, a user who logs out, and a file that was changed are thought of."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "command.md").read_text("utf-8")
    for keeper, groups in COMMANDS_OF.items():
        body = told("service", "print", f"--{keeper}")
        assert {name: body[name] for name in groups} == groups
        assert [line for lines in groups.values() for line in lines if line not in page] == []
        assert groups["before"] == [f"mkdir -p {FILES[keeper].rpartition('/')[0]}"]


@pytest.mark.parametrize(("platform", "begins"), [("darwin", "<?xml"), ("linux", "[Unit]")])
def test_without_a_choice_it_is_the_one_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, platform: str, begins: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert run("service", "print").stdout.startswith(begins)


def test_a_flag_that_the_server_does_not_know_is_refused_now() -> None:
    """And not by a service that never starts."""
    done = run("service", "print", "--modle", "x")
    assert done.exit_code == 1 and "did you mean --model?" in done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Its own check finds nothing wrong, also with what has to be quoted; with a key that there is not it would."""
    folder = tmp_path / "50 % of it"
    folder.mkdir()
    file = tmp_path / "kvserve.service"
    for text, complaint in ((unit(COMMAND, folder), ""), (unit(COMMAND, folder) + "Nonsense=1\n", "Nonsense")):
        file.write_text(text, "utf-8")
        verified: Any = subprocess.run(
            ["systemd-analyze", "verify", "--user", "--man=no", str(file)],
            env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        said = "\n".join(line for line in verified.stderr.splitlines() if "kvserve.service" in line)
        assert complaint in said if complaint else said == "", verified.stderr


def read_back(line: str) -> list[str]:
    """The words of an ExecStart line, by systemd's rules: quotes, C's escapes, doubled percent and dollar signs."""
    words, word, inside, place = [], "", False, 0
    while place < len(line):
        char = line[place]
        if char == "\\":
            place += 1
            word += {"n": "\n", "t": "\t"}.get(line[place], line[place])
        elif char == '"':
            inside = not inside
        elif char == " " and not inside:
            words, word = [*words, word], ""
        else:
            word += char
            place += char in "%$"  # the other one of the two
        place += 1
    return [*words, word]


WORDS = st.lists(st.text("aZ0 -=;|&$%{}\"'\\é漢", min_size=1), min_size=1)


@settings(max_examples=num_examples(30))
@given(WORDS, st.sampled_from(["", "\n", "\t", "%h", "${HOME}", '"', "\\"]))
def test_any_words_read_back(words: list[str], odd: str) -> None:
    """What stands in a flag starts nothing else, and no variable or specifier is put into it."""
    words = [*words, f"{words[0]}{odd}{words[-1]}"]
    [line] = [line for line in unit(words, Path("/")).splitlines() if line.startswith("ExecStart=")]
    assert read_back(line.removeprefix("ExecStart=")) == words


@settings(max_examples=num_examples(30))
@given(WORDS)
def test_any_words_are_in_the_property_list(words: list[str]) -> None:
    """plistlib's own reading of it."""
    assert plistlib.loads(property_list(words, Path("/")).encode())["ProgramArguments"] == words
