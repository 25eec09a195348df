"""`kvserve launch`: a client against the running server, with a configuration in a folder that goes when the client
ends. `client_configs.py` knows the clients; here a folder is written, a program started and waited for.
"""

import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import click

from kvserve.cli.asking import Address, NoAnswer, address_of, server_options
from kvserve.cli.client_configs import CLIENTS, NO_KEY, ClientSetUp, Endpoint
from kvserve.cli.output import json_option, show
from kvserve.config import load_launch

MARK = ".kvserve-launch"
"""Stands in a folder that was kept for a client, and in no other: what is there may be written anew."""

SHOWN_FOLDER = Path("FOLDER")
"""What stands for a temporary folder where nothing is written."""


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
        show({**asdict(found), "command": command}, as_json, lambda: _text(found, command, shown))
        return
    environment = load_launch(()).environment
    program = shutil.which(CLIENTS[client].program, path=environment.get("PATH"))
    if program is None:
        raise click.ClickException(f"{client} is not on the PATH. Install it: {CLIENTS[client].install}")
    with _folder(folder) as kept:
        found = CLIENTS[client].set_up(server, kept)
        _write(found.files, kept)
        ctx.exit(_run([program, *found.arguments, *arguments], {**environment, **found.variables}))


def _endpoint(address: Address) -> Endpoint:
    """The server as clients see it. Raises NoAnswer where none answers, or does not say how long its context is."""
    models = address.get("/v1/models").get("data") or [{}]
    context = models[0].get("max_model_len")
    if not isinstance(context, int):
        raise NoAnswer(f"GET {address.url}/v1/models does not say how long the context is: is it a kvserve?")
    return Endpoint(address.url, address.api_key or NO_KEY, context)


def _text(found: ClientSetUp, command: Sequence[str], folder: Path) -> str:
    """Files, then one line for a shell."""
    files = [f"# {folder / name}\n{text}" for name, text in found.files.items()]
    line = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in found.variables.items()), shlex.join(command)])
    return "\n".join([*files, line])


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
        mark.touch()
    except OSError as error:
        raise click.ClickException(f"{wanted} cannot be used: {error.strerror}") from error
    yield wanted.absolute()


def _write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        file = folder / name
        file.touch(mode=0o600)
        file.write_text(text, "utf-8")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end at this terminal; returns its exit code, 128 and the signal's number where one ended it.
    A Ctrl+C reaches the program by itself; who ends this command ends it."""
    process = subprocess.Popen(list(command), env=dict(environment))

    def hand_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code = _waited(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _waited(process: "subprocess.Popen[bytes]") -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
