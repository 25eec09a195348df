"""A relay between a client and a server on this machine, with a network's faults: narrow, silent, dribbling, cut."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

PIECE_BYTES = 65_536


@dataclass(eq=False)
class Relay:
    """`bytes_per_second`: of the answers; None: as fast as it goes. `mode`: pass, silent (nothing more is answered),
    dribble (one byte of the answers in a while), cut (connections end, and new ones too). It falls silent behind so
    many bytes of answers."""

    target_port: int
    port: int = 0
    bytes_per_second: float | None = None
    mode: str = "pass"
    num_answer_bytes: int = 0
    silent_behind: float = math.inf
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """End all connections, and those that come."""
        self.mode = "cut"
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, for good."""
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.mode == "cut":
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:  # it is dead
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_answer:
                    self._answer(sink, data)
                else:
                    sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _answer(self, sink: socket.socket, data: bytes) -> None:
        self._wait_for(len(data))
        if self.num_answer_bytes + len(data) > self.silent_behind and self.mode == "pass":
            self.mode = "silent"
        while self.mode == "silent":
            time.sleep(0.01)
        if self.mode == "dribble":
            for at in range(len(data)):
                sink.sendall(data[at : at + 1])
                time.sleep(0.3)
                if self.mode != "dribble":
                    sink.sendall(data[at + 1 :])
                    return
            return
        sink.sendall(data)
        self.num_answer_bytes += len(data)

    def _wait_for(self, num_bytes: int) -> None:
        """One bucket for all connections."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_second
            seconds = self._free_at - now
        time.sleep(seconds)


@contextlib.contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay to this port, on a free one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(port, listener.getsockname()[1])
        thread = threading.Thread(target=relay.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.close()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(2)
