"""Says who listens on a port, as far as this user may know. It asks and reads only; nothing is ended."""

import socket
from pathlib import Path

from kvserve.errors import PortTaken

_LISTEN = "0A"
_PROBE_SECONDS = 0.5


def refuse_taken_port(host: str, port: int) -> None:
    """Raises PortTaken where somebody listens already. Binding alone would not tell: BSD systems let a second socket
    take the loopback half of a wildcard listener's port."""
    if port and somebody_listens(host, port):
        raise port_taken(host, port)


def port_taken(host: str, port: int) -> PortTaken:
    """The error of a start that finds kvserve's own port taken."""
    return PortTaken(
        f"Port {port} on {host} is taken by {describe_holder(port)}. It was left alone: end it yourself, or choose "
        "another port with MLX_PORT or --port."
    )


def somebody_listens(host: str, port: int) -> bool:
    """Whether a connection to (host, port) is accepted. A wildcard host is asked on loopback."""
    target = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((target, port), timeout=_PROBE_SECONDS) as probe:
            # A free port of the ephemeral range can, rarely, connect to itself.
            return bool(probe.getsockname() != probe.getpeername())
    except OSError:
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
