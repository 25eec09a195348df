"""Real agent clients, each with a HOME of its own: how they are configured and asked. The lines of their configurations
are those of docs/clients.md, also for the others (`more_clients.py`). `installing.py` brings the programs.

They run with a dead proxy for everything but loopback, so they speak to nobody else.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e import pasted
from tests.e2e.installing import PACKAGES, install, install_python, programs, python_program, run

TURN_SECONDS = 300
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Client:
    """An installed client with a HOME of its own; its working directory is `project` in it."""

    home: Path

    @property
    def project(self) -> Path:
        return self.home / "project"

    def start(self, folder: str, *arguments: str, **variables: str) -> str:
        """Run the program of one of npm's packages to its end; returns what it printed. Fails unless it exits with 0.

        `variables` are those that this client has besides the environment that all have.
        """
        return self.start_program(programs(folder) / PACKAGES[folder][1], *arguments, **variables)

    def start_program(self, program: Path, *arguments: str, typed: str | None = None, **variables: str) -> str:
        """The same for any program; `typed` is what a person would type while it runs."""
        environment = {
            **{"HOME": str(self.home), "PATH": f"{programs('node24')}:{os.environ['PATH']}", "TERM": "dumb"},
            **{"LANG": "C.UTF-8", "CI": "1", "DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1"},
            **{"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            **variables,
        }
        command = [str(program), *arguments]
        done = run(command, typed, seconds=TURN_SECONDS, cwd=self.project, env=environment)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


class Pi(Client):
    """The PI coding agent; its tools include `bash` and `read`."""

    def say(self, text: str, *flags: str) -> list[dict[str, Any]]:
        """One turn; returns the events that PI printed. `-c` continues the last conversation."""
        printed = self.start("pi", "-p", *flags, "--mode", "json", *pasted.command("PI"), text)
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


class OpenClaw(Client):
    """OpenClaw's agent, run locally; its tools include `exec` and `read`."""

    def say(self, text: str) -> dict[str, Any]:
        """One turn of the only conversation; returns the report that OpenClaw printed."""
        arguments = ("--session-id", "s1", "--json", "-m", text)
        printed = self.start("openclaw", *pasted.command("OpenClaw"), *arguments)
        return dict(json.loads(printed[printed.index("{") :]))


@dataclass(frozen=True)
class ClaudeCode(Client):
    """Claude Code, told by variables which server to ask; its tools include `Bash` and `Read`."""

    port: int

    def say(self, text: str, *flags: str) -> dict[str, Any]:
        """One turn; returns the report that Claude Code printed. `-c` continues the last conversation."""
        printed = self.start(
            "claude",
            *("-p", text, *flags, "--output-format", "json", "--allowedTools", "Bash,Read"),
            DISABLE_AUTOUPDATER="1",
            **pasted.variables("Claude Code", self.port),
        )
        return dict(json.loads(printed))


def set_up_claude_code(home: Path, port: int) -> ClaudeCode:
    """Claude Code for the server on this port, as docs/clients.md says."""
    for folder in ("node24", "claude"):
        install(folder)
    (home / "project").mkdir(parents=True)
    return ClaudeCode(home, port)


def set_up_anthropic_pi(home: Path, port: int, max_tokens: int) -> Pi:
    """PI, configured to speak Anthropic's API to the server on this port."""
    for folder in ("node24", "pi"):
        install(folder)
    return Pi(home_with(home, ".pi/agent/models.json", pasted.configuration("PI", port, max_tokens, 1)))


class Codex(Client):
    """The Codex CLI, speaking `/v1/responses`; its tools include `exec_command`."""

    def say(self, text: str, *, goes_on: bool) -> list[dict[str, Any]]:
        """One turn; returns the events that Codex printed. `goes_on` continues the last conversation."""
        resume = ("resume", "--last") if goes_on else ()
        printed = self.start("codex", "exec", "--skip-git-repo-check", "--json", *resume, text)
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


CODEX_CONFIG = """\
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
{pasted}
[analytics]
enabled = false
"""
"""What a run without a person needs, around the lines of docs/clients.md."""


def set_up_codex(home: Path, port: int) -> Codex:
    """Codex, configured for the server on this port as docs/clients.md says."""
    for folder in ("node24", "codex"):
        install(folder)
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(CODEX_CONFIG.format(pasted=pasted.block("Codex", "toml", port)), "utf-8")
    (home / "project").mkdir()
    return Codex(home)


class Opencode(Client):
    """opencode; its tools include `bash` and `read`."""

    def say(self, text: str, *flags: str) -> list[dict[str, Any]]:
        """One turn; returns the events that opencode printed. `-c` continues the last conversation."""
        printed = self.start(
            "opencode",
            *("run", *pasted.command("opencode"), "--format", "json", *flags, text),
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def set_up_opencode(home: Path, port: int, package: str, max_tokens: int) -> Opencode:
    """opencode for the server on this port as docs/clients.md says; the provider's package chooses the protocol."""
    for folder in ("node24", "opencode"):
        install(folder)
    configuration = pasted.configuration("opencode", port, max_tokens)
    configuration["provider"]["kvserve"]["npm"] = package
    configuration |= {"autoupdate": False, "share": "disabled", "permission": {"*": "allow"}}
    return Opencode(home_with(home, ".config/opencode/opencode.json", configuration))


@dataclass(frozen=True)
class Aider(Client):
    """aider, told by variables which server to ask; it has no tools and writes the files that the model lists."""

    port: int

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what aider printed. `--restore-chat-history` continues the last conversation."""
        return self.start_program(
            python_program("aider"),
            *pasted.arguments("aider", self.port),
            *("--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-pretty", *flags),
            *("--message", text),
            **pasted.variables("aider", self.port),
        )


def set_up_aider(home: Path, port: int) -> Aider:
    """aider for the server on this port, as docs/clients.md says."""
    install_python("aider")
    (home / "project").mkdir(parents=True)
    return Aider(home, port)


def set_up_pi(home: Path, port: int, max_tokens: int) -> Pi:
    """PI, configured for the server on this port as docs/clients.md says."""
    for folder in ("node24", "pi"):
        install(folder)
    return Pi(home_with(home, ".pi/agent/models.json", pasted.configuration("PI", port, max_tokens)))


def set_up_openclaw(home: Path, port: int, max_tokens: int) -> OpenClaw:
    """OpenClaw, configured for the server on this port as docs/clients.md says; it works in its project folder."""
    for folder in ("node24", "openclaw"):
        install(folder)
    configuration = pasted.configuration("OpenClaw", port, max_tokens)
    configuration["agents"]["defaults"]["workspace"] = str(home / "project")
    return OpenClaw(home_with(home, ".openclaw/openclaw.json", configuration))


def home_with(home: Path, file: str, configuration: Mapping[str, Any]) -> Path:
    """A HOME with this file of JSON and an empty project."""
    return home_with_text(home, file, json.dumps(configuration))


def home_with_text(home: Path, file: str, text: str) -> Path:
    """A HOME with this file of settings and an empty project."""
    settings = home / file
    settings.parent.mkdir(parents=True)
    settings.write_text(text, "utf-8")
    (home / "project").mkdir()
    return home
