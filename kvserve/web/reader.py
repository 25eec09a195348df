"""Reads requests from one connection, each section within one deadline and one limit. It knows bytes and framing, not
the meaning of headers.

Bytes that arrive early (pipelined requests) are kept for the next request and do not count as a disconnect.
"""

import select
import socket
import time

from kvserve.errors import BadRequest, BodyTooLarge, HeadersTooLarge, RequestTimeout
from kvserve.web.head import BodyFraming, parse_chunk_size

_RECEIVE_BYTES = 256 * 1024
_MAX_PIPELINED_BYTES = 256 * 1024
_MAX_CHUNK_LINE_BYTES = 1024
_MAX_TRAILER_BYTES = 8192
_END_OF_HEAD = b"\r\n\r\n"
# Linux reports a closed peer even behind unread bytes; other systems lack the flag.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class ClientGone(Exception):
    """The client closed the connection or stopped reading."""


class ConnectionReader:
    """The receiving half of one connection, with the bytes that were received and not yet consumed.

    One thread at a time uses it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._news = select.poll()
        self._news.register(connection, select.POLLIN | _PEER_CLOSED)

    def wait_for_request(self, timeout_seconds: float) -> bool:
        """Wait for the first byte of a request (empty lines are skipped). False: the client left or sent nothing."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            while self._buffer.startswith(b"\r\n"):
                del self._buffer[:2]
            if self._buffer and self._buffer != b"\r":
                return True
            try:
                if not self._receive(deadline):
                    return False
            except (TimeoutError, ClientGone):
                return False

    def read_head(self, max_bytes: int, timeout_seconds: float) -> bytes:
        """The head of the next request without its last empty line.

        Raises RequestTimeout, HeadersTooLarge, BadRequest for what cannot be HTTP, ClientGone.
        """
        deadline = time.monotonic() + timeout_seconds
        searched = 0
        while (end := self._buffer.find(_END_OF_HEAD, searched)) < 0:
            if self._buffer and not self._buffer[:1].isalpha():
                raise BadRequest("This is not HTTP: plain HTTP/1.1 is spoken here.")
            if len(self._buffer) > max_bytes:
                raise HeadersTooLarge(f"The header section is larger than {max_bytes} bytes.")
            searched = max(0, len(self._buffer) - len(_END_OF_HEAD) + 1)
            self._receive_more(deadline, f"headers did not arrive within {timeout_seconds:g} s")
        if end > max_bytes:
            raise HeadersTooLarge(f"The header section is larger than {max_bytes} bytes.")
        return self._take(end + len(_END_OF_HEAD))[:end]

    def read_body(self, framing: BodyFraming, max_bytes: int, timeout_seconds: float) -> bytes:
        """The whole body. Raises BodyTooLarge, RequestTimeout, BadRequest for broken chunks, ClientGone."""
        deadline = time.monotonic() + timeout_seconds
        if framing.kind == "chunked":
            return self._read_chunks(max_bytes, deadline)
        check_body_size(framing.num_bytes, max_bytes)
        return self._read_exactly(framing.num_bytes, deadline)

    def peer_is_gone(self) -> bool:
        """Whether the client closed its side (a half-close counts: clients abort that way). Never blocks.

        Takes waiting bytes into the buffer, so that an end behind pipelined bytes is seen too.
        """
        try:
            if not self._news.poll(0):  # usual, for nearly every token: a recv that fails costs several times as much
                return False
            if self._connection.gettimeout() != 0.0:
                self._connection.settimeout(0.0)
            while len(self._buffer) < _MAX_PIPELINED_BYTES:
                received = self._connection.recv(_RECEIVE_BYTES)
                if not received:
                    return True
                self._buffer += received
        except BlockingIOError:
            return False
        except OSError:
            return True
        return self._polls_as_closed()

    def discard_rest(self, timeout_seconds: float) -> None:
        """Read and drop what the client still sends, until it closes or time is up: closing with unread bytes resets
        the connection, which can destroy the answer before it arrives."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self._connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline and self._receive(deadline):
                self._buffer.clear()
        except (OSError, ClientGone):
            return

    def _polls_as_closed(self) -> bool:
        if not _PEER_CLOSED:
            return False
        poll = select.poll()
        poll.register(self._connection, _PEER_CLOSED)
        return bool(poll.poll(0))

    def _read_chunks(self, max_bytes: int, deadline: float) -> bytes:
        body = bytearray()
        while size := parse_chunk_size(self._read_line(_MAX_CHUNK_LINE_BYTES, deadline)):
            check_body_size(len(body) + size, max_bytes)
            body += self._read_exactly(size, deadline)
            if self._read_exactly(2, deadline) != b"\r\n":
                raise BadRequest("The chunked body is malformed: a chunk does not end where its size says.")
        trailer_bytes = 0
        while line := self._read_line(_MAX_TRAILER_BYTES, deadline):
            trailer_bytes += len(line)
            if trailer_bytes > _MAX_TRAILER_BYTES:
                raise HeadersTooLarge(f"The trailer section is larger than {_MAX_TRAILER_BYTES} bytes.")
        return bytes(body)

    def _read_line(self, max_bytes: int, deadline: float) -> bytes:
        """The bytes before the next CR LF; both are consumed."""
        while (end := self._buffer.find(b"\n", 0, max_bytes + 2)) < 0:
            if len(self._buffer) > max_bytes:
                raise BadRequest("The chunked body is malformed: a size or trailer line is too long.")
            self._receive_more(deadline, "body did not arrive in time")
        line = self._take(end + 1)
        if not line.endswith(b"\r\n"):
            raise BadRequest("The chunked body is malformed: lines end with CR LF.")
        return line[:-2]

    def _read_exactly(self, num_bytes: int, deadline: float) -> bytes:
        while len(self._buffer) < num_bytes:
            self._receive_more(deadline, "body did not arrive in time")
        return self._take(num_bytes)

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:num_bytes])
        del self._buffer[:num_bytes]
        return taken

    def _receive_more(self, deadline: float, complaint: str) -> None:
        try:
            is_open = self._receive(deadline)
        except TimeoutError:
            raise RequestTimeout(f"The request's {complaint}.") from None
        if not is_open:
            raise BadRequest("The request ended in the middle.")

    def _receive(self, deadline: float) -> bool:
        """Wait for bytes and append them. False at the end of the stream. Raises TimeoutError, ClientGone."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        try:
            received = self._connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise ClientGone from error
        self._buffer += received
        return bool(received)


def check_body_size(num_bytes: int, max_bytes: int) -> None:
    """Raises BodyTooLarge. Called with the announced size, before the bytes are read."""
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"The request body is larger than {max_bytes} bytes (MAX_REQUEST_BODY_BYTES).")
