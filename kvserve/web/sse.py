"""Server-sent events on a chunked HTTP answer. It knows framing, no protocol's fields and no sockets."""

import json
from collections.abc import Callable, Iterable

from kvserve.core import JsonObject
from kvserve.errors import RequestError

_DONE = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


def encode_json(payload: JsonObject) -> bytes:
    """One line of ASCII: many clients split a stream at U+2028 or U+0085 too, and a lone surrogate has no UTF-8."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode_event(payload: JsonObject) -> bytes:
    """One event without a name."""
    return b"data: " + encode_json(payload) + b"\n\n"


class EventStream:
    """An open stream of events. `send` writes bytes to the client and raises ClientGone when there is none."""

    def __init__(
        self, send: Callable[[bytes], None], error_chunk: Callable[[RequestError], JsonObject], is_chunked: bool
    ) -> None:
        self._send = send
        self._error_chunk = error_chunk
        self._is_chunked = is_chunked
        self._is_open = True

    def send(self, payloads: Iterable[JsonObject]) -> None:
        """Send these events in one write; nothing at all if there are none."""
        if data := b"".join(map(encode_event, payloads)):
            self._send(self._frame(data))

    def end(self) -> None:
        """End the answer with `[DONE]`."""
        self._close(_DONE)

    def fail(self, error: RequestError) -> None:
        """Send the error as the last event and end the answer; does nothing on an ended stream."""
        if self._is_open:
            self._close(encode_event(self._error_chunk(error)) + _DONE)

    def _close(self, last: bytes) -> None:
        self._is_open = False
        self._send(self._frame(last) + (_LAST_CHUNK if self._is_chunked else b""))

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
