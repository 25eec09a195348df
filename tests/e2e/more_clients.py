"""Real clients that docs/clients.md configures, each with a HOME of its own, and how they are asked. `clients.py` has
the others of it. Their tools run without asking, in the client's project.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e import pasted
from tests.e2e.clients import Client, home_with, home_with_text
from tests.e2e.installing import install, install_python, python_program

CLINE_SETTINGS = ".cline/data/settings/providers.json"


class QwenCode(Client):
    """qwen-code; its tools include `run_shell_command`."""

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what qwen-code printed. `-c` continues the last conversation."""
        return self.start("qwen", *pasted.command("qwen-code"), "--yolo", *flags, text)


def set_up_qwen_code(home: Path, port: int, max_tokens: int) -> QwenCode:
    """qwen-code for the server on this port, as docs/clients.md says."""
    for folder in ("node24", "qwen"):
        install(folder)
    return QwenCode(home_with(home, ".qwen/settings.json", pasted.configuration("qwen-code", port, max_tokens)))


class Kilo(Client):
    """Kilo; its tools include `bash` and `read`."""

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what Kilo printed. `-c` continues the last conversation."""
        return self.start("kilo", "run", *pasted.command("Kilo"), "--auto", *flags, text)


def set_up_kilo(home: Path, port: int, max_tokens: int) -> Kilo:
    """Kilo for the server on this port, as docs/clients.md says."""
    for folder in ("node24", "kilo"):
        install(folder)
    return Kilo(home_with(home, ".config/kilo/kilo.json", pasted.configuration("Kilo", port, max_tokens)))


class Continue(Client):
    """Continue's `cn`; its tools include `Bash` and `Read`."""

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what it printed. `--resume` continues the last conversation."""
        return self.start("continue", *pasted.command("Continue"), "--auto", *flags, "-p", text)


def set_up_continue(home: Path, port: int) -> Continue:
    """Continue for the server on this port, as docs/clients.md says."""
    for folder in ("node24", "continue"):
        install(folder)
    return Continue(home_with_text(home, ".continue/config.yaml", pasted.block("Continue", "yaml", port)))


class Cline(Client):
    """Cline; its tools include `run_commands`. A conversation can be continued at a terminal only."""

    def say(self, text: str) -> str:
        """A conversation of one turn; returns what Cline printed. Ends the process that Cline leaves behind."""
        try:
            return self.start("cline", "--json", text)
        finally:
            self.start("cline", "hub", "stop")


def set_up_cline(home: Path, port: int) -> Cline:
    """Cline for the server on this port, by the command and the line of settings that docs/clients.md has."""
    for folder in ("node24", "cline"):
        install(folder)
    (home / "project").mkdir(parents=True)
    cline = Cline(home)
    cline.start("cline", *pasted.arguments("Cline", port))
    file = home / CLINE_SETTINGS
    settings: dict[str, Any] = json.loads(file.read_text("utf-8"))
    [provider] = [provider["settings"] for provider in settings["providers"].values()]
    assert "baseUrl" in provider
    provider |= pasted.line("Cline", "contextWindow")
    file.write_text(json.dumps(settings), "utf-8")
    return cline


SHELL = '''
def shell(command: str) -> str:
    """Run a command."""
    import subprocess

    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
'''
"""The tool that llm is given: it has none that runs commands."""


class Llm(Client):
    """llm with a tool of the user's: `shell`."""

    def say(self, text: str, *flags: str) -> str:
        """One turn; returns what llm printed. `-c` continues the last conversation."""
        arguments = (*pasted.command("llm"), "--functions", SHELL, *flags, text)
        return self.start_program(python_program("llm"), *arguments, LLM_USER_PATH=str(self.home / "llm"))


def set_up_llm(home: Path, port: int) -> Llm:
    """llm for the server on this port, as docs/clients.md says."""
    install_python("llm")
    return Llm(home_with_text(home, "llm/extra-openai-models.yaml", pasted.block("llm", "yaml", port)))


@dataclass(frozen=True)
class MiniSweAgent(Client):
    """mini-swe-agent; its only tool is `bash`. A task ends with a command, behind which it asks for the next one."""

    port: int

    def work(self, first: str, second: str) -> str:
        """Two tasks of one conversation; returns what mini-swe-agent printed."""
        return self.start_program(
            python_program("mini"),
            *pasted.arguments("mini-swe-agent", self.port),
            *("--yolo", "--task", first),
            typed=f"{second}\n\n\n",
            **pasted.variables("mini-swe-agent", self.port),
        )


def set_up_mini_swe_agent(home: Path, port: int) -> MiniSweAgent:
    """mini-swe-agent for the server on this port, as docs/clients.md says."""
    install_python("mini")
    (home / "project").mkdir(parents=True)
    return MiniSweAgent(home, port)
