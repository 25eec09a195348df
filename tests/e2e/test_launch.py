"""`kvserve launch` starts the six real clients: two turns each with a tool, against a server that it asks for its
context.

What the model writes is scripted by grammars; everything else is real. The trials are those of the twelve clients, here
without a configuration of a person's: only what a run without a person needs is given to the client as arguments, and
its own files in its HOME are looked at afterwards. Claude Code and aider find files and variables there that lead to
another server, where nobody is.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.clients import NOWHERE, Client
from tests.e2e.conftest import Stage
from tests.e2e.five_turns import SCALES, SHORT_RULES, make_project
from tests.e2e.installing import install, install_python, programs, python_program
from tests.e2e.scripted import ScriptedServer, TracedTurn, scripted_server
from tests.e2e.test_twelve_clients import FAMILY, NOTE, TRIALS, Trial, ask
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TRIAL_OF = {trial.folder: trial for trial in TRIALS}

type Words = Callable[[int], tuple[str, ...]]
"""A client's own arguments for a turn."""


def claude(turn: int) -> tuple[str, ...]:
    goes_on = ("-c",) if turn > 1 else ()
    return ("-p", ask(turn), *goes_on, "--output-format", "json", "--allowedTools", "Bash,Read")


def codex(turn: int) -> tuple[str, ...]:
    allowed = ("-c", 'approval_policy="never"', "-c", 'sandbox_mode="danger-full-access"')
    resume = ("resume", "--last") if turn > 1 else ()
    return (*allowed, "exec", "--skip-git-repo-check", "--json", *resume, ask(turn))


def opencode(turn: int) -> tuple[str, ...]:
    return ("run", "--format", "json", *(("-c",) if turn > 1 else ()), ask(turn))


def pi(turn: int) -> tuple[str, ...]:
    return ("-p", *(("-c",) if turn > 1 else ()), "--mode", "json", ask(turn))


def openclaw(turn: int) -> tuple[str, ...]:
    return ("--session-id", "s1", "--json", "-m", ask(turn))


def aider(turn: int) -> tuple[str, ...]:
    flags = ("--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-pretty")
    goes_on = ("--restore-chat-history",) if turn > 1 else ()
    return (*flags, *goes_on, NOTE, "--message", ask(turn))


WORDS: dict[str, Words] = {
    "claude": claude, "codex": codex, "opencode": opencode, "pi": pi, "openclaw": openclaw, "aider": aider,
}  # fmt: skip

OWN_FILES = {
    "codex": ".codex/config.toml",
    "opencode": ".config/opencode/opencode.json",
    "pi": ".pi/agent/models.json",
    "openclaw": ".openclaw/openclaw.json",
}
"""Where a person's own configuration would be."""


ELSEWHERE = json.dumps(
    {
        "env": {
            **{"ANTHROPIC_BASE_URL": NOWHERE, "ANTHROPIC_API_KEY": "elsewhere", "ANTHROPIC_AUTH_TOKEN": "elsewhere"},
            **{"CLAUDE_CODE_USE_BEDROCK": "1", "CLAUDE_CODE_USE_VERTEX": "1", "AWS_REGION": "us-east-1"},
        }
    }
)
DOTENV = f"OPENAI_API_BASE={NOWHERE}/v1\nOPENAI_BASE_URL={NOWHERE}/v1\nOPENAI_API_KEY=elsewhere\n"
AIDER_CONF = f"""\
openai-api-base: {NOWHERE}/v1
openai-api-key: elsewhere
set-env:
  - OPENAI_API_BASE={NOWHERE}/v1
weak-model: openai/elsewhere
"""
HOSTILE: dict[str, dict[str, str]] = {
    "claude": {".claude/settings.json": ELSEWHERE, "project/.claude/settings.json": ELSEWHERE},
    "aider": {".env": DOTENV, "project/.env": DOTENV, ".aider.conf.yml": AIDER_CONF},
}
"""Files of a HOME that lead a client to another server, each of which it reads over the variables that it inherits."""

INHERITED = {
    "claude": {"ANTHROPIC_AUTH_TOKEN": "elsewhere", "CLAUDE_CODE_USE_VERTEX": "1"},
    "aider": {"OPENAI_BASE_URL": f"{NOWHERE}/v1", "AIDER_OPENAI_API_BASE": f"{NOWHERE}/v1"},
}


@dataclass(frozen=True)
class Launched(Client):
    """A client that is started by the command."""

    name: str
    port: int

    def say(self, turn: int) -> str:
        """One turn; returns what was printed."""
        folder = python_program(self.name).parent if self.name == "aider" else programs(self.name)
        return self.start_program(
            Path(sys.executable),
            *("-m", "kvserve.cli", "launch", self.name, "--folder", str(self.home / "kept")),
            *("--server-url", f"http://127.0.0.1:{self.port}", "--", *WORDS[self.name](turn)),
            PATH=os.pathsep.join([str(folder), str(programs("node24")), os.environ["PATH"]]),
            PYTHONPATH=str(ROOT),
            DISABLE_AUTOUPDATER="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
            **INHERITED.get(self.name, {}),
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stage: Stage) -> Iterator[ScriptedServer]:
    """One for all of them."""
    stage.clear()
    with scripted_server(tmp_path_factory.mktemp("launch"), tiny_model(FAMILY, scale=SCALES[FAMILY])) as server:
        yield server


def set_up(home: Path, name: str, port: int) -> Launched:
    """An installed client, and a project that allows it its tools."""
    if name == "aider":
        install_python(name)
    else:
        for folder in ("node24", name):
            install(folder)
    client = Launched(home, name, port)
    client.project.mkdir(parents=True)
    make_project(client.project, SHORT_RULES)
    for file, text in HOSTILE.get(name, {}).items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text, "utf-8")
    if name == "opencode":
        (client.project / "opencode.json").write_text(json.dumps({"permission": {"*": "allow"}}), "utf-8")
    return client


@pytest.mark.parametrize("name", WORDS)
def test_a_launched_client_makes_two_turns_with_a_tool(server: ScriptedServer, name: str, tmp_path: Path) -> None:
    """Its tool runs, both answers arrive, what was read before is not computed again, and nothing that a person would
    have written is there afterwards, or what was there is as it was."""
    trial: Trial = TRIAL_OF[name]
    server.app.clear_cache()
    server.steps[:], server.is_for_all = trial.steps, not trial.brings_tools
    num_before = len(server.turns())
    client = set_up(tmp_path, name, server.port_of("kvserve"))
    try:
        printed = [client.say(turn) for turn in (1, 2)]
    finally:
        left, server.steps[:], server.is_for_all = list(server.steps), [], False
    assert left == [], printed

    def is_of_conversation(request: TracedTurn) -> bool:
        return ask(1) in request.prompt and ("<tools>" in request.prompt or not trial.brings_tools)

    requests = server.wait_for_turns(num_before, len(trial.steps), is_of_conversation)[: len(trial.steps)]
    assert all(answer in "".join(printed) for answer in trial.answers)
    assert trial.proof in requests[-1].prompt
    assert min(request.reuse for request in requests[1:]) >= trial.min_reuse
    assert name not in OWN_FILES or not (tmp_path / OWN_FILES[name]).exists()
    own = HOSTILE.get(name, {})
    assert {file: (tmp_path / file).read_text("utf-8") for file in own} == own
