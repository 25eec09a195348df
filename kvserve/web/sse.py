"""Server-sent events on a chunked HTTP answer. It knows framing, no protocol's fields and no sockets."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvserve.core import JsonObject
from kvserve.errors import RequestError

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
