"""Holders of keys, a file that names them, and a stand-in for LiteLLM that passes on what the guard hands to it."""

import json
from collections.abc import Mapping
from pathlib import Path

from kvserve.proxy.asgi import App, HeaderList, Receive, Scope, Send, at_path, replay
from kvserve.proxy.envelope import CURRENT_EXCHANGE, pass_through_endpoint
from kvserve.proxy.keys_file import key_sha256

API_KEY = "the-operators-own"
ANNA, ANNAS_SECOND, OTTO, BOSS = "annas-key", "annas-second-key", "ottos-key", "bosss-key"
TABLES: Mapping[str, Mapping[str, object]] = {
    "anna": {"key_sha256": [key_sha256(ANNA), key_sha256(ANNAS_SECOND)]},
    "otto": {"key_sha256": [key_sha256(OTTO)]},
    "boss": {"key_sha256": [key_sha256(BOSS)], "operator": True},
}
"""Two keys of one principal, another one, and an operator."""


def keys_text(tables: Mapping[str, Mapping[str, object]] = TABLES) -> str:
    """The tables in TOML, whose values are written as JSON's are."""
    lines = [
        line
        for name, table in tables.items()
        for line in (f"[{_quoted(name)}]", *(f"{field} = {_quoted(value)}" for field, value in table.items()))
    ]
    return "\n".join(lines)


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML knows no halves of characters


def write_keys(path: Path, tables: Mapping[str, Mapping[str, object]] = TABLES) -> Path:
    path.write_text(keys_text(tables), "utf-8")
    return path


def limited(**limits: object) -> Mapping[str, Mapping[str, object]]:
    """The tables with these fields for anna."""
    return {**TABLES, "anna": {**TABLES["anna"], **limits}}


class Relay:
    """Sends on what LiteLLM would: the client's own body, to the path that it asked for."""

    def __init__(self, backend: App) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = CURRENT_EXCHANGE.get()
        place = str(pass_through_endpoint("")["path"])
        raw = json.dumps(exchange.body).encode() if exchange is not None else _raw_body(scope)
        headers: HeaderList = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        inner = {**at_path(scope, scope["path"].removeprefix(place)), "headers": headers}
        await self._backend(inner, replay(raw, receive), send)


def _raw_body(scope: Scope) -> bytes:
    bodies = [value for value in scope.get("state", {}).values() if isinstance(value, bytes)]
    return bodies[0] if bodies else b""
