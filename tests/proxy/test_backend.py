"""What the guard takes to kvserve itself, past LiteLLM: from the guard alone to a web server of ours, and through the
process in which LiteLLM runs.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvserve.core import JsonObject, key_digest
from kvserve.proxy.asgi import App, Message, Scope
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.entry import Backend
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.web import dashboard_pages
from kvserve.web.dashboard_pages import FILES
from tests.proxy.stubs import LISTED, SERVED, Client
from tests.proxy.stubs import Backend as Behind
from tests.proxy.test_guard import header, piece, scope_of, unasked
from tests.proxy.test_native import Wire, wire
from tests.web.fakes import PATIENCE_SECONDS, Served, eventually, serving
from tests.web.test_dashboard_pages import WatchedService

__all__ = ["wire"]

SECRET = "a-secret-of-both"


class WholeService(WatchedService):
    """A service that answers all that is asked of a server about itself."""

    def cache_report(self) -> JsonObject:
        return {"num_tokens": 7}

    def metrics(self) -> bytes:
        return b"kvserve_up 1\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """kvserve's own port, which believes the proxy."""
    monkeypatch.setattr(dashboard_pages, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(dashboard_pages, "LOOK_SECONDS", 0.005)
    with serving(WholeService(name=SERVED), proxy_secret=SECRET) as server:
        yield server


def rules(served: Served, api_key: str | None = None) -> GuardRules:
    here = BackendAddress("kvserve", f"http://127.0.0.1:{served.server.port}", api_key)
    return GuardRules("127.0.0.1", LISTED, backend_model_id=SERVED, backends=(here,), api_key=api_key, secret=SECRET)


def ask(
    served: Served, scope: Scope, body: bytes = b"", api_key: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what the guard answers; LiteLLM is not to be asked."""
    sent = follow(rules(served, api_key), scope, body)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, _whole(sent)


def follow(told: GuardRules, scope: Scope, body: bytes = b"", num_events: int | None = None) -> list[Message]:
    """What the guard sends to a client that stays until the answer's end, or until so many events have come."""
    sent: list[Message] = []

    async def run() -> None:
        pending, left = [piece(body)], asyncio.Event()

        async def receive() -> Message:
            if not pending:
                await left.wait()
            return pending.pop() if pending else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if num_events is not None and _whole(sent).count(b"data: ") >= num_events:
                left.set()

        guard = Guard(unasked, Backend(), told)
        await asyncio.wait_for(guard(scope, receive, send), PATIENCE_SECONDS)

    asyncio.run(run())
    return sent


def _whole(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/v1/cache"),
        ("GET", "/v1/cache/explain"),
        ("GET", "/v1/cache/explain/chatcmpl-req1"),
        ("POST", "/v1/cache/prewarm"),
        ("GET", f"/v1/models/{SERVED}"),
        ("GET", "/v1/models/nobody/knows"),
        ("GET", "/"),
        ("GET", "/dashboard"),
        ("GET", "/dashboard/sessions/unknown"),
        ("POST", "/v1/models/load"),
        *(("GET", f"/dashboard/{name}") for name in FILES),
    ],
)
def test_the_answer_is_the_servers_own(served: Served, method: str, path: str) -> None:
    """Status, body, type and policy, as on its own port; only the request's id and the time are others."""
    status, headers, body = ask(served, scope_of(method, path))
    with served.connect() as client:
        there = client.request(method, path, b"" if method == "POST" else None)
    assert (status, body) == (there.status, there.body)
    kept = ("content-type", "content-length", "content-security-policy", "cache-control")
    assert {name: headers.get(name) for name in kept} == {name: there.headers.get(name) for name in kept}
    assert headers["x-request-id"].startswith("req")


def test_its_health_is_the_servers_own_and_says_that_it_believes_the_proxy(served: Served) -> None:
    """The only word of it that is another one on its own port."""
    status, headers, body = ask(served, scope_of("GET", "/health"))
    with served.connect() as client:
        there = client.request("GET", "/health", None)
    assert (status, json.loads(body)) == (there.status, {**json.loads(there.body), "knows_proxy": True})
    assert json.loads(there.body)["knows_proxy"] is False
    status, others, body = ask(served, scope_of("HEAD", "/health"))
    assert (status, others["content-length"], body) == (200, headers["content-length"], b"")


def test_the_root_leads_a_browser_on_here_too(served: Served) -> None:
    """To the dashboard of the port that was asked."""
    status, headers, _ = ask(served, scope_of("GET", "/", accept="text/html"))
    assert (status, headers["location"]) == (302, "/dashboard")


def test_what_is_to_be_forgotten_is_forgotten(served: Served) -> None:
    """The query goes on as it was sent."""
    for query, forgotten in ((b"session=a%20b%26c", ("a b&c", None)), (b"", (None, None))):
        scope = scope_of("DELETE", "/v1/cache") | {"query_string": query}
        assert ask(served, scope)[0] == 200
        assert served.service.forgotten[-1] == forgotten
    assert ask(served, scope_of("DELETE", "/v1/cache") | {"query_string": b"sesion=a"})[0] == 400


@pytest.mark.parametrize("path", [f"/v1/models/{LISTED}", f"/models/{LISTED}", f"/models/{SERVED}"])
def test_the_model_that_the_proxy_lists_is_found(served: Served, path: str) -> None:
    """Under the name that stands in its list, which the server itself does not list."""
    status, _, body = ask(served, scope_of("GET", path))
    assert (status, json.loads(body)["id"]) == (200, SERVED)


def test_an_explanation_is_the_askers_own(served: Served) -> None:
    """The server is told whose key it was; nobody names another one."""
    for sent, key in (
        ({"x_api_key": "mine"}, key_digest({"x-api-key": "mine"})),
        ({"authorization": "Bearer mine", "x_kvserve_key": "0123456789abcdef"}, key_digest({"x-api-key": "mine"})),
        ({"x_kvserve_key": f"{SECRET} 0123456789abcdef"}, ""),
    ):
        _, _, body = ask(served, scope_of("GET", "/v1/cache/explain/req1", **sent))
        assert json.loads(body) == {"request_id": "req1", "key": key}


@pytest.mark.parametrize("path", ["/v1/cache", "/metrics", "/dashboard/events", "/v1/models/x", "/v1/cache/explain"])
def test_with_a_key_it_is_asked_for(path: str) -> None:
    """On both ports by the same key; whoever has it is asked nothing more behind the guard."""
    with serving(WholeService(), proxy_secret=SECRET, api_key="k") as served:
        assert ask(served, scope_of("GET", path), api_key="k")[0] == 401
        assert ask(served, scope_of("GET", path, x_api_key="other"), api_key="k")[0] == 401
        assert ask(served, scope_of("GET", "/dashboard/../v1/cache"), api_key="k")[0] == 404
        assert ask(served, scope_of("GET", "/health"), api_key="k")[0] == 200
        assert ask(served, scope_of("GET", "/dashboard"), api_key="k")[0] == 200
        assert ask(served, scope_of("GET", "/v1/cache", authorization="Bearer k"), api_key="k")[0] == 200


def test_a_path_that_climbs_is_not_tidied_up(served: Served) -> None:
    """It is none: what the guard judged as a file of the dashboard another one, between it and the server, might take
    for an operator's report."""
    climbing = ("/dashboard/../v1/cache", "/dashboard/./events", "/v1/models/../cache", "/v1/cache/explain/../../cache")
    for path in (*climbing, "/v1/models/%2e%2e/cache", "/backends/kvserve/dashboard/../v1/cache"):
        status, _, body = ask(served, scope_of("GET", path))
        assert (status, b"serves this path" in body) == (404, True), path


def test_events_come_as_they_are_sent_until_the_reader_leaves(served: Served) -> None:
    """One by one, although the answer has no end; then the server's place for a watcher is free."""
    events = follow(rules(served), scope_of("GET", "/dashboard/events"), num_events=3)
    assert header(events, b"content-type") == b"text/event-stream; charset=utf-8"
    data = [line.removeprefix(b"data: ") for line in _whole(events).splitlines() if line]
    assert [json.loads(each)["number"] for each in data][:3] == [1, 2, 3]
    assert eventually(lambda: served.server.num_open_connections == 0)


def test_a_server_that_is_gone_is_a_503() -> None:
    """In OpenAI's form, with a page that may read it."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        scope = scope_of("GET", "/health", origin="http://localhost:1")
        sent = follow(GuardRules("127.0.0.1", "m", backends=(BackendAddress("kvserve", url),)), scope)
    assert (sent[0]["status"], header(sent, b"access-control-allow-origin")) == (503, b"http://localhost:1")
    assert json.loads(sent[1]["body"])["error"]["type"] == "server_error"


def test_an_answer_that_breaks_off_breaks_off_here_too() -> None:
    """Half an answer is never passed off as a whole one."""

    def half(connection: socket.socket) -> None:
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")

    sent: list[Message] = []
    with _answering(half) as url, pytest.raises(Exception, match="closed connection"):
        asyncio.run(_collect(Backend().of(BackendAddress("kvserve", url)), sent))
    assert [message.get("body") for message in sent] == [None, b"half"]


async def _collect(app: App, sent: list[Message]) -> None:
    async def receive() -> Message:
        return piece(b"")

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope_of("GET", "/health") | {"raw_path": b"/health"}, receive, send)


@contextlib.contextmanager
def _answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A port that treats its first connection so and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


# --- a real LiteLLM --------------------------------------------------------------------------------------------------


def test_the_servers_own_health_is_reached(client: Client, wire: Wire) -> None:
    """LiteLLM's would ask the model for an answer each time, and names no cache."""
    wire.pieces = [b'{"status":"ok","num_running":0}']
    for method, path in (("GET", "/health"), ("GET", f"/v1/models/{LISTED}"), ("DELETE", "/v1/cache?session=a%20b")):
        reply = client.send(method, path, headers={"authorization": "Bearer mine"})
        assert (reply.status, reply.headers["x-request-id"]) == (200, "r1"), reply.raw
        assert reply.raw == wire.pieces[0]
    assert [(got.method, got.path, "authorization" in got.headers) for got in wire.arrived] == [
        ("GET", "/health", False),
        ("GET", f"/v1/models/{SERVED}", False),
        ("DELETE", "/v1/cache?session=a%20b", False),
    ]


def test_the_dashboards_stream_ends_with_its_reader(client: Client, wire: Wire, session_backend: Behind) -> None:
    """Its events arrive while it goes on, and the server hears that the page was closed."""
    wire.kind, wire.pieces, wire.pause_seconds = "text/event-stream", [b'data: {"number":1}\n\n'] * 4000, 0.05
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as page:
        page.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = b""
        while got.count(b"data: ") < 3:
            got += page.recv(1000)
    assert b"text/event-stream" in got
    assert eventually(lambda: wire.num_broken == 1)
