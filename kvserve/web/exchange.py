"""One request and its answer on the wire: status line, headers, one JSON body or one stream of server-sent events. It
knows HTTP/1.1, no endpoint and no protocol's fields."""

import contextlib
import json
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from kvserve.core import JsonObject, RequestId
from kvserve.errors import RequestError
from kvserve.protocols.error_bodies import RETRY_AFTER_SECONDS
from kvserve.web.connections import ConnectionTable
from kvserve.web.head import RequestHead
from kvserve.web.reader import ClientGone, ConnectionReader
from kvserve.web.settings import WebSettings

_LAST_CHUNK = b"0\r\n\r\n"
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once: json.dumps would make one for each token


@dataclass(frozen=True, slots=True)
class Framing:
    """A protocol's form of events: `has_names` writes each event's `type` as its name; `end` ends the stream."""

    has_names: bool
    end: bytes


UNNAMED = Framing(has_names=False, end=b"data: [DONE]\n\n")
NAMED = Framing(has_names=True, end=b"")
"""The last event itself marks the end."""


def encode_json(payload: JsonObject) -> bytes:
    """One line of ASCII: many clients split a stream at U+2028 or U+0085 too, and a lone surrogate has no UTF-8."""
    return _JSON.encode(payload).encode("ascii")


def encode_event(payload: JsonObject) -> bytes:
    """One event without a name."""
    return b"data: " + encode_json(payload) + b"\n\n"


def encode_named_event(payload: JsonObject) -> bytes:
    """One event whose name is its `type`."""
    return b"event: " + str(payload["type"]).encode("ascii") + b"\n" + encode_event(payload)


class EventStream:
    """An open stream of events. `send` writes bytes to the client and raises ClientGone if it has left."""

    def __init__(
        self,
        send: Callable[[bytes], None],
        error_chunk: Callable[[RequestError], JsonObject],
        is_chunked: bool,
        framing: Framing = UNNAMED,
    ) -> None:
        self._send = send
        self._error_chunk = error_chunk
        self._is_chunked = is_chunked
        self._encode = encode_named_event if framing.has_names else encode_event
        self._end = framing.end
        self._is_open = True

    def send(self, payloads: Iterable[JsonObject]) -> None:
        """Send these events in one write; nothing if there are none."""
        if data := b"".join(map(self._encode, payloads)):
            self._send(self._frame(data))

    def comment(self, text: str) -> None:
        """Send a comment, which clients skip; nothing if events have names: those protocols have their own events for
        silence."""
        if self._encode is encode_event:
            self._send(self._frame(b": " + text.encode("ascii") + b"\n\n"))

    def end(self) -> None:
        """End the answer in the protocol's form."""
        self._close(self._end)

    def fail(self, error: RequestError) -> None:
        """Send the error as the last event and end the answer; does nothing on an ended stream."""
        if self._is_open:
            self._close(self._encode(self._error_chunk(error)) + self._end)

    def _close(self, last: bytes) -> None:
        self._is_open = False
        # an empty chunk would be the last one
        if data := (self._frame(last) if last else b"") + (_LAST_CHUNK if self._is_chunked else b""):
            self._send(data)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data


# --- the exchange -----------------------------------------------------------------------------------------------------

type Header = tuple[str, str]
type EncodeError = Callable[[RequestError], JsonObject]
type CountError = Callable[[str, int], None]
"""Called with the endpoint (empty: none) and the status of each error answer."""

_ID_HEADERS = ("x-request-id", "request-id")
"""The headers from which OpenAI's and Anthropic's SDKs read a request's id."""
_CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OVERLOADED = 529
"""Anthropic's status, for which the standard library has no phrase."""


def new_request_id() -> RequestId:
    """A fresh id: `req` and 24 hexadecimal digits."""
    return RequestId("req" + secrets.token_hex(12))


class HttpExchange:
    """A request and its one answer. One thread at a time uses it: its connection's or, while that thread waits, the one
    that delivers the tokens.

    `request_id` is always the server's own, so that no two answers share one; a client's `x-request-id` or
    `x-client-request-id` of at most 64 letters, digits, `_` and `-` comes back as `x-client-request-id`.
    """

    def __init__(
        self,
        connection: socket.socket,
        reader: ConnectionReader,
        settings: WebSettings,
        connections: ConnectionTable,
        encode_error: EncodeError,
        count_error: CountError,
    ) -> None:
        self.request_id = new_request_id()
        self.settings = settings
        self.body = b""
        self.path_rest = ""
        self.endpoint = ""
        self.sharing: tuple[Header, ...] = ()
        self.encode_error = encode_error
        self.own_statuses: Mapping[int, int] = {}
        self.may_keep_connection = False
        self.has_answered = False
        self._connection = connection
        self._reader = reader
        self._connections = connections
        self._count_error = count_error
        self._head: RequestHead | None = None
        self._stream: EventStream | None = None
        self._may_wait = True
        self._rest = b""

    @property
    def head(self) -> RequestHead:
        """The request's head; only errors in the head are answered without one."""
        if self._head is None:
            raise RuntimeError("the request has no head yet")
        return self._head

    @head.setter
    def head(self, head: RequestHead) -> None:
        self._head = head

    @property
    def must_stop(self) -> bool:
        """Whether the server shuts down and running answers must end early."""
        return self._connections.is_closing

    @property
    def is_last(self) -> bool:
        """Whether this is the connection's last request: an endless answer must end now."""
        return self._connections.is_draining

    @property
    def client_is_gone(self) -> bool:
        """Whether the client has left."""
        return self._reader.peer_is_gone()

    def check_client(self) -> None:
        """Raises ClientGone if the client has left."""
        if self.client_is_gone:
            raise ClientGone

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Inside this context, bytes that the socket does not take at once are kept for `send_rest`: the thread serves
        other clients, too. One thread at a time may enter."""
        self._may_wait = False
        try:
            yield
        finally:
            self._may_wait = True

    @property
    def has_rest(self) -> bool:
        """Whether bytes wait for `send_rest`."""
        return bool(self._rest)

    def send_rest(self) -> None:
        """Send the bytes kept back. Raises ClientGone."""
        if self._rest:
            self._send(b"")

    def send_json(self, status: int, payload: JsonObject, headers: Iterable[Header] = ()) -> None:
        """Answer with one JSON object. Raises ClientGone."""
        self.send_body(status, "application/json", encode_json(payload), headers)

    def send_body(self, status: int, content_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Answer with these bytes, or with their headers alone to HEAD. Raises ClientGone."""
        own = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        is_head = self._head is not None and self._head.method == "HEAD"
        self._send(self._answer_head(status, [*own, *headers]) + (b"" if is_head else body))

    def send_nothing(self, status: int, headers: Iterable[Header] = ()) -> None:
        """Answer without a body (204). Raises ClientGone."""
        self._send(self._answer_head(status, headers))

    def send_continue(self) -> None:
        """Answer 100 to a client that expects it before its body. Raises ClientGone."""
        self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def open_stream(self, error_chunk: Callable[[RequestError], JsonObject], framing: Framing = UNNAMED) -> EventStream:
        """Answer 200 and send events from now on; an error after this point is one more event. Raises ClientGone."""
        is_chunked = self.head.version >= (1, 1)
        headers = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]
        if is_chunked:
            headers.append(("Transfer-Encoding", "chunked"))
        else:
            self.may_keep_connection = False  # HTTP/1.0: the end of the connection is the end of the answer
        self._send(self._answer_head(200, headers))
        self._stream = EventStream(self._send, error_chunk, is_chunked, framing)
        return self._stream

    def fail(self, error: RequestError, headers: Iterable[Header] = ()) -> None:
        """Answer with the error, as a status and JSON, or inside an open stream. Raises ClientGone."""
        status = self.own_statuses.get(error.status, error.status)
        self._count_error(self.endpoint, status)
        if self._stream is not None:
            self._stream.fail(error)
        elif self.has_answered:
            self.may_keep_connection = False
        else:
            seconds = error.retry_after_seconds
            if seconds is None:
                seconds = RETRY_AFTER_SECONDS.get(error.status)
            retry = [] if seconds is None else [("Retry-After", str(seconds))]
            self.send_json(status, self.encode_error(error), [*retry, *headers])

    def _answer_head(self, status: int, headers: Iterable[Header]) -> bytes:
        self.has_answered = True
        self.may_keep_connection = self.may_keep_connection and not self._connections.is_draining
        phrase = "Overloaded" if status == _OVERLOADED else HTTPStatus(status).phrase
        lines = [f"HTTP/1.1 {status} {phrase}", f"Date: {formatdate(usegmt=True)}"]
        lines.extend(f"{name}: {self.request_id}" for name in _ID_HEADERS)
        lines.extend(f"{name}: {value}" for name, value in (*self._client_id(), *self.sharing, *headers))
        if not self.may_keep_connection:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _client_id(self) -> Iterable[Header]:
        if self._head is None:
            return ()
        sent = self._head.get("x-client-request-id") or self._head.get("x-request-id") or ""
        return (("x-client-request-id", sent),) if _CLIENT_ID.fullmatch(sent) else ()

    def _send(self, data: bytes) -> None:
        """Write all of it. Most writes fit into the socket's buffer: they cost one system call and no second wait for
        the interpreter's lock."""
        data, self._rest = self._rest + data, b""
        try:
            rest = data[self._send_at_once(data) :]
            if rest and not self._may_wait:
                self._rest = rest
            elif rest:
                # sendall's timeout is for all of the data: a client that reads a byte now and then cannot prolong it.
                self._connection.settimeout(self.settings.write_timeout_seconds)
                self._connection.sendall(rest)
        except OSError as error:
            self.may_keep_connection = False
            raise ClientGone from error

    def _send_at_once(self, data: bytes) -> int:
        """The number of bytes that the socket's buffer took. The socket stays non-blocking for checks of the client."""
        if self._connection.gettimeout() != 0.0:
            self._connection.settimeout(0.0)
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
