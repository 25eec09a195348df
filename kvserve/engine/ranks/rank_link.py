"""The wire between rank 0 and one other: frames of JSON over TCP, signs of life, and what is taken for the end of it.
It knows no decision and no array.
"""

import json
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvserve.engine.ranks.place import RanksLost

ALIVE_SECONDS = 2.0
SILENT_SECONDS = 30.0
"""A rank that says nothing for so long is gone: its reading thread says something every few seconds, whatever its
engine does."""

LOOK_SECONDS = 1.0
LONGEST_PASS_SECONDS = 60.0
PASS_FACTOR = 20.0
"""A pass that takes longer than that, and so many times the longest so far, waits for a rank that is not in it."""

_LENGTH = struct.Struct(">I")

type Frame = tuple[str, Any]


class FrameReader:
    """Frames out of bytes, however these are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole with these bytes."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            name, value = json.loads(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield name, value


def frame_bytes(name: str, value: Any) -> bytes:
    """A frame as it goes over the wire."""
    data = json.dumps([name, value], separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


@dataclass(slots=True)
class Progress:
    """Whether the engine is in a pass for too long. Its own thread notes, any may look."""

    began_at: float | None = None
    longest_seconds: float = 0.0

    def begin(self) -> None:
        """A pass begins."""
        self.began_at = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        if self.began_at is not None:
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - self.began_at)
        self.began_at = None

    def trouble(self) -> str:
        """What is wrong with it; empty where nothing is."""
        bound = max(LONGEST_PASS_SECONDS, PASS_FACTOR * self.longest_seconds)
        if (began_at := self.began_at) is None or time.monotonic() - began_at < bound:
            return ""
        return f"a pass has not ended for {bound:.0f} seconds"


@dataclass(slots=True)
class Ears:
    """Who hears what comes without being asked for, on the link's own thread: `lost` why the link ended, once; `named`
    the fingerprint of what another rank has loaded. `tells` is what this rank says of itself with its signs of life."""

    lost: Callable[[str], None] = lambda _: None
    named: Callable[[int, str], None] = lambda _rank, _fingerprint: None
    tells: Callable[[], Mapping[str, int]] = dict


@dataclass(slots=True)
class _LinkState:
    reason: str = ""
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class RankLink:
    """One connection. `send` and `next` belong to the engine thread, `lose` and `close` to any."""

    def __init__(self, connection: socket.socket, peer: int, progress: Progress, ears: Ears) -> None:
        """`peer` is the rank at the other end."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENT_SECONDS)
        self.peer = peer
        self.told: Mapping[str, int] = {}
        """What the other rank has said of itself last. From any thread."""
        self._connection = connection
        self._progress = progress
        self._ears = ears
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._state = _LinkState()
        self._thread = threading.Thread(target=self._run, name=f"kvserve-rank-{peer}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, name: str, value: Any = None) -> None:
        """Send a frame. Raises RanksLost."""
        self._raise_if_lost()
        try:
            self._write(frame_bytes(name, value))
        except OSError as error:
            self.lose(f"rank {self.peer} cannot be told anything ({error})")
            self._raise_if_lost()

    def next(self, timeout_seconds: float | None = None) -> Frame | None:
        """The next frame; None where none came in time. Raises RanksLost once there is none any more."""
        try:
            frame = self._frames.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if frame is None:
            self._frames.put(None)
            self._raise_if_lost()
            raise RanksLost(f"rank {self.peer} has ended the connection")
        return frame

    def expect(self, name: str) -> Any:
        """The value of the next frame, which must have this name. Raises RanksLost."""
        frame = self.next()
        if frame is None or frame[0] != name:
            raise RanksLost(f"rank {self.peer} is out of step: {name} was awaited, {frame and frame[0]} came")
        return frame[1]

    def lose(self, reason: str) -> None:
        """Nothing comes or goes from now on. The first reason counts."""
        with self._state.lock:
            if self._state.reason or self._state.is_closed:
                return
            self._state.reason = reason
        self._frames.put(None)
        self._ears.lost(reason)

    def close(self) -> None:
        """The end that was agreed on: what comes behind it is no loss."""
        with self._state.lock:
            self._state.is_closed = True
        self._frames.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _raise_if_lost(self) -> None:
        if self._state.reason:
            raise RanksLost(self._state.reason)

    def _write(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)

    def _run(self) -> None:
        reader, heard_at, sent_at = FrameReader(), time.monotonic(), 0.0
        while not (self._state.is_closed or self._state.reason):
            try:
                ready, _, _ = select.select([self._connection], [], [], LOOK_SECONDS)
                data = self._connection.recv(1 << 16) if ready else None
                if (now := time.monotonic()) - sent_at >= ALIVE_SECONDS:
                    self._write(frame_bytes("alive", dict(self._ears.tells())))
                    sent_at = now
            except (OSError, ValueError) as error:
                self.lose(f"the connection to rank {self.peer} broke ({error})")
                return
            if data == b"":
                self.lose(f"rank {self.peer} has gone")
                return
            heard_at = now if data else heard_at
            for name, value in reader.feed(data or b""):
                self._hear(name, value)
            if now - heard_at > SILENT_SECONDS:
                self.lose(f"rank {self.peer} has said nothing for {SILENT_SECONDS:.0f} seconds")
            if trouble := self._progress.trouble():
                self.lose(trouble)

    def _hear(self, name: str, value: Any) -> None:
        if name == "alive":
            self.told = value
        elif name == "named":
            self._ears.named(self.peer, value)
        elif name == "end":  # behind it the other rank goes
            with self._state.lock:
                self._state.is_closed = True
            self._frames.put((name, value))
        else:
            self._frames.put((name, value))
