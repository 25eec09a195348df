"""Holders of keys, and a file that names them."""

import json
from collections.abc import Mapping
from pathlib import Path

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
