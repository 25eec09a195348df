"""`kvserve service print`: the file that has launchd or systemd keep a server running. It prints, and installs nothing
itself."""

import plistlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from kvserve.cli.output import json_option, show
from kvserve.errors import StartupError
from kvserve.settings.flags import FlagError, parse_flags

type Keeper = Literal["launchd", "systemd"]

LABEL = "local.kvserve"
STOP_SECONDS = 60
"""A stop writes to disk what RAM has of KV; after that long it is killed, and what was written stays."""

RESTART_SECONDS = 10


@click.group()
def service() -> None:
    """Have launchd (macOS) or systemd (Linux) keep a server running."""


@service.command(name="print", context_settings={"ignore_unknown_options": True})
@click.option("--launchd", "keeper", flag_value="launchd", help="A property list for launchd, also on Linux.")
@click.option("--systemd", "keeper", flag_value="systemd", help="A user unit for systemd, also on macOS.")
@json_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF THE SERVER]")
def print_file(keeper: Keeper | None, flags: Sequence[str], as_json: bool) -> None:
    """Print the file that starts `kvserve serve` with these flags in this folder, whose .env it reads.

    Without --launchd or --systemd it is that of this machine. With --json also where the file goes, and the commands
    that make its folder, switch the service on, have it read a changed file or .env, and switch it off.
    """
    try:
        parse_flags(flags)
    except FlagError as error:
        raise StartupError(str(error)) from None
    kept_by = keeper or ("launchd" if sys.platform == "darwin" else "systemd")
    command, folder = [sys.executable, "-m", "kvserve.cli", "serve", *flags], Path.cwd()
    text = property_list(command, folder) if kept_by == "launchd" else unit(command, folder)
    body = {"keeper": kept_by, "file": FILES[kept_by], "text": text, **COMMANDS_OF[kept_by]}
    show(body, as_json, lambda: text)


FILES: dict[Keeper, str] = {
    "launchd": f"~/Library/LaunchAgents/{LABEL}.plist",
    "systemd": "~/.config/systemd/user/kvserve.service",
}
COMMANDS_OF: dict[Keeper, dict[str, list[str]]] = {
    "launchd": {
        "before": ["mkdir -p ~/Library/LaunchAgents"],
        "on": [f"launchctl bootstrap gui/$(id -u) {FILES['launchd']}"],
        "changed": [
            f"launchctl bootout gui/$(id -u)/{LABEL}",
            f"while launchctl print gui/$(id -u)/{LABEL} >/dev/null 2>&1; do sleep 1; done",
            f"launchctl bootstrap gui/$(id -u) {FILES['launchd']}",
        ],
        "off": [f"launchctl bootout gui/$(id -u)/{LABEL}"],
    },
    "systemd": {
        "before": ["mkdir -p ~/.config/systemd/user"],
        "on": [
            "systemctl --user daemon-reload",
            "systemctl --user enable --now kvserve",
            "loginctl enable-linger",
        ],
        "changed": ["systemctl --user daemon-reload", "systemctl --user restart kvserve"],
        "off": ["systemctl --user disable --now kvserve"],
    },
}
"""What is typed before the file is written, once it is there, once it or `.env` was changed, and to be rid of it.
launchd reads a file only as it loads the service, whose stop takes its time; systemd ends what a user runs when that
user is logged out, unless the user may linger."""


def property_list(command: Sequence[str], folder: Path) -> str:
    """For launchd: begun at login, and again where it did not end by itself."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "StandardOutPath": str(folder / "kvserve.log"),
            "StandardErrorPath": str(folder / "kvserve.log"),
        },
        sort_keys=False,
    ).decode()


def unit(command: Sequence[str], folder: Path) -> str:
    """For systemd, as a user's own; its log is the journal. Raises StartupError for a folder that no unit can name."""
    if "\n" in str(folder):
        raise StartupError("A unit of systemd cannot name a folder with a line break in its name.")
    return f"""[Unit]
Description=kvserve, a local inference server
StartLimitIntervalSec=0

[Service]
ExecStart={" ".join(map(_quoted, command))}
WorkingDirectory={_without_specifiers(str(folder))}
Restart=on-failure
RestartSec={RESTART_SECONDS}
TimeoutStopSec={STOP_SECONDS}

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """A word of a command line of systemd, which knows C's escapes, its own specifiers and variables."""
    if re.fullmatch(r"[\w./=:@,+-]+", word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{_without_specifiers(escaped).replace("$", "$$")}"'


def _without_specifiers(text: str) -> str:
    return text.replace("%", "%%")
