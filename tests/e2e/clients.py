"""Real agent clients, each with a HOME of its own: how they are installed, configured and asked. The lines of their
configurations are the README's.

They are installed into CLIENTS_HOME or a folder below the user's cache, and kept there. They run with a dead proxy for
everything but loopback, so they speak to nobody else.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import pasted

PACKAGES = {
    "node24": ("node@24", "node"),
    "pi": ("@earendil-works/pi-coding-agent@0.87.1", "pi"),
    "openclaw": ("openclaw@2026.9.6", "openclaw"),
    "codex": ("@openai/codex@0.169.0", "codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
    "claude": ("@anthropic-ai/claude-code@2.1.330", "claude"),
}
"""Folder -> what npm installs there, and the program that is wanted of it."""
AIDER = "aider-chat==0.86.2"
"""What pip installs into an environment of its own."""
INSTALL_SECONDS = 400
TURN_SECONDS = 300
NOWHERE = "http://127.0.0.1:9"


def clients_home() -> Path:
    """Where the clients are installed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CLIENTS_HOME") or caches / "kvserve-clients")


def run(command: list[str], *, seconds: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )


def programs(folder: str) -> Path:
    """Where npm put the programs of one of the packages."""
    return clients_home() / folder / "node_modules" / ".bin"


def install(folder: str) -> None:
    """Install one of the packages unless it is there. Skips the test where npm is missing or cannot install it.

    Packages that ask for a newer Node than the machine's are installed with ours.
    """
    package, program = PACKAGES[folder]
    if (programs(folder) / program).exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not there to install {package}")
    target = clients_home() / folder
    target.mkdir(parents=True, exist_ok=True)
    path = f"{programs('node24')}{os.pathsep}{os.environ['PATH']}"
    command = [npm, "install", "--no-audit", "--no-fund", package]
    done = run(command, seconds=INSTALL_SECONDS, cwd=target, env={**os.environ, "PATH": path})
    if done.returncode != 0:
        pytest.skip(f"npm could not install {package}: {done.stderr[-600:]}")


def install_aider() -> None:
    """Install aider unless it is there. Skips the test where pip cannot install it."""
    if _aider_program().exists():
        return
    target = clients_home() / "aider"
    done = run([sys.executable, "-m", "venv", str(target)], seconds=INSTALL_SECONDS)
    if done.returncode == 0:
        done = run([str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", AIDER], seconds=INSTALL_SECONDS)
    if done.returncode != 0:
        pytest.skip(f"pip could not install {AIDER}: {done.stderr[-600:]}")


def _aider_program() -> Path:
    return clients_home() / "aider" / "bin" / "aider"


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

    def start_program(self, program: Path, *arguments: str, **variables: str) -> str:
        """The same for any program."""
        environment = {
            **{"HOME": str(self.home), "PATH": f"{programs('node24')}:{os.environ['PATH']}", "TERM": "dumb"},
            **{"LANG": "C.UTF-8", "CI": "1", "DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1"},
            **{"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            **variables,
        }
        command = [str(program), *arguments]
        done = run(command, seconds=TURN_SECONDS, cwd=self.project, env=environment)
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
    """Claude Code for the server on this port, as the README says."""
    for folder in ("node24", "claude"):
        install(folder)
    (home / "project").mkdir(parents=True)
    return ClaudeCode(home, port)


def set_up_anthropic_pi(home: Path, port: int, max_tokens: int) -> Pi:
    """PI, configured to speak Anthropic's API to the server on this port."""
    for folder in ("node24", "pi"):
        install(folder)
    return Pi(_home(home, ".pi/agent/models.json", pasted.configuration("PI", port, max_tokens, 1)))


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
"""What a run without a person needs, around the README's lines."""


def set_up_codex(home: Path, port: int) -> Codex:
    """Codex, configured for the server on this port as the README says."""
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
    """opencode for the server on this port as the README says; the provider's package chooses the protocol."""
    for folder in ("node24", "opencode"):
        install(folder)
    configuration = pasted.configuration("opencode", port, max_tokens)
    configuration["provider"]["kvserve"]["npm"] = package
    configuration |= {"autoupdate": False, "share": "disabled", "permission": {"*": "allow"}}
    return Opencode(_home(home, ".config/opencode/opencode.json", configuration))


@dataclass(frozen=True)
class Aider(Client):
    """aider, told by variables which server to ask; it has no tools and writes the files that the model lists."""

    port: int

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what aider printed. `--restore-chat-history` continues the last conversation."""
        return self.start_program(
            _aider_program(),
            *pasted.arguments("aider", self.port),
            *("--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-pretty", *flags),
            *("--message", text),
            **pasted.variables("aider", self.port),
        )


def set_up_aider(home: Path, port: int) -> Aider:
    """aider for the server on this port, as the README says."""
    install_aider()
    (home / "project").mkdir(parents=True)
    return Aider(home, port)


def set_up_pi(home: Path, port: int, max_tokens: int) -> Pi:
    """PI, configured for the server on this port as the README says."""
    for folder in ("node24", "pi"):
        install(folder)
    return Pi(_home(home, ".pi/agent/models.json", pasted.configuration("PI", port, max_tokens)))


def set_up_openclaw(home: Path, port: int, max_tokens: int) -> OpenClaw:
    """OpenClaw, configured for the server on this port as the README says; it works in its project folder."""
    for folder in ("node24", "openclaw"):
        install(folder)
    configuration = pasted.configuration("OpenClaw", port, max_tokens)
    configuration["agents"]["defaults"]["workspace"] = str(home / "project")
    return OpenClaw(_home(home, ".openclaw/openclaw.json", configuration))


def _home(home: Path, file: str, configuration: Mapping[str, Any]) -> Path:
    settings = home / file
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(configuration), "utf-8")
    (home / "project").mkdir()
    return home
