"""Trace files, one per session of a principal and day, for the person who asks afterwards what happened. It knows names
and bytes of files, never what an event means; a trace that cannot be written costs a request nothing.

    <root>/2026-11-21/cache-session-<label>.log        the newest events, one line each
    <root>/2026-11-21/cache-session-<label>.1.log      before them, and so on up to `num_older_files`

    turn time="2026-11-21T12:31:07.123+01:00" request_id="a1b2c3" num_prompt_tokens=10432 stream=true

A label is a session's, with `@` and a hash of the principal's name behind it where the principal is somebody. Files are
0600, the day's folder 0700. No file is kept open between two events.

A line is the event's name, then ` key=value` for each field; every value is JSON without spaces around it. Whatever is
not printable is escaped, so that an event is one line and harmless in a terminal. A script reads a line in six of its
own:

    name, _, rest = line.rstrip("\n").partition(" ")
    fields = {}
    while rest:
        key, _, rest = rest.partition("=")
        fields[key], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end + 1 :]
"""

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvserve.core import NOBODY
from kvserve.core.keeping import Scope

NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def format_line(event: str, /, **fields: object) -> str:
    """An event as one printable line without its newline; values that JSON cannot say are written as text. Raises
    ValueError where its name or a key is not lower case letters, digits and underscores."""
    for word in (event, *fields):
        if not NAME.match(word):
            raise ValueError(f"{word!r} cannot name an event or a field")
    return " ".join([event, *(f"{key}={_json(value)}" for key, value in fields.items())])


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return text if text.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    # Only strings hold such characters, and there JSON knows this escape (in pairs beyond the basic plane).
    return json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"


LABEL_CHARACTERS = 24
SHORT_FIELD_BYTES = 1024
SMALLEST_FILE_BYTES = 4096  # what even an empty file costs, so that a limit on bytes limits the number of files too
REFILL_FRACTION = 0.9
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_FILE = re.compile(r"cache-session-(?P<label>[A-Za-z0-9_-]+)(?:@(?P<whose>[0-9a-f]{12}))?(?:\.\d+)?\.log")


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Bytes of one line and of one file, files kept beside the newest one of a session, bytes of a day's folder, days
    whose folders are kept (0: all)."""

    max_line_bytes: int = 4 * 2**20
    max_file_bytes: int = 16 * 2**20
    num_older_files: int = 3
    max_day_bytes: int = 512 * 2**20
    max_days: int = 14


class TraceLog:
    """Appends events to trace files from any thread. Blocks on the disk, so the engine thread must not call it.

    `clock` gives seconds since the epoch; `report` takes one sentence for the operator, once for each kind of failure.
    """

    def __init__(
        self,
        root: Path,
        enabled: bool,
        clock: Callable[[], float],
        report: Callable[[str], None],
        limits: TraceLimits | None = None,
    ) -> None:
        self._root = root
        self._enabled = enabled
        self._clock = clock
        self._report = report
        self._limits = limits or TraceLimits()
        self._lock = threading.Lock()
        self._reported: set[int | None] = set()
        self._day: Path | None = None
        self._num_day_bytes = 0

    def write(self, session_key: str, event: str, principal: str = str(NOBODY), /, **fields: object) -> None:
        """Append one event with its time to the file of today of the principal's session; does nothing where tracing is
        off.

        Changes files only. A failed write loses the event and is reported once per kind. Raises ValueError for a name
        that no line may have, nothing else.
        """
        if not self._enabled:
            return
        moment = datetime.fromtimestamp(self._clock()).astimezone()
        line = self._line(event, {"time": moment.isoformat(timespec="milliseconds"), **fields})
        label = session_label(session_key) + (f"@{whose}" if (whose := _whose(principal)) else "")
        path = self._root / moment.date().isoformat() / f"cache-session-{label}.log"
        try:
            with self._lock:
                try:
                    self._append(path, line)
                except FileNotFoundError:  # somebody tidied the folder away under us
                    self._day = None
                    self._append(path, line)
        except OSError as error:
            self._report_once(path, error)

    def forget(self, scope: Scope) -> int:
        """Delete the files of those who are meant, whichever day and process they are from, also where tracing is off.
        Returns how many there were; one that cannot be deleted is reported."""
        label = session_label(scope.session) if scope.session is not None else None
        whose = _whose(scope.principal) if scope.principal is not None else None
        num_files = 0
        with self._lock:
            self._day = None  # what it holds is counted anew
            for file in self._root.glob("*/cache-session-*.log"):
                match = _FILE.fullmatch(file.name)
                if match is None or label not in (None, match["label"]) or not _is_day(file.parent):
                    continue
                if scope.principal is not None and match["whose"] != whose:
                    continue
                try:
                    file.unlink(missing_ok=True)
                    num_files += 1
                except OSError as error:
                    self._report(f"The trace file {file} cannot be deleted: {error.strerror or error}.")
        return num_files

    def _line(self, event: str, fields: dict[str, object]) -> bytes:
        line = format_line(event, **fields).encode() + b"\n"
        if len(line) <= self._limits.max_line_bytes:
            return line
        short = {key: value for key, value in fields.items() if _json_bytes(value) <= SHORT_FIELD_BYTES}
        dropped = [key for key in fields if key not in short]
        return format_line(event, **short, too_long=dropped).encode() + b"\n"

    def _append(self, path: Path, line: bytes) -> None:
        if path.parent != self._day:
            self._open_day(path.parent)
        if _size(path) + len(line) > self._limits.max_file_bytes:
            self._rotate(path)
        if self._num_day_bytes + len(line) > self._limits.max_day_bytes:
            self._make_room(path)
        self._num_day_bytes += _append_line(path, line)

    def _open_day(self, day: Path) -> None:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self._root, day):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        day.chmod(0o700)
        self._num_day_bytes = sum(_cost(path) for path in day.iterdir())
        self._day = day
        self._drop_old_days()

    def _drop_old_days(self) -> None:
        """Delete the traces of the oldest days. Nothing else in their folders is touched, nor any other folder."""
        if not self._limits.max_days:
            return
        days = sorted(path for path in self._root.iterdir() if _is_day(path))
        others = [day for day in days if day != self._day]
        for day in others[: max(0, len(days) - self._limits.max_days)]:
            for file in day.glob("cache-session-*.log"):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody keeps something else there
                day.rmdir()

    def _rotate(self, path: Path) -> None:
        """Move the files of one session one place up; the oldest one is lost."""
        names = [path, *(path.with_suffix(f".{number}.log") for number in range(1, self._limits.num_older_files + 1))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.rename(older)
        self._num_day_bytes = sum(_cost(file) for file in path.parent.iterdir())

    def _make_room(self, path: Path) -> None:
        """Delete the files of the day that were written longest ago, never the one being written."""
        files = sorted((file for file in path.parent.iterdir() if file != path), key=_modified_seconds)
        num_bytes = sum(_cost(file) for file in files) + _cost(path)
        for file in files:
            if num_bytes <= self._limits.max_day_bytes * REFILL_FRACTION:
                break
            num_bytes -= _cost(file)
            file.unlink(missing_ok=True)
        self._num_day_bytes = num_bytes

    def _report_once(self, path: Path, error: OSError) -> None:
        with self._lock:
            self._day = None  # what the folder holds is no longer known
            is_new = error.errno not in self._reported
            self._reported.add(error.errno)
        if is_new:
            self._report(f"Trace files cannot be written ({path.parent}: {error.strerror or error}); requests go on.")


def session_label(session_key: str) -> str:
    """A file name's part for a session: what is readable of an id, and a hash that keeps two sessions apart.

    A key with white space is no id but text, perhaps somebody's prompt: only its hash is used.
    """
    is_text = any(char.isspace() for char in session_key)
    readable = "" if is_text else re.sub(r"[^A-Za-z0-9_]+", "-", session_key[:256]).strip("-")[:LABEL_CHARACTERS]
    return f"{readable.rstrip('-') or 'unnamed'}-{_hash(session_key)}"


def _whose(principal: str) -> str | None:
    """The mark of a principal in the names of its files; nobody's have none."""
    return None if principal == str(NOBODY) else _hash(principal)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _is_day(path: Path) -> bool:
    """Whether this is the folder of a day, and no link to somebody's."""
    return _DAY.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _json_bytes(value: object) -> int:
    return len(format_line("field", value=value).encode())


def _append_line(path: Path, line: bytes) -> int:
    """Append in one write; returns the bytes by which the file grew. Raises OSError, also for half a line."""
    # O_NOFOLLOW: nobody who can write into the folder redirects us; O_APPEND: threads and processes never overlap.
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(handle)
        num_bytes = status.st_size
        if status.st_mode & 0o077:
            os.fchmod(handle, 0o600)
        if num_bytes and os.pread(handle, 1, num_bytes - 1) != b"\n":
            line = b"\n" + line  # a full disk cut the line before: it must not swallow this one
        num_written = os.write(handle, line)
        if num_written < len(line):
            os.write(handle, line[num_written:])
        return len(line) if num_bytes else max(len(line), SMALLEST_FILE_BYTES)
    finally:
        os.close(handle)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _cost(path: Path) -> int:
    size = _size(path)
    return max(size, SMALLEST_FILE_BYTES)


def _modified_seconds(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
