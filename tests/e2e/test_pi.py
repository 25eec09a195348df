"""The real PI coding agent holds a conversation with the demo model through LiteLLM.

The client comes from npm, into CLIENTS_HOME or a folder below the user's cache, and is kept there. It runs with a fresh
HOME and a dead proxy for everything but loopback, so it speaks to nobody else.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PACKAGES = {"node24": "node@24", "pi": "@earendil-works/pi-coding-agent@0.87.1"}
INSTALL_SECONDS = 400
TURN_SECONDS = 120
NUM_ANSWER_TOKENS = 96
NOWHERE = "http://127.0.0.1:9"


def clients_home() -> Path:
    """Where the clients are installed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CLIENTS_HOME") or caches / "kvserve-clients")


def run(command: list[str], *, seconds: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )


@dataclass(frozen=True)
class Pi:
    """An installed PI with a HOME of its own."""

    programs: Path
    home: Path

    def say(self, text: str, *flags: str) -> list[dict[str, Any]]:
        """One turn; returns the events that PI printed. Fails unless PI exits with 0."""
        node, pi = (self.programs / name / "node_modules" / ".bin" for name in ("node24", "pi"))
        environment = {
            **{"HOME": str(self.home), "PATH": f"{node}:{os.environ['PATH']}", "TERM": "dumb", "LANG": "C.UTF-8"},
            **{"CI": "1", "DO_NOT_TRACK": "1", "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        }
        command = [str(pi / "pi"), "-p", *flags, "--mode", "json", "--provider", "kvserve", "--model", "local", text]
        done = run(command, seconds=TURN_SECONDS, cwd=self.home / "project", env=environment)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def configuration(port: int) -> dict[str, Any]:
    """PI's models.json as the README gives it, with a short answer."""
    model = {
        "id": "local",
        "reasoning": True,
        "input": ["text"],
        "contextWindow": 131072,
        "maxTokens": NUM_ANSWER_TOKENS,
        "compat": {
            "supportsDeveloperRole": False,
            "supportsReasoningEffort": False,
            "thinkingFormat": "qwen-chat-template",
            "maxTokensField": "max_tokens",
        },
    }
    base_url = f"http://127.0.0.1:{port}/v1"
    provider = {"baseUrl": base_url, "api": "openai-completions", "apiKey": "none", "models": [model]}
    return {"providers": {"kvserve": provider}}


@pytest.fixture(scope="session")
def programs() -> Path:
    """Node and PI, installed by npm where they are missing."""
    home = clients_home()
    for folder, package in PACKAGES.items():
        if (home / folder / "node_modules" / ".bin").is_dir():
            continue
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"npm is not there to install {package}")
        target = home / folder
        target.mkdir(parents=True, exist_ok=True)
        done = run([npm, "install", "--no-audit", "--no-fund", package], seconds=INSTALL_SECONDS, cwd=target)
        assert done.returncode == 0, f"npm could not install {package}:\n{done.stdout}\n{done.stderr}"
    return home


@pytest.fixture
def pi(programs: Path, open_server: ServerProcess, tmp_path: Path) -> Pi:
    """PI, configured for LiteLLM's port."""
    settings = tmp_path / ".pi" / "agent" / "models.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(configuration(open_server.port_of("litellm"))), "utf-8")
    (tmp_path / "project").mkdir()
    return Pi(programs, tmp_path)


def assistant_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last assistant message that PI reports as complete."""
    ends = [event["message"] for event in events if event["type"] == "message_end"]
    return next(message for message in reversed(ends) if message["role"] == "assistant")


def text_of(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def test_pi_holds_a_session_of_two_turns(pi: Pi, open_server: ServerProcess) -> None:
    """Both turns are answered without an error, and the model sees the first turn again in the second."""
    first = assistant_message(pi.say("Tell me about marbles."))
    assert first["stopReason"] in ("stop", "length")
    assert text_of(first)
    assert first["usage"]["output"] > 0
    second = assistant_message(pi.say("And about hail?", "-c"))
    assert second["stopReason"] in ("stop", "length")
    assert text_of(second)
    seen = open_server.prompts()[-1]
    positions = [seen.find(text) for text in ("Tell me about marbles.", text_of(first).strip(), "And about hail?")]
    assert -1 not in positions
    assert positions == sorted(positions)
