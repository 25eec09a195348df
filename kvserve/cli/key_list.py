"""`kvserve keys`: makes a key, and lists the holders of API_KEYS_FILE. It writes no file and shows no key but a new
one."""

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvserve.cli.output import json_option, show
from kvserve.config import load_launch
from kvserve.core import Principal
from kvserve.errors import StartupError
from kvserve.proxy.keys_file import MAX_PER_MINUTE, MAX_ROWS, KeyHolder, key_sha256, table_in

if TYPE_CHECKING:
    from rich.table import Table

_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@click.group()
def keys() -> None:
    """Keys for those who may use port 4000 (API_KEYS_FILE), and whose they are."""


@keys.command(name="new")
@click.argument("name")
@click.option("--requests-per-minute", metavar="N", type=click.IntRange(1, MAX_PER_MINUTE), help="So many may begin.")
@click.option(
    "--rows-at-once", metavar="N", type=click.IntRange(1, MAX_ROWS), help="So many may run or wait at a time."
)
@click.option("--operator", is_flag=True, help="May empty the cache, load models, see metrics and the dashboard.")
@json_option
def new_key(
    name: str, requests_per_minute: int | None, rows_at_once: int | None, operator: bool, as_json: bool
) -> None:
    """Print a new key, once, and the table for API_KEYS_FILE that has its hash.

    The key goes to NAME and is kept nowhere here. Of a holder that has a table already, put the hash beside the other
    one in its key_sha256: both keys count until you take one out.
    """
    if not _NAME.fullmatch(name):
        raise click.BadParameter("up to 64 letters, digits, _ and -", param_hint="NAME")
    key = f"sk-kvserve-{secrets.token_urlsafe(_KEY_BYTES)}"
    holder = KeyHolder(name, name, requests_per_minute, rows_at_once, operator)
    table = table_of(holder, key_sha256(key))
    body = {"name": name, "key": key, "key_sha256": key_sha256(key), "table": table}
    show(body, as_json, lambda: f"# The key, shown once; it goes to {name}:\n{key}\n\n# For API_KEYS_FILE:\n{table}")


def table_of(holder: KeyHolder, digest: str) -> str:
    """The holder's table in TOML."""
    lines = [f"[{holder.name}]", f'key_sha256 = ["{digest}"]']
    if holder.requests_per_minute is not None:
        lines.append(f"requests_per_minute = {holder.requests_per_minute}")
    if holder.rows_at_once is not None:
        lines.append(f"rows_at_once = {holder.rows_at_once}")
    if holder.is_operator:
        lines.append("operator = true")
    return "\n".join(lines)


@keys.command(name="list")
@click.option("--file", type=click.Path(path_type=Path), help="Another file than API_KEYS_FILE.")
@json_option
def list_keys(file: Path | None, as_json: bool) -> None:
    """Who has keys, and which limits: as it stands in the file now, with what is wrong with it.

    A principal's digest names what is kept of it: `DELETE /v1/cache?principal=DIGEST.-` forgets that, of requests
    without a user.
    """
    path = file or load_launch(("--no-proxy",)).settings.api_keys_file
    if path is None:
        raise StartupError("API_KEYS_FILE is not set; `kvserve keys new NAME` prints what goes into such a file.")
    try:
        table = table_in(path)
    except ValueError as error:
        raise StartupError(f"{path}: {error}.") from None
    found = [
        {
            "name": holder.name,
            "principal": holder.principal,
            "principal_digest": str(Principal(holder.digest)),
            "num_keys": table.num_keys(holder),
            "requests_per_minute": holder.requests_per_minute,
            "rows_at_once": holder.rows_at_once,
            "is_operator": holder.is_operator,
        }
        for holder in table.holders
    ]
    show(found, as_json, lambda: _shown(found))


def _shown(found: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("name", "principal", "digest", "keys", "per minute", "at once", "", box=None, pad_edge=False)
    for each in found:
        limits = [str(each[name] or "-") for name in ("requests_per_minute", "rows_at_once")]
        named = [each["name"], each["principal"], each["principal_digest"], str(each["num_keys"])]
        table.add_row(*named, *limits, "operator" if each["is_operator"] else "")
    return table
