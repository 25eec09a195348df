"""`kvserve launch`: a client against the running server, with a configuration in a folder that goes when the client
ends. `client_configs.py` knows the clients; here a folder is written, a program started and waited for.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import click

from kvserve.cli.asking import Address, NoAnswer, address_of, server_options
from kvserve.cli.output import json_option, show
from kvserve.config import load_launch
from kvserve.protocols.client_configs import CLIENTS, NO_KEY, SHOWN_FOLDER, Endpoint, shell_text

MARK = ".kvserve-launch"
"""Stands in a folder that was kept for a client, and in no other: what is there may be written anew."""

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""A terminal sends them to the client as well."""

OTHER_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.option("--print", "only_prints", is_flag=True, help="Print the configuration and the command; start nothing.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep configuration, and what the client keeps beside it, here instead of in a temporary folder.",
)
@server_options
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF THE CLIENT]")
@click.pass_context
def launch(
    ctx: click.Context,
    client: str,
    only_prints: bool,
    folder: Path | None,
    server_url: str | None,
    api_key: str | None,
    as_json: bool,
    arguments: Sequence[str],
) -> None:
    """Start a client against the running server. Your own files of it are never changed.

    What the client takes follows its name, behind -- where it is called as a flag of this command. With --json it is
    printed, and nothing is started.
    """
    server = _endpoint(address_of(server_url, api_key))
    if only_prints or as_json:
        shown = folder.absolute() if folder is not None else SHOWN_FOLDER
        found = CLIENTS[client].set_up(server, shown)
        command = [found.program, *found.arguments, *arguments]
        show({**asdict(found), "command": command}, as_json, lambda: shell_text(found, shown, arguments))
        return
    environment = load_launch(("--no-proxy",)).environment
    program = shutil.which(CLIENTS[client].program, path=environment.get("PATH"))
    if program is None:
        raise click.ClickException(f"{client} is not on the PATH. Install it: {CLIENTS[client].install}")
    with _Client().handling_signals() as started, _folder(folder) as kept:
        found = CLIENTS[client].set_up(server, kept)
        _write(found.files, kept)
        inherited = {name: value for name, value in environment.items() if name not in found.removed}
        code = started.run([program, *found.arguments, *arguments], {**inherited, **found.variables})
    ctx.exit(code)


def _endpoint(address: Address) -> Endpoint:
    """The server as clients see it. Raises NoAnswer where none answers, or does not say how long its context is."""
    models = address.get("/v1/models").get("data") or [{}]
    context = models[0].get("max_model_len")
    if not isinstance(context, int):
        raise NoAnswer(f"GET {address.url}/v1/models does not say how long the context is: is it a kvserve?")
    return Endpoint(address.url, address.api_key or NO_KEY, context)


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """The folder that was asked for, or one that goes at the end. Only its owner can read it: a key may stand there."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="kvserve-launch-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    mark = wanted / MARK
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not mark.exists() and any(wanted.iterdir()):
            raise click.ClickException(f"{wanted} holds files that are not of kvserve: name an empty folder.")
        wanted.chmod(0o700)  # it may have been there, for everybody to read
        mark.touch()
    except OSError as error:
        raise click.ClickException(f"{wanted} cannot be used: {error.strerror}") from error
    yield wanted.absolute()


def _write(files: Mapping[str, str], folder: Path) -> None:
    """Nobody else can read them, whoever made a file of that name before."""
    for name, text in files.items():
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate()
            file.write(text)


@dataclass(slots=True)
class _Client:
    """Owns the client's process and what signals do meanwhile. Before it runs a signal ends this command, so that what
    was written goes; while it runs they end it and not this command, since a folder stays as long as its client; when
    it has ended they do nothing more."""

    process: "subprocess.Popen[bytes] | None" = None
    is_starting: bool = False
    waiting: list[int] = field(default_factory=list)

    @contextmanager
    def handling_signals(self) -> Iterator["_Client"]:
        """Whoever is not to be hung up on (`nohup`) is not."""
        found = {number: signal.getsignal(number) for number in (*TERMINAL_SIGNALS, *OTHER_SIGNALS)}
        before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
        try:
            for number in before:
                signal.signal(number, self._handle)
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a program to its end at this terminal; returns its exit code, 128 and the signal's number where one ended
        it."""
        self.is_starting = True
        self.process = subprocess.Popen(list(command), env=dict(environment))
        self.is_starting = False
        for number in self.waiting:
            self.process.send_signal(number)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.process is None and not self.is_starting:
            raise SystemExit(128 + number)
        if number in TERMINAL_SIGNALS:
            return
        if self.process is None:
            self.waiting.append(number)
        else:
            self.process.send_signal(number)
