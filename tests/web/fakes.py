"""A scripted service, a server on a free port and a client that speaks raw bytes: what the web tests share."""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    Finished,
    GenerationRequest,
    JsonObject,
    RequestDefaults,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
    Turn,
    Usage,
    Waiting,
)
from kvserve.engine.rows import RequestHandle
from kvserve.errors import NotFound, RequestError
from kvserve.protocols.model_cards import ModelCard
from kvserve.protocols.responses_store import ResponseStore
from kvserve.web.http_server import HttpServer, WebSettings
from kvserve.web.routes import make_router

PATIENCE_SECONDS = 60.0
"""How long a test waits for what has to come, on however busy a machine; it proves nothing by that time."""

FINISHED = Finished("stop", Usage(num_prompt_tokens=3, num_cached_tokens=1, num_completion_tokens=2))
HELLO = (Waiting(0, 3), ContentDelta("Hel"), ContentDelta("lo"), FINISHED)
CHAT = {"model": "tiny/model", "messages": [{"role": "user", "content": "hi"}]}

SETTINGS = WebSettings(
    port=0,
    max_body_bytes=100_000,
    max_header_bytes=4096,
    max_header_count=30,
    max_connections=64,
    header_timeout_seconds=PATIENCE_SECONDS,
    body_timeout_seconds=PATIENCE_SECONDS,
    write_timeout_seconds=PATIENCE_SECONDS,
    idle_timeout_seconds=PATIENCE_SECONDS,
    linger_seconds=0.02,
    keep_alive_seconds=5.0,
    poll_seconds=0.02,
)


class ScriptedTurn:
    """Events from a script; a number waits that many seconds, `None` blocks until cancelled, a `threading.Event` until
    it is set, an error is raised."""

    def __init__(self, request_id: RequestId, script: tuple[object, ...]) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = FINISHED.usage.num_prompt_tokens
        self.num_marked_tokens = 0
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self.may_poll = threading.Event()
        self.may_poll.set()
        self.num_polls = 0
        self._script = script

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        try:
            yield from self._events(poll_seconds)
        finally:
            self.ended.set()

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        self.cancelled.wait(seconds)

    def cancel(self) -> None:
        self.cancelled.set()

    def _events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        for step in self._script:
            if step is None or isinstance(step, float | threading.Event):
                end = time.monotonic() + (step if isinstance(step, float) else 3600)
                while time.monotonic() < end and not (isinstance(step, threading.Event) and step.is_set()):
                    self.may_poll.wait(PATIENCE_SECONDS)
                    if self.cancelled.wait(poll_seconds):
                        yield FINISHED
                        return
                    self.num_polls += 1
                    yield Waiting(1, 3)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step  # type: ignore[misc]


class BroughtTurn(ScriptedTurn):
    """Words that another thread brings, as the engine's does: the script is what each token says, or raises."""

    def __init__(self, request_id: RequestId, script: tuple[object, ...]) -> None:
        super().__init__(request_id, script)
        request = GenerationRequest(request_id, TokenSequence((1, 2, 3)), len(script), SamplingParams(), frozenset())
        self.generation = RequestHandle(request)
        self.threads: list[str] = []

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        self.generation.wait(seconds, read)

    def wait_until_idle(self) -> None:
        """Until its own thread waits: the next token is read where it arrives."""
        assert eventually(lambda: self.generation._reader is not None)

    def _events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        for batch in self.generation.batches(poll_seconds):
            for event in batch:
                self.threads.append(threading.current_thread().name)
                said = self._script[event.token] if isinstance(event, TokenDelta) else FINISHED
                if isinstance(said, Exception):
                    raise said
                yield said  # type: ignore[misc]
            if not batch:
                yield Waiting(3, 3)


@dataclass
class FakeService:
    """The process behind the server: every turn plays `script`; submitting may fail with `refusal`."""

    script: tuple[object, ...] = HELLO
    turn: type[ScriptedTurn] = ScriptedTurn
    refusal: RequestError | None = None
    is_ready: bool = True
    is_draining: bool = False
    turns: "queue.Queue[ScriptedTurn]" = field(default_factory=queue.Queue)
    received: list[Turn] = field(default_factory=list)
    defaults: RequestDefaults = RequestDefaults(SamplingParams(), 128, True, None)
    name: str = "tiny/model"
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(None, print))
    errors: list[tuple[str, int]] = field(default_factory=list)
    forgotten: list[tuple[str | None, str | None]] = field(default_factory=list)

    def begin(self, turn: Turn) -> "FakeService":
        if turn.model == "refused":
            raise NotFound("The model 'refused' is not served here.", param="model")
        return self

    def list_models(self) -> list[ModelCard]:
        return [ModelCard(self.name, 1, 4096)]

    @property
    def observability(self) -> "FakeService":
        return self

    def count_error(self, endpoint: str, status: int) -> None:
        self.errors.append((endpoint, status))

    def clear_cache(self) -> bool:
        self.forgotten.append((None, None))
        return True

    def forget(self, session: str | None, principal: str | None) -> JsonObject:
        self.forgotten.append((session, principal))
        return {"num_responses": 1}

    def explain(self, request_id: str | None, key: str) -> JsonObject:
        return {"request_id": request_id, "key": key}

    def health(self) -> tuple[int, JsonObject]:
        state = {"draining": self.is_draining, "num_waiting": 0}
        return (200, {"status": "ok", **state}) if self.is_ready else (503, {"status": "loading", **state})

    def drain(self, *, is_draining: bool) -> JsonObject:
        self.is_draining = is_draining
        return {"draining": is_draining, "num_running": 0, "num_waiting": 0}

    def count_tokens(self, turn: Turn, served: object) -> int:
        return FINISHED.usage.num_prompt_tokens

    def serve(self, turn: Turn, served: object) -> ScriptedTurn:
        if self.refusal is not None:
            raise self.refusal
        self.received.append(turn)
        running = self.turn(turn.request_id, self.script)
        self.turns.put(running)
        return running


@dataclass
class Served:
    """A running server, its service and what it reported."""

    server: HttpServer
    service: FakeService
    reports: list[str]

    def connect(self) -> "RawClient":
        return RawClient(self.server.port)


@contextlib.contextmanager
def serving(service: FakeService | None = None, **changes: object) -> Iterator[Served]:
    """A server with `SETTINGS` changed as given; at the end it is closed and must leave no thread."""
    service = service or FakeService()
    reports: list[str] = []
    server = HttpServer(replace(SETTINGS, **changes), make_router(service), reports.append)  # type: ignore[arg-type]
    server.bind()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kvserve.web.http_server._ACCEPT_POLL_SECONDS", 0.01
        )  # so long its end is waited for, in every test
        server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvserve.web.http_server._LAST_JOIN_SECONDS", PATIENCE_SECONDS)
        try:
            yield Served(server, service, reports)
        finally:
            assert server.close(PATIENCE_SECONDS), "a connection's thread is still alive"


@dataclass(frozen=True)
class Response:
    """A whole answer; header names in lower case, a chunked body put together."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, object]:
        error = self.json["error"]
        assert isinstance(error, dict)
        return error

    @property
    def events(self) -> list[str]:
        """The data of every event of a stream, comments left out."""
        assert self.body.endswith(b"\n\n")
        blocks = self.body.decode().split("\n\n")[:-1]
        return [block.removeprefix("data: ") for block in blocks if not block.startswith(": ")]

    @property
    def comments(self) -> list[str]:
        """The comments of a stream: what clients pass over."""
        return [block[2:] for block in self.body.decode().split("\n\n") if block.startswith(": ")]


class RawClient:
    """A TCP client that sends what it is told and reads answers strictly."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(
        self, method: str, path: str, payload: object = None, headers: dict[str, str] | None = None
    ) -> Response:
        self.send(encode_request(method, path, payload, headers))
        return self.read_response(method)

    def read_head(self) -> tuple[int, dict[str, str]]:
        status_line = self.file.readline()
        assert status_line.startswith(b"HTTP/1.1 ") and status_line.endswith(b"\r\n"), status_line
        headers: dict[str, str] = {}
        while (line := self.file.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(": ")
            assert line.endswith(b"\r\n") and name.lower() not in headers, line
            headers[name.lower()] = value.rstrip("\r\n")
        return int(status_line.split()[1]), headers

    def read_chunk(self) -> bytes:
        size = int(self.file.readline(), 16)
        data = self.file.read(size)
        assert self.file.read(2) == b"\r\n"
        return data

    def read_response(self, method: str = "GET") -> Response:
        status, headers = self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            chunks = list(iter(self.read_chunk, b""))
            return Response(status, headers, b"".join(chunks))
        if method == "HEAD" or status in (100, 204):
            return Response(status, headers, b"")
        if "content-length" in headers:
            return Response(status, headers, self.file.read(int(headers["content-length"])))
        return Response(status, headers, self.file.read())

    def is_closed(self) -> bool:
        """Whether the server ends the connection (waits for it)."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True


def encode_request(
    method: str, path: str, payload: object = None, headers: dict[str, str] | None = None, host: str = "localhost"
) -> bytes:
    body = b"" if payload is None else payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    fields = {"Host": host, **(headers or {})}
    if payload is not None and "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether the condition holds within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def num_live_threads(server: HttpServer) -> int:
    """Threads of connections that run at this moment."""
    return 0 if server._listener is None else server._listener.num_live_threads
