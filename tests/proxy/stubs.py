"""A backend that writes down what it gets and follows a script, and a client that sends exactly what it is told to."""

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvserve.proxy.litellm import LitellmProxy

LISTED = "openai/some-org/Model-4bit"
SERVED = "some-org/Model-4bit"
KEY = "secret-key"


@dataclass
class Script:
    """What the backend does next: an error, or a stream of deltas with pauses, or one answer. Every pause ends early
    once `go_on` is set."""

    status: int = 200
    error: Mapping[str, Any] | None = None
    retry_after: str | None = None
    answer: Mapping[str, Any] | None = None
    events: list[Any] = field(default_factory=list)
    pause_seconds: float = 0.0
    hold_seconds: float = 0.0
    go_on: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Received:
    """One request as it arrived at the backend."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One streamed piece of a chat answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [choice],
    } | more


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 3},
}
ANSWER = {
    "id": "chatcmpl-r1",
    "object": "chat.completion",
    "created": 7,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "hel"}),
    chunk({"content": "lo"}),
    chunk({}, "stop"),
]


def _peek(connection: socket.socket) -> bytes:
    """A byte that waits to be read, empty if the other side closed or broke the connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except ConnectionError:
        return b""


class _PatientServer(ThreadingHTTPServer):
    """Takes more connections at once than the five of its base: one that finds no place tries again a second later,
    then two, then four."""

    request_queue_size = 128
    daemon_threads = True


class Backend:
    """An OpenAI-like server that writes down what it gets and follows `script`."""

    def __init__(self) -> None:
        self.script = Script()
        self.received: list[Received] = []
        self.left_at: list[float] = []
        self.server = _PatientServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def follow(self, script: Script) -> None:
        """Starts a new scene."""
        self.script = script
        self.received.clear()
        self.left_at.clear()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def wait_until_asked(self, seconds: float) -> bool:
        """Whether a request arrived within `seconds`: a client that leaves before is none of the backend's."""
        deadline = time.monotonic() + seconds
        while not self.received and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self.received)

    def wait_until_left(self, seconds: float) -> float | None:
        """When the proxy dropped its connection to us, None if it did not within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.left_at:
                return self.left_at[0]
            time.sleep(0.005)
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                return None

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                backend.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                script = backend.script
                if self._has_left(script.hold_seconds, script.go_on):
                    return
                if script.error is not None:
                    self._send_json(script.status, script.error, script.retry_after)
                elif body.get("stream"):
                    self._send_stream(script, body)
                else:
                    self._send_json(200, script.answer or ANSWER, None)

            def _send_json(self, status: int, value: Mapping[str, Any], retry_after: str | None) -> None:
                raw = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.send_header("x-request-id", "r1")
                if retry_after is not None:
                    self.send_header("retry-after", retry_after)
                self.send_header("connection", "close")  # a later test may put another handler in this one's place
                self.close_connection = True
                self.end_headers()
                self.wfile.write(raw)

            def _send_stream(self, script: Script, body: Mapping[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("x-request-id", "r1")
                self.send_header("connection", "close")
                self.end_headers()
                self.close_connection = True
                events = list(script.events or STREAM)
                if (body.get("stream_options") or {}).get("include_usage"):
                    events.append(chunk({}) | {"choices": [], "usage": USAGE})
                for event in events:
                    self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
                    if self._has_left(script.pause_seconds, script.go_on):
                        return
                self.wfile.write(b"data: [DONE]\n\n")

            def _has_left(self, seconds: float, go_on: threading.Event) -> bool:
                """Waits, and notes it when the other side closes meanwhile."""
                deadline = time.monotonic() + seconds
                while (left := deadline - time.monotonic()) > 0 and not go_on.is_set():
                    if select.select([self.connection], [], [], min(left, 0.01))[0]:
                        if not _peek(self.connection):
                            backend.left_at.append(time.monotonic())
                            self.close_connection = True
                            return True
                        time.sleep(0.01)
                return False

        return Handler


@dataclass(frozen=True)
class Reply:
    """One whole answer."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    def json(self) -> Any:
        return json.loads(self.raw)

    def events(self) -> list[Any]:
        """The JSON events of a stream, without the closing [DONE]."""
        lines = [line[6:] for line in self.raw.decode().split("\n") if line.startswith("data: ")]
        assert lines, self.raw
        assert lines[-1] == "[DONE]", self.raw
        return [json.loads(line) for line in lines[:-1]]


@dataclass(frozen=True)
class Client:
    """Speaks HTTP to one proxy, with exactly the headers it is told to send."""

    port: int

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Reply:
        return self.send("POST", path, json.dumps(body).encode(), headers)

    def chat(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        return self.post("/v1/chat/completions", body, headers)

    def open(self, body: object, path: str = "/v1/chat/completions") -> socket.socket:
        """Sends a request and leaves the answer unread."""
        raw = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection


@dataclass(frozen=True)
class Running:
    """A real LiteLLM that runs, where, and what it reported."""

    proxy: LitellmProxy
    port: int
    reports: list[str]
