"""Which addresses a child process connects to and which names it looks up, told by Python's own audit events.

The child imports a `sitecustomize` from its PYTHONPATH that writes each of them down; nothing else of it changes.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SITECUSTOMIZE = """\
import os, sys

def note(event, arguments):
    if event == "socket.connect":
        reached = arguments[1]
    elif event == "socket.getaddrinfo":
        reached = arguments
    else:
        return
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{reached[0] if isinstance(reached, tuple) else 'a file'}}\\n")

sys.addaudithook(note)
"""


class Reached:
    """What the processes that get `watching` as their environment have connected to so far."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "reached.txt"
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(log=str(self._log)), "utf-8")
        self._folder = folder

    def watching(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the watch on PYTHONPATH."""
        return {**base, "PYTHONPATH": os.pathsep.join([str(self._folder), *filter(None, [base.get("PYTHONPATH")])])}

    def hosts(self, pid: int) -> set[str]:
        """Names and addresses that this process reached out to."""
        lines = self._log.read_text("utf-8").splitlines() if self._log.exists() else []
        return {host for number, host in (line.split(" ", 1) for line in lines) if int(number) == pid}
