"""How commands print: JSON for programs, a table or lines for a person. It knows no command."""

import json
import sys
from collections.abc import Callable
from typing import Any

import click

type Json = dict[str, Any]

PIPE_WIDTH = 200
"""Columns of a table that nobody reads at a terminal."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program to read.")


def print_json(value: object) -> None:
    """One value, indented; what is no JSON (a path) as its text."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_json_line(value: object) -> None:
    """One value on one line, for those who read a stream."""
    click.echo(json.dumps(value, default=str))


def show(value: object, as_json: bool, render: Callable[[], object]) -> None:
    """The value as JSON, or what `render` makes of it for a person: a text as it stands, or something for rich."""
    if as_json:
        print_json(value)
        return
    rendered = render()
    if isinstance(rendered, str):  # may be pasted or written into a file: no line of it is broken at any width
        click.echo(rendered)
        return
    from rich.console import Console  # takes a tenth of a second, which `--json` and help need not wait for

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(markup=False, highlight=False, emoji=False, width=width).print(rendered)


def gib(num_bytes: float) -> str:
    """Bytes of memory for a person."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def printable_in(value: Any) -> Any:
    """The same with every text in it made printable: what came over the network may hold what a terminal acts on."""
    from kvserve.observe.terminal import printable

    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_in(each) for each in value]
    if isinstance(value, dict):
        return {printable_in(key): printable_in(each) for key, each in value.items()}
    return value
