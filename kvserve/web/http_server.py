"""The HTTP server: binds the port, accepts connections up to the limit, one thread each, and shuts down in order.

It knows sockets and threads, no endpoint.
"""

import contextlib
import errno
import os
import socket
import threading
import time
import traceback
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from kvserve.errors import NotReady
from kvserve.settings.ports import error_of_binding, family_of, refuse_taken_port, unusable_address
from kvserve.web.connections import ConnectionTable, OpenConnection
from kvserve.web.handler import ConnectionHandler, Front, Report
from kvserve.web.reader import ClientGone, ConnectionReader
from kvserve.web.router import Router
from kvserve.web.settings import WebSettings

__all__ = ["HttpServer", "WebSettings"]

_ACCEPT_POLL_SECONDS = 0.1
_MAX_REFUSED = 64
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LAST_JOIN_SECONDS = 1.0


class HttpServer:
    """kvserve's own port. Call `bind`, then `start`, at the end `close`, all from one thread.

    `close` needs a running engine: it cancels requests and lets every stream send its last events.
    """

    def __init__(self, settings: WebSettings, routes: Router, report: Report) -> None:
        self._connections = ConnectionTable(settings.max_connections)
        self._front = Front(settings, routes, self._connections, report)
        self._listener: _Listener | None = None
        self._accept_thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The bound port, also for the setting 0."""
        if self._listener is None:
            raise RuntimeError("the server is not bound")
        return int(self._listener.server_port)

    @property
    def num_open_connections(self) -> int:
        """Connections that were accepted and not closed yet."""
        return len(self._connections)

    def bind(self) -> None:
        """Take the port. Raises PortTaken with what is known about its holder, SettingError for an unusable address.

        Clients may connect from now on; they are answered after `start`.
        """
        settings = self._front.settings
        refuse_taken_port(settings.host, settings.port)
        if (reason := error_of_binding(settings.host, settings.port)) is not None:
            raise unusable_address(settings.host, settings.port, reason)
        listener = _Listener(self._front)
        try:
            listener.server_bind()
            listener.server_activate()
        except OSError as error:  # another process was quicker
            listener.server_close()
            raise unusable_address(settings.host, settings.port, error) from None
        self._listener = listener

    def start(self) -> None:
        """Accept connections on a thread of their own."""
        if self._listener is None:
            raise RuntimeError("the server is not bound")
        self._accept_thread = threading.Thread(
            target=self._listener.serve_forever, args=(_ACCEPT_POLL_SECONDS,), name="web-accept", daemon=True
        )
        self._accept_thread.start()

    def stop_accepting(self) -> None:
        """Free the port and shut silent connections; running requests finish, each the last of its connection."""
        if self._listener is None:
            return
        if self._accept_thread is not None:
            self._listener.shutdown()
            self._accept_thread.join()
            self._accept_thread = None
        self._listener.server_close()
        self._connections.drain()

    def close(self, timeout_seconds: float) -> bool:
        """End everything: answers end early and say so; after the timeout the remaining sockets are shut. Returns
        whether every connection's thread has ended."""
        if self._listener is None:
            return True
        self.stop_accepting()
        self._connections.begin_closing()
        if not self._connections.wait_until_empty(timeout_seconds):
            self._connections.shut_all()
        return self._listener.join_threads(_LAST_JOIN_SECONDS)


class _Listener(ThreadingHTTPServer):
    """The standard library's server with admission, named threads and no reverse DNS lookups."""

    allow_reuse_address = True  # a restart need not wait for TIME_WAIT; on Linux it never shares a listening port
    allow_reuse_port = False
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, front: Front) -> None:
        self.address_family = family_of(front.settings.host)
        self._front = front
        self._threads_started: set[threading.Thread] = set()
        self._refused: deque[tuple[float, socket.socket]] = deque()
        super().__init__((front.settings.host, front.settings.port), BaseHTTPRequestHandler, bind_and_activate=False)

    @property
    def num_live_threads(self) -> int:
        return sum(thread.is_alive() for thread in tuple(self._threads_started))

    def server_bind(self) -> None:
        """Bind without looking up our own name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept. Out of descriptors the connection stays in the backlog: wait a moment instead of spinning."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                time.sleep(_ACCEPT_POLL_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread if the limit leaves room, else a quick 503."""
        entry = self._front.connections.admit(request)
        if entry is None:
            self._refuse(request)
            return
        thread = threading.Thread(
            target=self._run, args=(request, client_address, entry), name=f"web-{request.fileno()}", daemon=True
        )
        self._threads_started.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system refuses more threads
            self._front.connections.leave(entry)
            self._refuse(request)

    def service_actions(self) -> None:
        """Forget ended threads, and close refused connections once their 503 had time to be read."""
        self._threads_started = {thread for thread in self._threads_started if thread.is_alive()}
        now = time.monotonic()
        while self._refused and (self._refused[0][0] <= now or len(self._refused) > _MAX_REFUSED):
            self._refused.popleft()[1].close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a defect outside the border of a request."""
        self._front.report(f"a connection failed unexpectedly\n{traceback.format_exc()}")

    def server_close(self) -> None:
        """Close the listening socket and whatever was refused."""
        super().server_close()
        while self._refused:
            self._refused.popleft()[1].close()

    def join_threads(self, timeout_seconds: float) -> bool:
        """Wait for the connections' threads. Returns whether all have ended."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads_started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.num_live_threads == 0

    def _run(self, connection: socket.socket, client_address: Any, entry: OpenConnection) -> None:
        _wait_for_others()
        try:
            ConnectionHandler(connection, client_address, self, self._front, entry)
        except OSError:  # the peer reset the connection while it was being set up
            pass
        finally:
            self.shutdown_request(connection)
            self._front.connections.leave(entry)

    def _refuse(self, connection: socket.socket) -> None:
        exchange = self._front.exchange(connection, ConnectionReader(connection))
        with contextlib.suppress(ClientGone, OSError):
            exchange.fail(NotReady("The server has as many connections as it may have; try again soon."))
            connection.shutdown(socket.SHUT_WR)
        self._refused.append((time.monotonic() + self._front.settings.linger_seconds, connection))


def _wait_for_others() -> None:
    """Make this thread, which wakes for every token, wait for a free core instead of preempting a busy thread: on a CPU
    that would be the model's own, in the middle of a step. Only Linux has such threads (sched(7))."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # some containers forbid it: the thread then runs as on other systems
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
