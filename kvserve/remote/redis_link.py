"""One connection to a Redis server: commands in, replies out, each call with its bound. The only file that imports
redis, and only once a connection is made; it knows nothing of what the commands are for.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from kvserve.settings.redis_address import RemoteAddress

CONNECT_SECONDS = 1.0
READ_BYTES = 2**20
"""So much is read from the socket at once: redis-py's own 32 KiB cost a hand-over of the interpreter's lock each."""

LinkFault = Literal["unreachable", "refused", "full", "timed_out", "strange"]

type Command = tuple[bytes | str | int, ...]
type Reply = Any
"""int, bytes, None or a list of these; a `LinkRefusal` where the server refused this one command, of EXEC's too."""


class LinkFailed(Exception):
    """The connection gave no answers; it is closed, the next call makes a new one."""

    def __init__(self, kind: LinkFault, reason: object) -> None:
        super().__init__(f"{reason}")
        self.kind = kind


class LinkRefusal(Exception):
    """The server's error for one command of several."""

    def __init__(self, kind: LinkFault, reason: object) -> None:
        super().__init__(f"{reason}")
        self.kind = kind


class Link(Protocol):
    """What the jobs on a shared server need of a connection."""

    def run(self, commands: Sequence[Command], until: float) -> list[Reply]:
        """Send all of these, and read as many replies, at most until then (`time.monotonic`). Raises LinkFailed."""
        ...

    def hang_up(self) -> None:
        """End a call that is under way in another thread; it raises there. From any thread."""
        ...

    def close(self) -> None:
        """Close the connection; the next `run` makes a new one."""
        ...


class RedisLink:
    """A connection that is made when it is needed, and made again once where it was idle and is gone. `run` and `close`
    belong to one thread. `silent_seconds`: so long may pass without a byte."""

    def __init__(self, address: RemoteAddress, silent_seconds: float) -> None:
        self._address = address
        self._silent_seconds = silent_seconds
        self._lock = threading.Lock()
        self._connection: Any = None
        self._is_hung_up = False

    def run(self, commands: Sequence[Command], until: float) -> list[Reply]:
        if not commands:
            return []
        self._is_hung_up = False
        if self._connection is not None:
            with contextlib.suppress(_IdleAndGone):
                return self._run(commands, until, is_old=True)
        return self._run(commands, until, is_old=False)

    def _run(self, commands: Sequence[Command], until: float, *, is_old: bool) -> list[Reply]:
        import redis.exceptions as failures

        replies: list[Reply] = []
        try:
            connection = self._connected()
            for chunk in connection.pack_commands(commands):
                _check_time(until, failures)
                connection.send_packed_command([chunk], check_health=False)
            for _ in commands:
                _check_time(until, failures)
                replies.append(_reply(connection, failures))
        except (failures.AuthenticationError, failures.AuthorizationError) as error:
            self.close()
            raise LinkFailed("refused", error) from None
        except (failures.TimeoutError, TimeoutError) as error:
            self.close()
            raise LinkFailed("timed_out", error) from None
        except (failures.ConnectionError, OSError) as error:
            self.close()
            if is_old and not (replies or self._is_hung_up) and time.monotonic() < until:
                raise _IdleAndGone from None
            raise LinkFailed("unreachable", error) from None
        except (failures.RedisError, ValueError) as error:
            self.close()
            raise LinkFailed("strange", error) from None
        return replies

    def _connected(self) -> Any:
        if self._connection is None:
            connection = _new_connection(self._address, self._silent_seconds)
            connection.connect()
            with self._lock:
                self._connection = connection
        return self._connection

    def hang_up(self) -> None:
        self._is_hung_up = True
        with self._lock:
            held = getattr(self._connection, "_sock", None)
            if held is not None:
                with contextlib.suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)  # not closed here: its number may be another file's by then

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.disconnect()


class _IdleAndGone(Exception):
    """A connection that had been idle gave nothing: one more is tried."""


def _check_time(until: float, failures: Any) -> None:
    if time.monotonic() > until:
        raise failures.TimeoutError("it took too long")


def _reply(connection: Any, failures: Any) -> Reply:
    try:
        reply = connection.read_response()
    except failures.ResponseError as error:
        return _refusal(error, failures)
    if isinstance(reply, list):  # of a transaction: each command has its own
        return [_refusal(each, failures) if isinstance(each, failures.ResponseError) else each for each in reply]
    return reply


def _refusal(error: Exception, failures: Any) -> LinkRefusal:
    if isinstance(error, failures.OutOfMemoryError):
        return LinkRefusal("full", error)
    return LinkRefusal("refused" if isinstance(error, failures.NoPermissionError) else "strange", error)


def _new_connection(address: RemoteAddress, silent_seconds: float) -> Any:
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry

    make: Callable[..., Any] = SSLConnection if address.is_tls else Connection
    return make(
        host=address.host,
        port=address.port,
        db=address.database,
        username=address.user,
        password=address.password,
        socket_timeout=silent_seconds,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_read_size=READ_BYTES,
        socket_keepalive=True,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        driver_info=None,
        **address.files,
    )
