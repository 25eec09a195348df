"""`kvserve serve` and `kvserve demo`: what the starters start, with the same flags. It knows flags and reads none of
them: `settings/flags.py` judges."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvserve.app.start import start
from kvserve.cli.output import print_json_line
from kvserve.settings.flags import DISK_FLAGS, FLAGS

if TYPE_CHECKING:
    from kvserve.observe.terminal import BannerFacts

JSON_HELP = "Print one line of JSON on stdout once the model answers: URLs, model, context."
PASSED_ON: Mapping[str, Any] = {"ignore_unknown_options": True}


class ServerCommand(click.Command):
    """A command that hands flags on to the server. Its help names them as the starters' does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        rows = [(f"{flag} {row.get('metavar', '')}".strip(), str(row["help"])) for flag, row in (*FLAGS, *DISK_FLAGS)]
        with formatter.section("Flags of the server, each over its setting"):
            formatter.write_dl(rows)


def takes_flags(function: Callable[..., None]) -> Callable[..., None]:
    """The rest of the command line, unread."""
    return click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF THE SERVER]")(function)


@click.command(cls=ServerCommand, context_settings=dict(PASSED_ON))
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
@takes_flags
@click.pass_context
def serve(ctx: click.Context, as_json: bool, flags: Sequence[str]) -> None:
    """Serve MODEL_PATH until a signal, with LiteLLM in front.

    A hub name that is not on this machine is downloaded first; `kvserve fit` says before that whether it fits.
    """
    _start(ctx, flags, as_json)


@click.command(cls=ServerCommand, context_settings=dict(PASSED_ON))
@click.option("--tiny", is_flag=True, help="One with random weights, whose answers are noise: no download.")
@click.option("--remove", is_flag=True, help="Remove what was fetched and made for it, and end.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
@takes_flags
@click.pass_context
def demo(ctx: click.Context, tiny: bool, remove: bool, as_json: bool, flags: Sequence[str]) -> None:
    """Serve SmolLM2-135M-Instruct (Apache-2.0), a very small model that is often wrong. It is fetched once (93 MB)."""
    if tiny and remove:
        raise click.UsageError("--tiny and --remove exclude each other.")
    own = ["--demo-remove"] if remove else ["--demo", "tiny" if tiny else "smollm2"]
    _start(ctx, [*own, *flags], as_json)


def _start(ctx: click.Context, flags: Sequence[str], as_json: bool) -> None:
    ctx.exit(start(flags, os.environ, _tell if as_json else None))


def _tell(facts: "BannerFacts") -> None:
    """A server serves on when nobody reads this any more."""
    with suppress(OSError):
        print_json_line(asdict(facts))
