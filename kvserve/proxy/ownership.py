"""Proves that a process is a proxy that we started, and ends a process only with that proof. It reads the process
tables (/proc on Linux, `ps` elsewhere); who else listens on the port is `settings/ports.py`'s."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvserve.errors import PortTaken, StartupError
from kvserve.proxy.generate import ProxyFiles, ProxySettings, write_private
from kvserve.settings.ports import error_of_binding, proxy_port_taken, somebody_listens

_POLL_SECONDS = 0.05
_TERMINATE_SECONDS = 3.0
_KILL_SECONDS = 2.0
_RELEASE_SECONDS = 2.0
_TOOL_SECONDS = 5.0
# Fixed locale: start times of two runs are compared as text.
_TOOL_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
_HAS_PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A running process. `started` distinguishes it from a later one with the same pid; `command` is its command
    line."""

    pid: int
    started: str
    command: str


@dataclass(frozen=True, slots=True)
class PidFile:
    """The record of a proxy that we started, and of its server."""

    proxy: ProcessIdentity
    parent: ProcessIdentity

    @classmethod
    def read(cls, path: Path) -> "PidFile | None":
        """The file's content, or None if it is missing or malformed."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            proxy, parent = (
                ProcessIdentity(int(value[key]["pid"]), str(value[key]["started"]), str(value[key]["command"]))
                for key in ("proxy", "parent")
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(proxy, parent)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        write_private(path, json.dumps(asdict(self), indent=1))


def record_child(pid: int, files: ProxyFiles) -> None:
    """Writes the pid file for a proxy that this process has just started."""
    proxy, parent = identify(pid), identify(os.getpid())
    if proxy is not None and parent is not None:
        PidFile(proxy, parent).write(files.pid)


def claim_port(settings: ProxySettings) -> int | None:
    """Ends a stale proxy of ours and makes sure that the port is free; returns the ended proxy's pid, if there was one.

    Raises PortTaken for any other process and for a proxy whose server still runs; both keep running. Raises
    StartupError if a stale proxy cannot be ended.
    """
    stale = find_stale_proxy(settings.files)
    if stale is not None:
        end_process(stale)
    settings.files.pid.unlink(missing_ok=True)
    # A process is reported as ended shortly before its last thread closes the socket.
    deadline = time.monotonic() + (_RELEASE_SECONDS if stale is not None else 0.0)
    while not is_port_free(settings.host, settings.port):
        if time.monotonic() >= deadline:
            raise proxy_port_taken(settings.port)
        time.sleep(_POLL_SECONDS)
    return stale.pid if stale is not None else None


def refuse_foreign_holder(host: str, port: int, files: ProxyFiles) -> None:
    """Raises PortTaken as `claim_port` would, long before a proxy is started; ends no process."""
    if find_stale_proxy(files) is None and not is_port_free(host, port):
        raise proxy_port_taken(port)


def find_stale_proxy(files: ProxyFiles) -> ProcessIdentity | None:
    """The pid file's process, if it is alive, provably ours, and its server is gone.

    Proof: the recorded start time, and our configuration file on its command line. Raises PortTaken if its server is
    alive.
    """
    written = PidFile.read(files.pid)
    if written is None:
        return None
    running = identify(written.proxy.pid)
    if running is None or running.started != written.proxy.started or str(files.config) not in running.command:
        return None
    parent = identify(written.parent.pid)
    if parent is not None and parent.started == written.parent.started:
        raise PortTaken(
            f"Another kvserve (pid {parent.pid}) already runs a proxy with the same port and state folder. Stop it, or "
            "choose other ports (MLX_PORT, PROXY_PORT)."
        )
    return running


def end_process(identity: ProcessIdentity) -> None:
    """Sends SIGTERM, then SIGKILL, to exactly this process. Raises StartupError if it survives both."""
    for number, patience_seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        if identify(identity.pid) != identity:
            return
        try:
            os.kill(identity.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            if identify(identity.pid) != identity:
                return
            time.sleep(_POLL_SECONDS)
    raise StartupError(f"The proxy of a former run (pid {identity.pid}) cannot be ended.")


def is_port_free(host: str, port: int) -> bool:
    """Whether no process listens there. Binding alone does not tell: macOS binds beside a listener on all addresses."""
    return error_of_binding(host, port) is None and not somebody_listens(host, port)


def identify(pid: int) -> ProcessIdentity | None:
    """The running process with this pid; None if it does not exist, has ended (a zombie), or cannot be read."""
    return _identify_by_proc(pid) if _HAS_PROC else _identify_by_ps(pid)


def _identify_by_proc(pid: int) -> ProcessIdentity | None:
    folder = Path("/proc") / str(pid)
    try:
        status = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        raw_command = (folder / "cmdline").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may itself contain spaces and parentheses.
    fields = status.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    command = raw_command.replace(b"\0", b" ").decode("utf-8", errors="replace").strip()
    return ProcessIdentity(pid, fields[19], command)


def _identify_by_ps(pid: int) -> ProcessIdentity | None:
    line = _run("ps", "-ww", "-o", "stat=,lstart=,command=", "-p", str(pid)).strip()
    match = re.match(r"(\S+)\s+(\S+\s+\S+\s+\S+\s+\S+\s+\S+)\s+(.*)", line, re.DOTALL)
    if match is None or match[1].startswith("Z"):
        return None
    return ProcessIdentity(pid, " ".join(match[2].split()), match[3])


def _run(*command: str) -> str:
    """The command's output, empty if it fails or is missing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False, env=_TOOL_ENVIRONMENT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
