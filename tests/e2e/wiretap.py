"""A relay between a client and a port of the server: bytes pass as they come, and what was asked and answered is noted.
It knows of HTTP/1.1 its first lines only, and no client.
"""

import contextlib
import re
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_REQUEST = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (\S+) HTTP/1\.1\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_CONTINUE = 100
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and the status that the client was answered with; None if it left before."""

    method: str
    path: str
    status: int | None


@dataclass
class _Connection:
    client: socket.socket
    server: socket.socket
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def asked(self) -> Iterator[Asked]:
        """Answers come in the order of their requests on one connection."""
        statuses = (int(status) for status in _STATUS.findall(bytes(self.received)))
        final = (status for status in statuses if status != _CONTINUE)
        for method, path in _REQUEST.findall(bytes(self.sent)):
            yield Asked(method.decode(), path.decode(), next(final, None))

    def carry(self) -> None:
        """Until neither side has more to say, or one of them is gone."""
        ways = {self.client: (self.server, self.sent), self.server: (self.client, self.received)}
        with contextlib.suppress(OSError):
            while ways:
                for source in select.select(list(ways), [], [])[0]:
                    target, noted = ways[source]
                    if piece := source.recv(65536):
                        noted += piece
                        target.sendall(piece)
                    else:
                        del ways[source]
                        target.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Both sides hear that it is over."""
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class Wiretap(socketserver.ThreadingTCPServer):
    """Listens on a free port of loopback and passes everything on to `target`, with a thread for each connection."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.connections: list[_Connection] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def asked(self) -> list[Asked]:
        """Every request so far."""
        return [asked for connection in list(self.connections) for asked in connection.asked()]


class _Handler(socketserver.BaseRequestHandler):
    server: Wiretap

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as server:
            connection = _Connection(self.request, server)
            self.server.connections.append(connection)
            connection.carry()


@contextlib.contextmanager
def tapped(port: int) -> Iterator[Wiretap]:
    """A relay to this port for as long as the block lasts."""
    with Wiretap(port) as tap:
        thread = threading.Thread(target=tap.serve_forever, args=(_POLL_SECONDS,))
        thread.start()
        try:
            yield tap
        finally:
            tap.shutdown()
            thread.join()
            for connection in tap.connections:
                connection.end()
