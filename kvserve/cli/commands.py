"""The table of commands. A command's module is imported when that command is called, so that help takes no second; it
knows their names and nothing of what they do."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from kvserve import __version__
from kvserve.cli.output import printable_in
from kvserve.errors import KvserveError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("starting:serve", "Serve a model until a signal."),
    "demo": ("starting:demo", "Serve a small model that talks, fetched once."),
    "proxy": ("proxying:proxy", "Stand in front of several servers, without a model."),
    "drain": ("draining:drain", "Take a server out of its proxies' choice, and wait until it is idle."),
    "fit": ("fitting:fit", "What a model takes in memory, and the context that fits."),
    "models": ("model_list:models", "What can be served from this machine."),
    "launch": ("launching:launch", "Start a client against the running server."),
    "explain": ("explaining:explain", "Why a request reused what it did."),
    "top": ("top:top", "Watch a running server in the terminal."),
    "keys": ("key_list:keys", "Keys for those who may use port 4000, and whose they are."),
    "service": ("service_files:service", "The file that has launchd or systemd keep a server running."),
    "doctor": ("doctor:doctor", "What would be in a start's way, and a text for an issue."),
}
"""Name -> where it is in this package, and what it does. The order is that of the help."""


class Commands(click.Group):
    """The commands of the table. An error that has its own words is told in them, without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{__package__}.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvserveError as error:
            raise click.ClickException(printable_in(str(error))) from None  # a hub's answer may stand in it


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvserve")
def kvserve() -> None:
    """A local inference server for MLX models that keeps what it has read.

    Every command takes --json. Settings come from the environment and from .env in this folder.
    """
