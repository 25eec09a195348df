"""The process from its flags to its exit code: what can be refused at once is refused before anything slow begins.

    flags, settings, ports -> start -> wait for a signal -> stop; a second signal ends it at once

It joins rooms per process, with `server.py`, which it imports only once there is something to start.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from kvserve.app.blas import Preloading
from kvserve.config import Launch, load_launch
from kvserve.errors import KvserveError, StartupError
from kvserve.observe.terminal import BannerFacts, Terminal
from kvserve.proxy.generate import proxy_files
from kvserve.proxy.keys_file import refuse_unusable_keys
from kvserve.proxy.ownership import refuse_foreign_holder
from kvserve.settings.start_checks import refuse_unusable_start

if TYPE_CHECKING:
    from kvserve.app.follower_process import FollowerProcess
    from kvserve.app.server import Server


NOTHING_PRELOADED = Preloading()

REPEAT_SECONDS = 1.0
"""A signal that comes again sooner is the same one: a shell and what it started both pass a Ctrl+C on."""


class _AtOnce(BaseException):
    """A second signal: whoever sent it does not want to wait for the end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(
    argv: Sequence[str],
    preloading: Preloading = NOTHING_PRELOADED,
    on_banner: Callable[[BannerFacts], None] | None = None,
) -> int:
    """Serve until a signal. Returns the exit code: 0 after a signal, 1 when the server could not start. `on_banner` is
    told what the banner says, once the model answers."""
    terminal = Terminal(Console(stderr=True), began_at=preloading.began_at, on_banner=on_banner)
    stopping = threading.Event()
    try:
        launch = _launch(argv, preloading)
        if launch.removes_demo:
            return _remove_demo(launch, terminal)
        app = _app(launch, terminal)
    except StartupError as error:
        terminal.error(str(error))
        return 1
    _on_signals(stopping, app)
    try:
        code = _serve(app, stopping, terminal)
    except _AtOnce as signalled:
        terminal.error(app.abandoned())
        # Threads that write or compute are not waited for; LiteLLM ends by itself once this process is gone.
        os._exit(128 + signalled.number)
    if app.is_computing:
        # A thread in MLX's code would meet what the end of the interpreter takes away, and crash.
        sys.stdout.flush()
        os._exit(code)
    return code


def _launch(argv: Sequence[str], preloading: Preloading) -> Launch:
    """What was asked for, with what the search for a BLAS left to be told. Raises StartupError."""
    launch = load_launch(argv)
    if preloading.refused is not None:
        raise preloading.refused
    return replace(launch, warnings=(*launch.warnings, *preloading.warnings))


def _app(launch: Launch, terminal: Terminal) -> "Server | FollowerProcess":
    """The server, or the process of a rank that follows another one, once ports are seen to be free and folders usable:
    importing it takes seconds. Raises StartupError."""
    settings, follows = launch.settings, launch.ranks is not None and not launch.ranks.leads
    looked_at = {name: value for name, value in settings if not (follows and name == "mlx_port")}
    refuse_unusable_start(
        looked_at, demo=launch.demo, with_proxy=launch.with_proxy, writes_kv=launch.disk_cache != "off"
    )
    refuse_unusable_keys(settings.api_keys_file)
    if launch.with_proxy:
        refuse_foreign_holder(
            settings.proxy_host, settings.proxy_port, proxy_files(settings.state_dir, settings.proxy_port)
        )
    if launch.ranks is not None and not launch.ranks.leads:
        from kvserve.app.follower_process import FollowerProcess

        return FollowerProcess(launch, launch.ranks, terminal)
    from kvserve.app.server import Server

    return Server(launch, terminal)


def _remove_demo(launch: Launch, terminal: Terminal) -> int:
    from kvserve.app.demo_model import remove_demo

    try:
        remove_demo(launch.settings.state_dir, terminal)
    except OSError as error:
        terminal.error(f"The demo's models could not be removed: {error}")
        return 1
    return 0


def _serve(app: "Server | FollowerProcess", stopping: threading.Event, terminal: Terminal) -> int:
    try:
        app.start(stopping)
        stopping.wait()
        if app.ranks_end.reason:
            terminal.error(app.ranks_end.reason)
            return 1
    except KeyboardInterrupt:
        terminal.note("Interrupted while the model was fetched.")
    except KvserveError as error:
        terminal.error(str(error))
        return 1
    finally:
        app.stop(is_told=stopping.is_set())
    return 0


def _on_signals(stopping: threading.Event, app: "Server | FollowerProcess") -> None:
    """The first signal sets the event; a download, which looks at no event, is interrupted. The second one ends all."""
    first_at: float | None = None

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal first_at
        if first_at is not None:
            if time.monotonic() - first_at > REPEAT_SECONDS:
                raise _AtOnce(number)
            return
        first_at = time.monotonic()
        stopping.set()
        if app.is_fetching:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
