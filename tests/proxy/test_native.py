"""Requests that are passed on as they are: through the guard alone, and byte for byte through a real LiteLLM."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvserve.errors import MethodNotAllowed, NotFound
from kvserve.proxy.asgi import Message, Receive, Scope, Send
from kvserve.proxy.envelope import pass_through_endpoint, run_while_wanted
from kvserve.proxy.guard import GuardRules
from kvserve.proxy.paths import find_route
from tests.proxy.stubs import KEY, Backend, Client, Script
from tests.proxy.test_guard import HERE, RULES, Inner, call, header, piece, scope_of

PATH = "/v1/responses"
RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings" / "codex"


# --- the guard -------------------------------------------------------------------------------------------------------


def test_litellm_gets_the_place_of_its_endpoint_and_the_bytes_beside_it() -> None:
    """LiteLLM reads an empty object; the body travels in the request's state."""
    raw = b'{ "stream": true, "input": "\\u00e9", "metadata": {"a": [1.0, null]} }'
    inner = Inner()
    sent = call(inner, scope_of(path=PATH, session_id="s-12345678"), piece(raw))
    [(scope, body, exchange)] = inner.seen
    assert sent[0]["status"] == 200 and exchange is None
    assert body == b"{}"
    assert raw in scope["state"].values()
    assert scope["path"] == f"{pass_through_endpoint(HERE)['path']}{PATH}"
    headers = dict(scope["headers"])
    assert headers[b"x-session-id"] == b"s-12345678" and headers[b"content-length"] == str(len(body)).encode()


def test_the_servers_key_goes_on_however_the_client_sent_it() -> None:
    """LiteLLM and the backend read `Authorization`."""
    rules = GuardRules("127.0.0.1", "openai/m", api_key=KEY)
    inner = Inner()
    call(inner, scope_of(path=PATH, x_api_key=KEY), piece(b"{}"), rules=rules)
    headers = inner.seen[0][0]["headers"]
    assert [value for name, value in headers if name in (b"authorization", b"x-api-key")] == [f"Bearer {KEY}".encode()]
    sent = call(inner, scope_of(path=PATH, x_api_key="wrong"), piece(b"{}"), rules=rules)
    assert sent[0]["status"] == 401 and len(inner.seen) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 900])
def test_what_is_no_good_body_is_left_to_the_backend(body: bytes) -> None:
    """It judges in its own words."""
    inner = Inner()
    call(inner, scope_of(path=PATH), piece(body))
    assert body in inner.seen[0][0]["state"].values()


def test_a_body_over_the_limit_is_refused_here() -> None:
    """LiteLLM never sees it."""
    inner = Inner()
    sent = call(inner, scope_of(path=PATH), piece(b"x" * (RULES.max_body_bytes + 1)))
    assert sent[0]["status"] == 413 and not inner.seen


def test_errors_of_the_backend_are_passed_on() -> None:
    """Status, body and request id."""
    error = b'{"error": {"message": "m"}}'
    inner = Inner(status=404, body=error, headers=[(b"x-request-id", b"r9")])
    sent = call(inner, scope_of("GET", f"{PATH}/resp_1"), piece(b""))
    assert (sent[0]["status"], sent[1]["body"], header(sent, b"x-request-id")) == (404, error, b"r9")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (PATH, ("POST",)),
        (f"{PATH}/resp_1", ("GET", "DELETE")),
        (f"{PATH}/resp_1/input_items", ("GET", "DELETE")),
        ("/v1/agents", ("GET", "POST")),
        ("/v1/agents/one/generate", ("GET", "POST", "DELETE")),
    ],
)
def test_which_paths_are_passed_on(path: str, methods: tuple[str, ...]) -> None:
    """The endpoint and what lies below it."""
    for method in methods:
        assert (find_route(method, path).way, find_route(method, path).path) == ("as it is", path)
    assert find_route("POST", "/v1/chat/completions").way == "litellm"


@pytest.mark.parametrize("path", [f"{PATH}/", f"{PATH}x", "/as-it-is", f"/as-it-is{PATH}"])
def test_nobody_reaches_litellms_place_for_it(path: str) -> None:
    """Nor what lies beside the endpoint."""
    with pytest.raises(NotFound):
        find_route("POST", path)


def test_a_method_that_is_not_served_is_refused() -> None:
    """Before LiteLLM, whose own endpoint might take it."""
    with pytest.raises(MethodNotAllowed):
        find_route("PUT", f"{PATH}/resp_1")


def test_a_client_that_leaves_ends_the_request_inside() -> None:
    """LiteLLM would go on waiting for an answer that nobody wants."""
    ended: list[str] = []

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def leave() -> None:
        async def receive() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            return None

        await run_while_wanted(waiting, {}, b"", receive, send)

    asyncio.run(leave())
    assert ended == ["cancelled"]


# --- a real LiteLLM --------------------------------------------------------------------------------------------------


@dataclass
class Arrived:
    """A request at the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Wire:
    """A backend that keeps the bytes that it gets and sends those that it is told to, piece by piece."""

    pieces: list[bytes] = field(default_factory=lambda: [b"{}"])
    status: int = 200
    kind: str = "application/json"
    pause_seconds: float = 0.0
    num_broken: int = 0
    arrived: list[Arrived] = field(default_factory=list)


@pytest.fixture
def wire(session_backend: Backend) -> Iterator[Wire]:
    """The session's backend, answering bytes."""
    wire = Wire()
    session_backend.follow(Script())
    server: ThreadingHTTPServer = session_backend.server
    old = server.RequestHandlerClass

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            return None

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            wire.arrived.append(Arrived(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(wire.status)
            for name, value in (("content-type", wire.kind), ("x-request-id", "r1"), ("retry-after", "7")):
                self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for piece_ in wire.pieces:
                    self.wfile.write(piece_)
                    self.wfile.flush()
                    time.sleep(wire.pause_seconds)
            except ConnectionError:
                wire.num_broken += 1

        do_GET = do_DELETE = do_POST

    server.RequestHandlerClass = Handler  # type: ignore[method-assign]
    yield wire
    server.RequestHandlerClass = old  # type: ignore[method-assign]


ODD = (
    b'{ "stream":%b, "metadata": {"user_api_key_x": 1, "a": [1.0, 1e2, null]}, "user":"u","input":"\\u00e9\xc3\xa9", '
    b'"input":"2",\n "timeout": 5, "litellm_logging_obj": 1, "custom_body": {"x": 1}, "query_params": {"q": 1}, '
    b'"fallbacks": ["x"] }'
)
DELTA = "response.output_text.delta"
EVENT = f'event: {DELTA}\ndata: {{"delta": "\\u2028 [DONE] data: x", "type": "{DELTA}"}}\n\n'.encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_body_arrives_byte_for_byte(client: Client, wire: Wire, stream: bool) -> None:
    """Whatever LiteLLM takes for its own, drops or would write another way."""
    if stream:
        wire.kind, wire.pieces = "text/event-stream", [EVENT]
    raw = ODD % (b"true" if stream else b"false")
    reply = client.send("POST", f"{PATH}?a=1&b=%20x", raw, {"session_id": "sess-1234", "user-agent": "codex/1"})
    assert reply.status == 200, reply.raw
    [got] = wire.arrived
    assert got.body == raw
    assert got.path.partition("?")[0] == PATH and "a=1" in got.path
    assert got.headers["content-length"] == str(len(raw))
    assert got.headers["content-type"] == "application/json"
    assert (got.headers["user-agent"], got.headers["x-session-id"]) == ("codex/1", "sess-1234")


def test_recorded_bodies_arrive_byte_for_byte(client: Client, wire: Wire) -> None:
    """What Codex sent."""
    if not RECORDINGS.is_dir():
        pytest.skip(f"needs the recordings in {RECORDINGS}")
    wire.kind, wire.pieces = "text/event-stream", [EVENT]
    sent = [
        json.dumps(json.loads(path.read_text("utf-8"))["body"]).encode() for path in sorted(RECORDINGS.glob("*.json"))
    ]
    for raw in sent:
        assert client.send("POST", PATH, raw).raw == EVENT
    assert [got.body for got in wire.arrived] == sent


def test_a_stream_comes_back_byte_for_byte(client: Client, wire: Wire) -> None:
    """Names, order and every byte of the events, wherever the pieces are cut."""
    whole = EVENT * 3 + b'event: response.completed\ndata: {"type": "response.completed"}\n\n'
    wire.kind = "text/event-stream"
    wire.pieces, wire.pause_seconds = [whole[i : i + 50] for i in range(0, len(whole), 50)], 0.01
    reply = client.send("POST", PATH, b'{"stream": true, "input": "x"}')
    assert reply.raw == whole
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.headers["x-request-id"] == "r1"


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("status", [400, 404, 429, 503])
def test_an_error_comes_back_as_it_was(client: Client, wire: Wire, status: int, stream: bytes) -> None:
    """Status, body and when to ask again."""
    error = b'{"error": {"message": "m",  "type": "t", "param": "input", "code": null}}'
    wire.status, wire.pieces = status, [error]
    reply = client.send("POST", PATH, b'{"stream": %b}' % stream)
    assert (reply.status, reply.raw, reply.headers["retry-after"]) == (status, error, "7")
    assert reply.headers["x-request-id"] == "r1"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_stored_responses_are_reached(client: Client, wire: Wire, method: str) -> None:
    """Path and method arrive, without a body."""
    wire.pieces = [b'{"id":  "resp_1"}']
    path = f"{PATH}/resp_1" + ("/input_items?limit=2" if method == "GET" else "")
    reply = client.send(method, path)
    assert (reply.status, reply.raw) == (200, b'{"id":  "resp_1"}')
    [got] = wire.arrived
    assert (got.method, got.path, got.body) == (method, path, b"")


@pytest.mark.long
def test_the_key_is_asked_for_and_passed_on(keyed_client: Client, wire: Wire) -> None:
    """As bearer or x-api-key; a wrong one and none are refused by the guard."""
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert keyed_client.send("POST", PATH, b"{}", headers).status == 200
    assert [got.headers["authorization"] for got in wire.arrived] == [f"Bearer {KEY}"] * 2
    for headers in ({}, {"x-api-key": "wrong"}):
        assert keyed_client.send("POST", PATH, b"{}", headers).status == 401
    assert len(wire.arrived) == 2


def _leave(client: Client, backend: Backend, body: object) -> None:
    """Once the backend has the request: of one that LiteLLM has not passed on yet it hears nothing."""
    with client.open(body, PATH) as connection:
        while not backend.received:
            time.sleep(0.01)
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            connection.recv(10_000)
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("body", "script"),
    [
        ({"stream": True}, Script(events=[{"type": "x"}] * 4000, pause_seconds=0.05)),
        ({"stream": True}, Script(hold_seconds=200)),
        ({}, Script(hold_seconds=200)),
    ],
    ids=["in the stream", "before the first event", "without a stream"],
)
def test_a_client_that_leaves_is_noticed(
    client: Client, backend: Backend, body: dict[str, object], script: Script
) -> None:
    """The backend's connection is closed long before its answer would be at its end."""
    backend.follow(script)
    _leave(client, backend, body)
    assert backend.wait_until_left(60) is not None


def test_many_streams_at_once_are_told_apart(client: Client, wire: Wire) -> None:
    """Each gets its own bytes; nothing is shared between requests."""
    wire.kind, wire.pieces, wire.pause_seconds = "text/event-stream", [EVENT] * 5, 0.02
    replies: list[bytes] = []

    def work(number: int) -> None:
        replies.append(client.send("POST", PATH, json.dumps({"stream": True, "n": number}).encode()).raw)

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [EVENT * 5] * 8
    assert sorted(json.loads(got.body)["n"] for got in wire.arrived) == list(range(8))
