"""Serves one connection: reads requests, checks who may speak, calls routes, answers errors.

This is the border of a request: it catches everything that a route raises. It replaces the parser of the standard
library's handler, which has no deadline over a whole head and accepts heads that allow request smuggling.
"""

import hmac
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from typing import Any

from kvserve.core import KEY_HEADER
from kvserve.errors import LengthRequired, MethodNotAllowed, NotFound, RequestError
from kvserve.proxy.access import (
    READ_HEADERS,
    Headers,
    check_host,
    check_key,
    check_origin,
    preflight_headers,
    sharing_headers,
)
from kvserve.web.connections import ConnectionTable, OpenConnection, Phase
from kvserve.web.exchange import HttpExchange
from kvserve.web.head import BodyFraming, RequestHead, body_framing, parse_head
from kvserve.web.reader import ClientGone, ConnectionReader, check_body_size
from kvserve.web.router import Route, RouteMatch, Router
from kvserve.web.settings import WebSettings

type Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Front:
    """What all connections share. Any thread calls `report` with an unexpected error's text and traceback."""

    settings: WebSettings
    router: Router
    connections: ConnectionTable
    report: Report

    def exchange(self, connection: socket.socket, reader: ConnectionReader) -> HttpExchange:
        """A request that is to come, and its answer."""
        router = self.router
        count_error = router.service.observability.count_error
        return HttpExchange(connection, reader, self.settings, self.connections, router.encode_error, count_error)


class ConnectionHandler(BaseHTTPRequestHandler):
    """Serves the requests of one connection, one after the other, on its own thread."""

    def __init__(
        self, connection: socket.socket, client_address: Any, server: BaseServer, front: Front, entry: OpenConnection
    ) -> None:
        self._front = front
        self._entry = entry
        self._reader = ConnectionReader(connection)
        self._is_first_request = True
        self._owes_bytes = False
        super().__init__(connection, client_address, server)

    def setup(self) -> None:
        """Prepare the socket; reading and writing need no file objects."""
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def finish(self) -> None:
        """Do nothing: there is nothing to flush, and the server closes the socket."""

    def handle_one_request(self) -> None:
        """Serve one request; `close_connection` tells whether another may follow."""
        self.close_connection = True
        settings = self._front.settings
        timeout = settings.header_timeout_seconds if self._is_first_request else settings.idle_timeout_seconds
        self._is_first_request = False
        if not self._reader.wait_for_request(timeout):
            return
        exchange = self._front.exchange(self.connection, self._reader)
        self._owes_bytes = True
        try:
            self._serve(exchange)
        except ClientGone:
            return
        if exchange.may_keep_connection:
            self.close_connection = not self._front.connections.enter_phase(self._entry, "silent")
        elif self._owes_bytes:
            self._reader.discard_rest(settings.linger_seconds)

    def _serve(self, exchange: HttpExchange) -> None:
        try:
            self._answer(exchange)
        except ClientGone:
            raise
        except RequestError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - the border of a request: a defect answers 500 and the server serves on
            self._front.report(f"request {exchange.request_id} failed unexpectedly\n{traceback.format_exc()}")
            exchange.may_keep_connection = False
            exchange.fail(RequestError(f"Internal error; the server's log has the reason under {exchange.request_id}."))

    def _answer(self, exchange: HttpExchange) -> None:
        settings = self._front.settings
        raw = self._reader.read_head(settings.max_header_bytes, settings.header_timeout_seconds)
        self._enter_phase("receiving")
        exchange.head = head = with_told_key(parse_head(raw, settings.max_header_count), settings)
        framing = body_framing(head)
        self._owes_bytes = framing.kind == "chunked" or framing.num_bytes > 0
        keeps = head.version >= (1, 1) and "close" not in head.tokens("connection")
        exchange.may_keep_connection = keeps and not self._owes_bytes
        match = self._front.router.find(head.path)
        route = self._admit(exchange, match)
        if route is None:
            return
        exchange.path_rest = match.path_rest
        exchange.body = self._read_body(exchange, framing, route)
        exchange.may_keep_connection = keeps
        self._enter_phase("serving")
        route.handle(exchange, self._front.router.service)

    def _enter_phase(self, phase: Phase) -> None:
        if not self._front.connections.enter_phase(self._entry, phase):
            raise ClientGone

    def _admit(self, exchange: HttpExchange, match: RouteMatch) -> Route | None:
        """The route to call, or None if the request is answered already (OPTIONS, 405). Raises 401, 403 and 404."""
        head, settings = exchange.head, self._front.settings
        route = match.route(head.method)
        form = route or next(iter(match.routes.values()), None)
        exchange.endpoint = form.path if form is not None else ""
        form = form or self._front.router.above(head.path)
        if form is not None and form.encode_error is not None:
            exchange.encode_error = form.encode_error
            exchange.own_statuses = form.statuses
        sent, rules = access_headers(head), settings.access
        check_host(sent, rules)
        exchange.sharing = sharing_headers(check_origin(sent, rules))
        allow = ("Allow", ", ".join(match.methods))
        if head.method == "OPTIONS" and (match.routes or head.path == "*"):
            granted = preflight_headers(sent, match.methods) if is_preflight(head) else ()
            exchange.send_nothing(204, [allow, *granted])
            return None
        if route is None or route.needs_key:
            check_key(sent, rules)
        if not match.routes:
            raise NotFound(f"Unknown path {head.path!r}.")
        if route is None:
            exchange.fail(MethodNotAllowed(f"{head.method} is not possible on {head.path!r}."), [allow])
        return route

    def _read_body(self, exchange: HttpExchange, framing: BodyFraming, route: Route) -> bytes:
        settings = self._front.settings
        if framing.kind == "none":
            if route.needs_body:
                raise LengthRequired("This endpoint needs a body: send Content-Length or Transfer-Encoding: chunked.")
            return b""
        check_body_size(framing.num_bytes, settings.max_body_bytes)
        if self._owes_bytes and "100-continue" in exchange.head.tokens("expect") and exchange.head.version >= (1, 1):
            exchange.send_continue()
        body = self._reader.read_body(framing, settings.max_body_bytes, settings.body_timeout_seconds)
        self._owes_bytes = False
        return body


# --- who may speak ---------------------------------------------------------------------------------------------------


def access_headers(head: RequestHead) -> Headers:
    """The headers for the rules of `proxy/access.py`; an absolute target's authority replaces Host."""
    sent = {name: head.values(name) for name in READ_HEADERS}
    return sent if head.authority is None else {**sent, "host": (head.authority,)}


def with_told_key(head: RequestHead, settings: WebSettings) -> RequestHead:
    """The head with the key digest that the proxy sent, without the proxy's proof. A digest without the proof is
    removed: a digest is no key, since a principal's explanations show it."""
    told = head.values(KEY_HEADER)
    if not told:
        return head
    proof, _, digest = told[0].partition(" ")
    secret = settings.proxy_secret.encode("utf-8")
    is_proxy = bool(secret) and len(told) == 1 and hmac.compare_digest(proof.encode("latin-1"), secret)
    rest = tuple(pair for pair in head.headers if pair[0] != KEY_HEADER)
    return replace(head, headers=(*rest, (KEY_HEADER, digest)) if is_proxy else rest)


def is_preflight(head: RequestHead) -> bool:
    """Whether it is a browser's preflight for a page of another origin."""
    return (
        head.method == "OPTIONS" and bool(head.values("origin")) and bool(head.values("access-control-request-method"))
    )
