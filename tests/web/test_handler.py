"""Requests over real sockets: bad input of every kind, keep-alive, pipelining, bodies, methods and ids."""

import socket

import pytest

from kvserve.errors import MemoryExhausted, QueueFull
from tests.web.fakes import CHAT, PATIENCE_SECONDS, FakeService, RawClient, Served, encode_request, serving

POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def exchange_raw(served: Served, wire: bytes) -> tuple[int, dict[str, object], bool]:
    """Send bytes; the status, the error and whether the server closed the connection."""
    with served.connect() as client:
        client.send(wire)
        response = client.read_response()
        assert response.headers["x-request-id"].startswith("req")
        assert response.headers["request-id"] == response.headers["x-request-id"], "where Anthropic's SDK looks"
        return response.status, response.error, response.headers.get("connection") == "close" and client.is_closed()


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        ("\x16\x03\x01\x02\x00", 400),
        ("GET /health\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\n\r\n", 400),
        ("GET /health HTTP/3.0\r\nHost: a\r\n\r\n", 400),
        ("GET /health HTTP/1.1\nHost: localhost\n\nGET", 408),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + "a" * 5000, 431),
        ("GET /" + "a" * 5000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 40 + "\r\n", 431),
        (POST + "Content-Length: x\r\n\r\n", 400),
        (POST + "Content-Length: -1\r\n\r\n", 400),
        (POST + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
        (POST + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + "Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 400),
        (POST + "Content-Length: 100001\r\n\r\n{", 413),
        (POST + "Content-Length: " + "9" * 200 + "\r\n\r\n{", 413),
        (POST + "Transfer-Encoding: chunked\r\n\r\n186A1\r\n", 413),
        (POST + "Transfer-Encoding: chunked\r\n\r\nhello\r\n", 400),
        (POST + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}junk\r\n", 400),
        (POST + "Transfer-Encoding: chunked\r\n\r\n2\r\n{", 408),
        (POST + "Content-Length: 50\r\n\r\n{", 408),
        (POST + "Content", 408),
        ("GET /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 404),
        ("PATCH /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 405),
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 5\r\n\r\nhello", 403),
    ],
)
def test_bad_http_gets_its_status_and_the_connection_ends(wire: str, status: int) -> None:
    """Each is answered in OpenAI's error form and closed; the model is never asked, and the server serves on."""
    patience = 0.15 if status == 408 else PATIENCE_SECONDS
    with serving(header_timeout_seconds=patience, body_timeout_seconds=patience) as served:
        got, error, is_closed = exchange_raw(served, wire.encode("latin-1"))
        assert (got, is_closed) == (status, True)
        assert error["type"] in ("invalid_request_error", "permission_error") and error["message"]
        assert served.service.turns.empty()
        assert [counted for _, counted in served.service.errors] == [status]
        with served.connect() as client:
            assert client.request("GET", "/health").status == 200
        assert served.reports == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"messages": ' + b"9" * 5000 + b"}",
        b"{}",
        b'{"messages": []}',
        b'{"messages": [{"role": "alien", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -2}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    ],
)
def test_bad_bodies_are_400_and_the_connection_lives(body: bytes) -> None:
    """What arrived whole costs the client its request, not its connection; nothing is submitted."""
    with serving() as served, served.connect() as client:
        response = client.request("POST", "/v1/chat/completions", body)
        assert response.status == 400
        assert response.error["type"] == "invalid_request_error"
        assert "connection" not in response.headers
        assert client.request("POST", "/v1/chat/completions", CHAT).status == 200
        assert len(served.service.received) == 1


def test_a_post_without_a_length_is_411() -> None:
    """It has no body, so the connection can go on."""
    with serving() as served, served.connect() as client:
        client.send((POST + "\r\n").encode())
        assert client.read_response().status == 411
        assert client.request("GET", "/health").status == 200


def test_a_body_too_large_is_refused_while_it_is_being_sent() -> None:
    """A client that sends on regardless is not reset before it reads the 413; what it sends is dropped, not kept."""
    with serving(linger_seconds=5) as served, served.connect() as client:
        client.send((POST + "Content-Length: 30000000\r\n\r\n").encode())
        for _ in range(30):
            client.send(b"x" * 1_000_000)
        assert client.read_response().status == 413
        client.socket.shutdown(socket.SHUT_WR)
        assert client.is_closed()


def test_many_requests_share_a_connection() -> None:
    """Keep-alive works after plain answers, streams and errors alike."""
    with serving() as served, served.connect() as client:
        for _ in range(3):
            assert client.request("GET", "/health").status == 200
            assert client.request("POST", "/v1/chat/completions", {**CHAT, "stream": True}).status == 200
            assert client.request("GET", "/v1/models/other").status == 404
            assert client.request("GET", "/nothing").status == 404
        assert served.server.num_open_connections == 1


def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent ahead are no disconnect of the one that runs, and each gets its answer."""
    service = FakeService(script=(0.2, *FakeService().script))
    with serving(service) as served, served.connect() as client:
        stream = encode_request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        client.send(stream + encode_request("POST", "/v1/chat/completions", CHAT) + encode_request("GET", "/health"))
        assert client.read_response().events[-1] == "[DONE]"
        assert client.read_response().json["object"] == "chat.completion"
        assert client.read_response().json["status"] == "ok"


def test_the_wish_to_close_is_kept() -> None:
    """`Connection: close` and HTTP/1.0 end the connection after the answer."""
    with serving() as served:
        with served.connect() as client:
            response = client.request("GET", "/health", headers={"Connection": "Close"})
            assert response.headers["connection"] == "close" and client.is_closed()
        with served.connect() as client:
            client.send(b"GET /health HTTP/1.0\r\n\r\n")
            assert client.read_response().headers["connection"] == "close" and client.is_closed()


def test_a_stream_for_http_1_0_has_no_chunks() -> None:
    """Its end is the end of the connection."""
    with serving() as served, served.connect() as client:
        wire = encode_request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        client.send(wire.replace(b"HTTP/1.1", b"HTTP/1.0"))
        response = client.read_response()
        assert "transfer-encoding" not in response.headers
        assert response.events[-1] == "[DONE]"


def test_an_idle_connection_is_closed() -> None:
    """After the idle time, without a word; no other limit would have ended it."""
    others = {"header_timeout_seconds": 600.0, "body_timeout_seconds": 600.0}
    with serving(idle_timeout_seconds=0.2, **others) as served, served.connect() as client:
        client.request("GET", "/health")
        assert client.is_closed()


@pytest.mark.parametrize("sizes", [(1,), (7, 30, 1), (10_000,)])
def test_chunked_bodies_are_understood(sizes: tuple[int, ...]) -> None:
    """In chunks of any size, with extensions and trailers."""
    body = encode_request("POST", "/", CHAT).partition(b"\r\n\r\n")[2]
    wire, position = b"", 0
    while position < len(body):
        piece = body[position : position + sizes[position % len(sizes)]]
        wire += b"%x;a=b\r\n%b\r\n" % (len(piece), piece)
        position += len(piece)
    with serving() as served, served.connect() as client:
        client.send((POST + "Transfer-Encoding: chunked\r\n\r\n").encode() + wire + b"0\r\nTrailer: 1\r\n\r\n")
        assert client.read_response().status == 200
        assert client.request("GET", "/health").status == 200


def test_a_client_that_asks_first_is_told_to_continue() -> None:
    """`Expect: 100-continue` gets its interim answer, or the final refusal without the body being sent."""
    with serving() as served, served.connect() as client:
        wire = encode_request("POST", "/v1/chat/completions", CHAT, {"Expect": "100-Continue"})
        head, _, body = wire.partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert client.read_head() == (100, {})
        client.send(body)
        assert client.read_response().status == 200
        client.send((POST + "Content-Length: 100001\r\nExpect: 100-continue\r\n\r\n").encode())
        assert client.read_response().status == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", "/health", 200, None),
        ("HEAD", "/nothing", 404, None),
        ("OPTIONS", "/health", 204, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "/v1/chat/completions", 204, "OPTIONS, POST"),
        ("OPTIONS", "*", 204, "OPTIONS"),
        ("OPTIONS", "/nothing", 404, None),
        ("GET", "/v1/chat/completions", 405, "OPTIONS, POST"),
        ("DELETE", "/v1/models/a/b", 405, "GET, HEAD, OPTIONS"),
        ("TRACE", "/health", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/v1/chat/completions/", 404, None),
        ("GET", "/V1/models", 404, None),
        ("GET", "/v1/models/", 404, None),
    ],
)
def test_methods_and_paths(method: str, path: str, status: int, allow: str | None) -> None:
    """Unknown paths are 404, known ones with another method 405 with Allow; HEAD has no body."""
    with serving() as served, served.connect() as client:
        response = client.request(method, path)
        assert (response.status, response.headers.get("allow")) == (status, allow)
        if status >= 400 and method != "HEAD":
            assert response.error["type"] == "invalid_request_error"
        assert client.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ({"x-request-id": "my-id_1"}, "my-id_1"),
        ({"X-Client-Request-Id": "other"}, "other"),
        ({"x-request-id": "a b"}, None),
        ({"x-request-id": "a" * 65}, None),
        ({}, None),
    ],
)
def test_every_answer_has_its_own_id(sent: dict[str, str], echoed: str | None) -> None:
    """The server's id is new each time and inside the body's id; a client's sane one comes back beside it."""
    with serving() as served, served.connect() as client:
        seen = set()
        for path, payload in (("/v1/chat/completions", CHAT), ("/nothing", None), ("/v1/completions", {})):
            response = client.request("GET" if payload is None else "POST", path, payload, sent)
            request_id = response.headers["x-request-id"]
            assert len(request_id) == 27 and response.headers.get("x-client-request-id") == echoed
            assert "id" not in response.json or request_id in str(response.json["id"])
            seen.add(request_id)
        assert len(seen) == 3


def test_a_defect_answers_500_and_is_reported() -> None:
    """An unexpected exception is told with its traceback to the operator, not to the client, and serving goes on."""
    with serving(FakeService(script=(ZeroDivisionError("secret"),))) as served:
        with served.connect() as client:
            response = client.request("POST", "/v1/chat/completions", CHAT)
            assert (response.status, response.headers["connection"]) == (500, "close")
            assert response.error["type"] == "server_error" and b"secret" not in response.body
            assert client.is_closed()
        (report,) = served.reports
        assert "ZeroDivisionError: secret" in report and response.headers["x-request-id"] in report
        with served.connect() as client:
            response = client.request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            assert response.status == 200 and '"server_error"' in response.events[-2]
            assert client.is_closed()


@pytest.mark.parametrize(
    ("refusal", "status", "seconds"),
    [
        (QueueFull("full", retry_after_seconds=7), 429, "7"),
        (QueueFull("full"), 429, "1"),
        (MemoryExhausted("no room"), 503, "2"),
    ],
)
def test_overload_says_when_to_come_back(refusal: QueueFull | MemoryExhausted, status: int, seconds: str) -> None:
    """429 and 503 carry Retry-After, streamed or not, as plain errors before any stream begins."""
    with serving(FakeService(refusal=refusal)) as served, served.connect() as client:
        for payload in (CHAT, {**CHAT, "stream": True}):
            response = client.request("POST", "/v1/chat/completions", payload)
            assert (response.status, response.headers["retry-after"]) == (status, seconds)
            assert response.error["code"] == refusal.code


def test_the_key_guards_all_but_health() -> None:
    """With a key set, /health stays open; unknown paths tell nothing without it."""
    with serving(api_key="s3cret") as served, served.connect() as client:
        assert client.request("GET", "/health").status == 200
        for path in ("/v1/models", "/nothing"):
            response = client.request("GET", path)
            assert (response.status, response.error["type"]) == (401, "authentication_error")
        assert client.request("GET", "/v1/models", headers={"x-api-key": "s3cret"}).status == 200
        assert client.request("GET", "/v1/models", headers={"Authorization": "Bearer s3cret"}).status == 200


def test_pages_of_allowed_origins_may_call_others_not() -> None:
    """A preflight is answered without a key; a foreign page gets 403 and no permission to read even that."""
    with serving(api_key="k", allowed_origins=("https://ui.example",)) as served, served.connect() as client:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        granted = client.request("OPTIONS", "/v1/models", headers={"Origin": "https://ui.example", **asks})
        assert granted.status == 204
        assert granted.headers["access-control-allow-origin"] == "https://ui.example"
        assert granted.headers["access-control-allow-headers"] == "authorization"
        answer = client.request("GET", "/health", headers={"Origin": "https://ui.example"})
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"
        unauthorized = client.request("GET", "/v1/models", headers={"Origin": "https://ui.example"})
        assert unauthorized.headers["access-control-allow-origin"] == "https://ui.example"
        for method, more in (("OPTIONS", asks), ("GET", {})):
            refused = client.request(method, "/health", headers={"Origin": "https://evil.example", **more})
            assert (refused.status, refused.error["type"]) == (403, "permission_error")
            assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:8000"])
def test_pages_of_this_machine_may_call(origin: str) -> None:
    """A web app beside the server: its preflight, its answers, streams and errors."""
    wanted = "authorization,content-type,x-api-key,x-session-id,anthropic-version,anthropic-beta"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    with serving(api_key="k") as served, served.connect() as client:
        own, key = {"Origin": origin}, {"x-api-key": "k"}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            granted = client.request("OPTIONS", path, headers=own | asks)
            assert (granted.status, granted.headers["access-control-allow-headers"]) == (204, wanted)
            assert "POST" in granted.headers["access-control-allow-methods"]
            assert granted.headers["access-control-allow-origin"] == origin
        answers = [
            client.request("POST", "/v1/chat/completions", CHAT, own | key),
            client.request("POST", "/v1/chat/completions", {**CHAT, "stream": True}, own | key),
            client.request("POST", "/v1/chat/completions", {}, own | key),
            client.request("POST", "/v1/chat/completions", CHAT, own),
        ]
        assert [answer.status for answer in answers] == [200, 200, 400, 401]
        assert {answer.headers["access-control-allow-origin"] for answer in answers} == {origin}
        assert all("x-request-id" in answer.headers["access-control-expose-headers"] for answer in answers)


def test_clients_that_vanish_before_their_error_is_written_are_no_defect() -> None:
    """Nothing is reported."""
    with serving() as served:
        for _ in range(20):
            client = RawClient(served.server.port)
            client.send((POST + "Content-Length: 100001\r\n\r\n").encode())
            client.close()
        assert served.reports == []
