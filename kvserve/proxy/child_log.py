"""The child's output: a bounded file for people and the last lines for messages. It knows no processes."""

from collections import deque
from pathlib import Path

_MAX_TAIL_LINES = 20
_MAX_LINE_BYTES = 2000


class ChildLog:
    """Appends to `path`; at `max_bytes` the file becomes `<name>.1`, replacing the former one, and begins anew.

    A disk that takes no more costs the file, never the watcher; the tail goes on.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = path.stat().st_size if path.exists() else 0
        self._tail: deque[bytes] = deque(maxlen=_MAX_TAIL_LINES)
        self._unfinished = b""

    def write(self, chunk: bytes) -> None:
        """Adds output as it came, cut anywhere."""
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        self._tail.extend(line[:_MAX_LINE_BYTES] for line in lines if line.strip())
        self._unfinished = self._unfinished[:_MAX_LINE_BYTES]
        try:
            self._append(chunk)
        except OSError as error:
            self._tail.append(f"{self._path} cannot be written: {error}".encode())

    def tail(self, num_lines: int) -> list[str]:
        """The last lines that are not blank, oldest first."""
        lines = [*self._tail, self._unfinished] if self._unfinished.strip() else list(self._tail)
        return [line.decode("utf-8", errors="replace").strip() for line in lines[-num_lines:]]

    def forget(self) -> None:
        """Empties the tail: the next child's last words are its own."""
        self._tail.clear()
        self._unfinished = b""

    def _append(self, chunk: bytes) -> None:
        if self._num_bytes and self._num_bytes + len(chunk) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._num_bytes = 0
        with self._path.open("ab") as file:
            self._path.chmod(0o600)
            file.write(chunk)
        self._num_bytes += len(chunk)
