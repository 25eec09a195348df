"""Says whether an address can be listened on and who listens there, as far as this user may know. It asks, tries and
reads only; nothing is ended.

Standard library only, and every line must run under Python 3.9, for `start_checks.py`.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from kvserve.errors import PortTaken, SettingError, StartupError

_LISTEN = "0A"
_PROBE_SECONDS = 0.5


def refuse_taken_port(host: str, port: int) -> None:
    """Raises PortTaken where somebody listens already. Binding alone would not tell: BSD systems let a second socket
    take the loopback half of a wildcard listener's port."""
    if port and somebody_listens(host, port):
        raise port_taken(host, port)


def refuse_unusable_address(host: str, port: int) -> None:
    """Raises PortTaken or SettingError where the server could not listen there. A name server that gives no answer now
    may give one when the server binds, which judges by it."""
    refuse_taken_port(host, port)
    error = error_of_binding(host, port)
    if error is not None and not (isinstance(error, socket.gaierror) and error.errno != socket.EAI_NONAME):
        raise unusable_address(host, port, error)


def error_of_binding(host: str, port: int) -> OSError | TypeError | None:
    """Why a socket cannot be bound, None where it can; it is let go at once."""
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: a text that can be no name
        return error
    return None


def family_of(host: str) -> socket.AddressFamily:
    """That of addresses that are written so."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def unusable_address(host: str, port: int, error: OSError | TypeError) -> StartupError:
    """The error of a start that cannot listen: the setting that is at fault, and why."""
    number = None if isinstance(error, (socket.gaierror, TypeError)) else error.errno
    if number == errno.EADDRINUSE:
        return port_taken(host, port)
    key, value = ("MLX_PORT", port) if number == errno.EACCES else ("MLX_HOST", host)
    reason = error.strerror if isinstance(error, OSError) else error
    return SettingError(key, value, f"an address that can be listened on ({reason})")


def port_taken(host: str, port: int) -> PortTaken:
    """The error of a start that finds kvserve's own port taken."""
    return PortTaken(
        f"Port {port} on {host} is taken by {describe_holder(port)}. It was left alone: end it yourself, or choose "
        "another port with MLX_PORT or --port."
    )


def proxy_port_taken(port: int) -> PortTaken:
    """The error of a start that finds LiteLLM's port taken."""
    return PortTaken(
        f"Port {port} for the LiteLLM proxy is taken by {describe_holder(port)}. It was left alone. Stop it, choose "
        "another PROXY_PORT, or start with --no-proxy."
    )


def local_host(host: str) -> str:
    """Where one who listens on this address is asked from this machine: a wildcard is asked on loopback."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def somebody_listens(host: str, port: int) -> bool:
    """Whether a connection to (host, port) is accepted."""
    try:
        with socket.create_connection((local_host(host), port), timeout=_PROBE_SECONDS) as probe:
            # A free port of the ephemeral range can, rarely, connect to itself.
            return bool(probe.getsockname() != probe.getpeername())
    except (OSError, ValueError):  # ValueError: a text that can be no name
        return False


def describe_holder(port: int, proc: Path = Path("/proc")) -> str:
    """`process 123 (python server.py)` where /proc tells it, else how to find out."""
    inodes = _listening_inodes(port, proc)
    for folder in proc.glob("[0-9]*") if inodes else ():
        if _holds_any(folder, inodes):
            return f"process {folder.name} ({_command_line(folder)})"
    return f"another process (`lsof -nP -iTCP:{port} -sTCP:LISTEN` may tell which)"


def _listening_inodes(port: int, proc: Path) -> frozenset[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return frozenset(found)


def _holds_any(folder: Path, inodes: frozenset[str]) -> bool:
    sockets = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(str(link.readlink()) in sockets for link in (folder / "fd").iterdir())
    except OSError:  # it ended meanwhile, or belongs to another user
        return False


def _command_line(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown command"
    return b" ".join(words).decode("utf-8", "replace").strip()[:200]
