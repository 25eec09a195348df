"""Tracks open and silent connections: bounds the threads, and closes a silent connection at the limit.

It shuts sockets; it reads and writes nothing.
"""

import contextlib
import socket
import threading
import time
from typing import Literal

_ROOM_WAIT_SECONDS = 1.0


type Phase = Literal["silent", "receiving", "serving"]


class OpenConnection:
    """One connection and its thread. The table owns it, and its lock guards it."""

    __slots__ = ("connection", "is_shut", "phase", "since")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.phase: Phase = "silent"
        self.since = time.monotonic()
        self.is_shut = False


class ConnectionTable:
    """At most `max_connections` open connections, each in a phase: silent (it owes us a whole request head),
    receiving (the body) or serving (we owe the answer).

    `is_draining`: no further request is wanted on any connection; `is_closing`: running answers are to end too.
    Safe from any thread.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._open: set[OpenConnection] = set()
        self.is_draining = False
        self.is_closing = False
        self.num_evicted = 0

    def __len__(self) -> int:
        with self._changed:
            return len(self._open)

    def admit(self, connection: socket.socket) -> OpenConnection | None:
        """Enter a new connection; at the limit the oldest silent one is shut to make room. None: there is no room.

        Waits a moment for the thread of the one that was shut, so that the limit also holds for threads.
        """
        with self._changed:
            if self.is_draining:
                return None
            if not self._has_room() and not self._make_room():
                return None
            entry = OpenConnection(connection)
            self._open.add(entry)
            return entry

    def enter_phase(self, entry: OpenConnection, phase: Phase) -> bool:
        """Move the connection to `phase`. False: the connection was given up and is to be closed."""
        with self._changed:
            entry.phase, entry.since = phase, time.monotonic()
            is_unwanted = (phase == "silent" and self.is_draining) or (phase == "receiving" and self.is_closing)
            return not (entry.is_shut or is_unwanted)

    def leave(self, entry: OpenConnection) -> None:
        """Remove a connection whose thread has finished."""
        with self._changed:
            self._open.discard(entry)
            self._changed.notify_all()

    def drain(self) -> None:
        """Stop admitting connections, and shut the silent ones."""
        with self._changed:
            self.is_draining = True
            self._shut_those_in("silent")

    def begin_closing(self) -> None:
        """Set `is_closing`, which ends running answers; half-sent requests are shut."""
        with self._changed:
            self.is_draining = self.is_closing = True
            self._shut_those_in("silent", "receiving")

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Wait for every connection to leave. Returns whether they did."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_seconds)

    def shut_all(self) -> None:
        """Shut every socket: their threads fail at the next read, write or look at the client."""
        with self._changed:
            self._shut_those_in("silent", "receiving", "serving")

    def _has_room(self) -> bool:
        return len(self._open) < self._max_connections

    def _make_room(self) -> bool:
        silent = [entry for entry in self._open if entry.phase == "silent" and not entry.is_shut]
        if not silent:
            return False
        _shut(min(silent, key=lambda entry: entry.since))
        self.num_evicted += 1
        return self._changed.wait_for(self._has_room, _ROOM_WAIT_SECONDS)

    def _shut_those_in(self, *phases: Phase) -> None:
        for entry in self._open:
            if entry.phase in phases:
                _shut(entry)


def _shut(entry: OpenConnection) -> None:
    entry.is_shut = True
    with contextlib.suppress(OSError):  # the peer may have closed it already
        entry.connection.shutdown(socket.SHUT_RDWR)
