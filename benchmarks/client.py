"""A client of streamed chats that costs next to no processor time: one thread, raw sockets, parsing afterwards.

It speaks HTTP/1.0, whose answers end with the connection, so that nothing has to be unwrapped while a clock runs.
"""

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

SILENCE_SECONDS = 120.0
GREEDY = {"temperature": 0, "repetition_penalty": 1.0}

type Message = dict[str, str]
"""Role and content, as they go over the wire."""


class BenchmarkError(Exception):
    """A measurement that says nothing: an error answer, an answer of the wrong length, a server that does not start."""


@dataclass(slots=True, eq=False)
class Stream:
    """One answer as it arrives, taken apart only as far as it is asked for. Times are `time.perf_counter()` seconds."""

    connection: socket.socket
    sent_at: float
    ended_at: float | None = None
    _arrived: list[tuple[float, bytes]] = field(default_factory=list)
    _rest: bytes = b""
    _error: str = ""
    _raw: list[tuple[float, bytes]] = field(default_factory=list)
    _is_past_head: bool = False
    _num_seen: int = 0
    _first_text_at: float | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes in; empty ones are the end."""
        if data:
            self._arrived.append((now, data))
        else:
            self.ended_at = now

    @property
    def first_text_at(self) -> float | None:
        """When the first event with text arrived; None until then. Raises BenchmarkError for an error answer."""
        if self._first_text_at is None:
            self._take_apart()
        while self._first_text_at is None and self._num_seen < len(self._raw):
            at, event = self._raw[self._num_seen]
            self._num_seen += 1
            if _text(_payload(event)):
                self._first_text_at = at
        return self._first_text_at

    def texts(self) -> list[tuple[float, str]]:
        """Arrival and text of every event that has one. Raises BenchmarkError for an error answer."""
        self._take_apart()
        found = [(at, _text(_payload(event))) for at, event in self._raw]
        return [(at, text) for at, text in found if text]

    def usage(self) -> dict[str, Any]:
        """The usage that a finished answer ends with. Raises BenchmarkError where there is none."""
        self._take_apart()
        for _, event in reversed(self._raw):
            payload = _payload(event)
            if payload.get("usage"):
                return dict(payload["usage"])
        raise BenchmarkError(f"the answer ended without usage: {self._raw[-3:]}")

    def finish_reason(self) -> str:
        """Why a finished answer ended. Raises BenchmarkError where it does not say."""
        self._take_apart()
        for _, event in reversed(self._raw):
            if (choices := _payload(event).get("choices")) and choices[0].get("finish_reason"):
                return str(choices[0]["finish_reason"])
        raise BenchmarkError(f"the answer ended without a reason: {self._raw[-3:]}")

    def _take_apart(self) -> None:
        """Make events of what has arrived. Raises BenchmarkError for an error answer."""
        arrived, self._arrived = self._arrived, []
        for at, data in arrived:
            if not self._is_past_head:
                head, separator, data = (self._rest + data).partition(b"\r\n\r\n")
                if not separator:
                    self._rest = head
                    continue
                if b" 200 " not in head.partition(b"\r\n")[0]:
                    self._error = f"the server answered {head.decode('latin-1')}\n{data[:500]!r}"
                self._is_past_head, self._rest = True, b""
            *events, self._rest = (self._rest + data).split(b"\n\n")
            self._raw += [(at, event) for event in events]
        if self._error:
            raise BenchmarkError(self._error)


class Client:
    """Any number of streams, read on the calling thread while `run_until` runs.

    With `nap_seconds` it sleeps so long between two looks, so that it does not wake for each token of each stream and
    take the cores from what it measures; arrivals are then known to be no more exact than that.
    """

    def __init__(self, port: int, nap_seconds: float = 0.0) -> None:
        self._port = port
        self._nap_seconds = nap_seconds
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close([key.data for key in list(self._selector.get_map().values())])
        self._selector.close()

    def chat(self, said: str | Sequence[Message], max_tokens: int) -> Stream:
        """Ask greedily, without penalty and thinking; returns as soon as the request is sent.

        `said` is a whole conversation, or what the user says in a new one.
        """
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        unthinking = {"chat_template_kwargs": {"enable_thinking": False}}
        return self.send({"messages": messages, "max_tokens": max_tokens, **GREEDY, **unthinking})

    def send(self, fields: Mapping[str, Any]) -> Stream:
        """Ask with these fields of a chat, streamed with its usage; returns as soon as the request is sent."""
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        encoded = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
        sent_at = time.perf_counter()
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(head.encode() + encoded)
        stream = Stream(connection, sent_at)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Read until the condition holds. Raises BenchmarkError when nothing arrives for two minutes."""
        last = time.perf_counter()
        while not is_over():
            time.sleep(self._nap_seconds)
            ready = self._selector.select(0.02)
            now = time.perf_counter()
            for key, _ in ready:
                stream: Stream = key.data
                stream.feed(stream.connection.recv(65536), now)
                if stream.ended_at is not None:
                    self.close([stream])
            last = now if ready else last
            if now - last > SILENCE_SECONDS:
                raise BenchmarkError(f"nothing arrived for {SILENCE_SECONDS:.0f} seconds")

    def run_for(self, seconds: float) -> tuple[float, float]:
        """Read for so long; returns the window, start and end."""
        start = time.perf_counter()
        self.run_until(lambda: time.perf_counter() - start >= seconds)
        return start, time.perf_counter()

    def close(self, streams: Iterable[Stream]) -> None:
        """Hang up, as a client does that leaves. Streams that are closed already are left alone."""
        for stream in streams:
            if stream.connection.fileno() >= 0:
                self._selector.unregister(stream.connection)
                stream.connection.close()


def _payload(event: bytes) -> dict[str, Any]:
    data = event.removeprefix(b"data: ")
    payload = {} if data == b"[DONE]" or data.startswith(b": ") else json.loads(data)
    if "error" in payload:
        raise BenchmarkError(f"the stream failed: {payload['error']}")
    return dict(payload)


def _text(payload: dict[str, Any]) -> str:
    delta = payload["choices"][0]["delta"] if payload.get("choices") else {}
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")
