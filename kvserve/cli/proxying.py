"""`kvserve proxy`: LiteLLM in front of servers elsewhere. It knows flags; what runs is `app/proxy_alone.py`'s."""

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvserve.cli.output import print_json_line

if TYPE_CHECKING:
    from kvserve.app.proxy_alone import ProxyReady


@click.command()
@click.option("--port", type=int, metavar="N", help="The port that clients ask (PROXY_PORT).")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON on stdout once it answers.")
@click.pass_context
def proxy(ctx: click.Context, port: int | None, as_json: bool) -> None:
    """Stand in front of the servers of BACKENDS until a signal, without a model.

    Each of them runs `kvserve serve --no-proxy` with the same PROXY_SECRET. Any number of proxies may stand before the
    same servers: they agree on who gets which conversation.
    """
    from kvserve.app.proxy_alone import main  # settings and HTTP take a moment to import

    ctx.exit(main([] if port is None else [f"--proxy-port={port}"], _tell if as_json else None))


def _tell(ready: "ProxyReady") -> None:
    """A proxy goes on when nobody reads this any more."""
    with suppress(OSError):
        print_json_line(asdict(ready))
