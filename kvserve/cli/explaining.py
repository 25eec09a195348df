"""`kvserve explain`: why a request reused what it did. The sentences are the server's own."""

from urllib.parse import quote

import click

from kvserve.cli.asking import address_of, server_options
from kvserve.cli.output import Json, json_option, printable_in, show


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@server_options
@json_option
def explain(request_id: str | None, server_url: str | None, api_key: str | None, as_json: bool) -> None:
    """What a request reused, from where, and why not more.

    ID is that of an answer, or the 12 characters that the terminal shows; without one it is the newest request that is
    over. A request is explained to the key that it came with.
    """
    named = f"/{quote(request_id, safe='')}" if request_id else ""
    found = address_of(server_url, api_key).get(f"/v1/cache/explain{named}")
    show(found, as_json, lambda: text_of(printable_in(found)))


def text_of(found: Json) -> str:
    """An explanation line by line."""
    reused, total = found["cached_tokens"], found["num_prompt_tokens"]
    share = f" ({1000 * reused // total / 10:.1f} %)" if total else ""
    lines = [
        found["request_id"],
        f"  reused   {reused:,} of {total:,} prompt tokens{share}, {total - reused:,} computed",
        f"  from     {found['source']} ({found['tier']})",
        f"  cause    {found['cause']}: {found['summary']}",
    ]
    rows = [
        ("mended", found["remedy"]),
        ("place", _place(found["first_difference"])),
        ("was", (found["first_difference"] or {}).get("before")),
        ("is", (found["first_difference"] or {}).get("after")),
        ("rules", ", ".join(found["rules"])),
        ("before", found["before"]),
        ("shared", _unshared(found.get("unshared"))),
        ("drafts", _drafts(found.get("speculation"))),
    ]
    return "\n".join([*lines, *(f"  {name:8} {text}" for name, text in rows if text)])


def _place(difference: Json | None) -> str:
    """Where a request begins to differ from the one before it; texts stand there where the server keeps them."""
    if difference is None:
        return ""
    named = [("tool", difference["tool"]), ("message", difference["message_index"]), ("character", difference["char"])]
    return ", ".join(f"{name} {value}" for name, value in named if value is not None)


def _unshared(unshared: Json | None) -> str:
    """Why the shared cache gave no more, and how much it was seen to have; "" where it gave all, or none is set."""
    if not unshared:
        return ""
    there = f" ({unshared['num_there_tokens']:,} tokens are there)" if unshared["num_there_tokens"] else ""
    return f"no more from the shared cache: {unshared['reason']}{there}"


def _drafts(speculation: Json | None) -> str:
    if not speculation:
        return ""
    right, drafted = speculation["num_accepted_tokens"], speculation["num_drafted_tokens"]
    return f"{right:,} of {drafted:,} drafted tokens right, {speculation['seconds_saved']:.2f} s saved"
