"""What docs/clients.md and the README tell a reader to paste, as it stands there. It knows Markdown and no client.

The end-to-end tests configure clients with this, so each line that a reader pastes is one that was tried; of it they
change the port and the limits of answers alone.
"""

import json
import re
import shlex
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "clients.md"
PORT = "127.0.0.1:4000"
OWN_PORT = "127.0.0.1:8080"
LIMITS = ("maxTokens", "output")
"""How configurations call the tokens of an answer."""


def section(client: str) -> str:
    """The text of a client's section of the page of clients."""
    found = re.findall(rf"^### {re.escape(client)}\n(.*?)(?=^##)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} sections {client!r}"
    return str(found[0])


def block(client: str, language: str, port: int, number: int = 0) -> str:
    """One of the fenced blocks of a client's section, for a server on this port."""
    text = re.findall(rf"^```{language}\n(.*?)^```", section(client), re.MULTILINE | re.DOTALL)[number]
    assert PORT in text
    return str(text).replace(PORT, f"127.0.0.1:{port}")


def readme_calls(proxy_port: int, port: int) -> list[list[str]]:
    """The README's blocks of shell that call a running server with curl, as arguments, for a server on these ports."""
    blocks = re.findall(r"^```sh\n(curl .*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    moved = (text.replace(PORT, f"127.0.0.1:{proxy_port}").replace(OWN_PORT, f"127.0.0.1:{port}") for text in blocks)
    return [shlex.split(text.replace("\\\n", " ")) for text in moved]


def configuration(client: str, port: int, max_tokens: int, number: int = 0) -> dict[str, Any]:
    """A block of JSON, with answers of so many tokens at most."""
    return dict(_limited(json.loads(block(client, "json", port, number)), max_tokens))


def _limited(value: Any, max_tokens: int) -> Any:
    if isinstance(value, list):
        return [_limited(inner, max_tokens) for inner in value]
    if isinstance(value, dict):
        return {name: max_tokens if name in LIMITS else _limited(inner, max_tokens) for name, inner in value.items()}
    return value


def line(client: str, name: str) -> dict[str, Any]:
    """A line of JSON in the text of a client's section, by its name."""
    found = re.search(rf'`("{name}": [^`]*)`', section(client))
    assert found, f"nothing says what {name} of {client} is"
    return dict(json.loads(f"{{{found[1]}}}"))


def command(client: str) -> tuple[str, ...]:
    """The flags of the command that follows the configuration."""
    found = re.search(r"then `([^`]*)`", section(client))
    assert found, f"nothing says how {client} is started"
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
