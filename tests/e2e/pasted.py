"""What the README tells a reader to paste for each client, as it stands there. It knows Markdown, and no client.

The end-to-end tests configure clients with this, so each line that a reader pastes is one that was tried; of it they
change the port and the limits of answers alone.
"""

import json
import re
import shlex
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
PORT = "127.0.0.1:4000"
LIMITS = ("maxTokens", "output")
"""How configurations call the tokens of an answer."""


def section(client: str) -> str:
    """The text of a client's section."""
    found = re.search(rf"^### {re.escape(client)}\n(.*?)(?=^##)", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {client!r}"
    return found[1]


def block(client: str, language: str, port: int, number: int = 0) -> str:
    """One of the fenced blocks of a client's section, for a server on this port."""
    text = re.findall(rf"^```{language}\n(.*?)^```", section(client), re.MULTILINE | re.DOTALL)[number]
    assert PORT in text
    return str(text).replace(PORT, f"127.0.0.1:{port}")


def configuration(client: str, port: int, max_tokens: int, number: int = 0) -> dict[str, Any]:
    """A block of JSON, with answers of so many tokens at most."""
    return dict(_limited(json.loads(block(client, "json", port, number)), max_tokens))


def _limited(value: Any, max_tokens: int) -> Any:
    if isinstance(value, list):
        return [_limited(inner, max_tokens) for inner in value]
    if isinstance(value, dict):
        return {name: max_tokens if name in LIMITS else _limited(inner, max_tokens) for name, inner in value.items()}
    return value


def command(client: str) -> tuple[str, ...]:
    """The flags of the command that follows the configuration."""
    found = re.search(r"then `([^`]*)`", section(client))
    assert found, f"README.md does not say how {client} is started"
    return tuple(shlex.split(found[1])[1:])


def variables(client: str, port: int) -> dict[str, str]:
    """The variables in front of a command in a block of shell."""
    return dict(word.split("=", 1) for word in takewhile(_assigns, shlex.split(block(client, "sh", port))))


def arguments(client: str, port: int) -> tuple[str, ...]:
    """What follows the command in a block of shell."""
    _, *rest = dropwhile(_assigns, shlex.split(block(client, "sh", port)))
    return tuple(rest)


def _assigns(word: str) -> bool:
    return re.match(r"[A-Z_]+=", word) is not None
