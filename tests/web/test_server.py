"""The server's life over real sockets: taking the port, the limit on connections, slow clients, and its end."""

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from kvserve.core import ContentDelta
from kvserve.errors import PortTaken, SettingError
from kvserve.web import connections
from kvserve.web.http_server import HttpServer
from kvserve.web.routes import make_router
from tests.web.fakes import (
    CHAT,
    FINISHED,
    PATIENCE_SECONDS,
    SETTINGS,
    FakeService,
    RawClient,
    Served,
    encode_request,
    eventually,
    num_live_threads,
    serving,
)

STREAM_WIRE = encode_request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
WHOLE_WIRE = encode_request("POST", "/v1/chat/completions", CHAT)


def server_on(host: str, port: int) -> HttpServer:
    """A server that is not bound yet."""
    return HttpServer(replace(SETTINGS, host=host, port=port), make_router(FakeService()), [].append)


def phases(served: Served) -> list[str]:
    """What the connections are at, in the order of the alphabet."""
    return sorted(entry.phase for entry in tuple(served.server._connections._open))


@pytest.fixture
def long_room_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for room waits longer than any client of these tests."""
    monkeypatch.setattr(connections, "_ROOM_WAIT_SECONDS", 10 * PATIENCE_SECONDS)


@pytest.mark.parametrize("held_on", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_an_error_that_names_its_holder(held_on: str) -> None:
    """Whoever listens there, on loopback or everywhere, keeps the port."""
    with socket.create_server((held_on, 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=f"Port {port} on 127.0.0.1 is taken by .*MLX_PORT"):
            server_on("127.0.0.1", port).bind()


def test_a_bound_socket_that_does_not_listen_keeps_its_port_too() -> None:
    """Nobody answers the probe; binding itself then tells."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(PortTaken):
            server_on("127.0.0.1", holder.getsockname()[1]).bind()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "é..b"])
def test_an_unusable_address_names_the_setting(host: str) -> None:
    """An address of another machine, none at all, or what can be no name."""
    with pytest.raises(SettingError, match="MLX_HOST"):
        server_on(host, 0).bind()


def test_the_port_is_free_again_after_the_end() -> None:
    """A second server can take it at once, also while old connections linger in TIME_WAIT."""
    with serving() as served:
        port = served.server.port
        with served.connect() as client:
            client.request("GET", "/health", headers={"Connection": "close"})
            assert client.is_closed()
    again = server_on("127.0.0.1", port)
    again.bind()
    assert again.port == port
    assert again.close(PATIENCE_SECONDS)


def test_ipv6_loopback() -> None:
    """`::1` works as an address to listen on."""
    server = HttpServer(replace(SETTINGS, host="::1"), make_router(FakeService()), [].append)
    server.bind()
    server.start()
    with socket.create_connection(("::1", server.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(encode_request("GET", "/health", host=f"[::1]:{server.port}", headers={"Connection": "close"}))
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.close(PATIENCE_SECONDS)


def test_clients_may_connect_before_the_start() -> None:
    """Between bind and start connections wait instead of being refused."""
    server = server_on("127.0.0.1", 0)
    server.bind()
    with RawClient(server.port) as client:
        client.send(encode_request("GET", "/health"))
        server.start()
        assert client.read_response().status == 200
        assert server.close(PATIENCE_SECONDS)


def test_slow_heads_are_cut_off_one_by_one_and_together() -> None:
    """Drip-fed heads get 408 after the time for the whole head, and others are served meanwhile."""
    with serving(header_timeout_seconds=0.8, max_connections=30) as served, ExitStack() as stack:
        slow = [stack.enter_context(served.connect()) for _ in range(20)]
        started = time.monotonic()
        for client in slow:
            client.send(b"GET / HTTP/1.1\r\n")
        while time.monotonic() - started < 0.2:
            for client in slow:
                with suppress(ConnectionError):  # on a busy machine some were cut off before the others began
                    client.send(b"X")
            time.sleep(0.05)
        with served.connect() as client:
            assert client.request("GET", "/health").status == 200
        assert [client.read_response().status for client in slow] == [408] * 20
        assert time.monotonic() - started < 20 * 0.8, "not one after the other"
        assert eventually(lambda: num_live_threads(served.server) == 0)


def test_the_oldest_silent_connection_makes_room(long_room_wait: None) -> None:
    """At the limit idle and half-sent connections give way, oldest first; running streams do not."""
    with serving(FakeService(script=(None,)), max_connections=3) as served, ExitStack() as stack:
        streaming, idle, half_sent = (stack.enter_context(served.connect()) for _ in range(3))
        streaming.send(STREAM_WIRE)
        streaming.read_head()
        half_sent.send(b"GET / HT")
        assert eventually(lambda: served.server.num_open_connections == 3)
        idle.request("GET", "/health")
        # The server notes the silence after it has answered.
        assert eventually(lambda: phases(served) == ["serving", "silent", "silent"])
        for leaves in (half_sent, idle):
            newcomer = stack.enter_context(served.connect())
            assert newcomer.request("GET", "/health").status == 200
            assert leaves.is_closed()
        assert b"assistant" in streaming.read_chunk()
        assert (served.server.num_open_connections, served.server._connections.num_evicted) == (3, 2)


def test_a_refused_newcomer_is_told(long_room_wait: None) -> None:
    """With every connection busy the next one gets 503 with Retry-After at once, and its place when one is free."""
    with serving(FakeService(script=(None,)), max_connections=2) as served, ExitStack() as stack:
        busy = [stack.enter_context(served.connect()) for _ in range(2)]
        for client in busy:
            client.send(STREAM_WIRE)
            client.read_head()
        with served.connect() as client:
            client.send(encode_request("GET", "/health"))
            response = client.read_response()
            assert (response.status, response.headers["retry-after"]) == (503, "2")
            assert response.error["code"] == "not_ready" and client.is_closed()
        busy[0].close()
        assert eventually(lambda: served.server.num_open_connections == 1)
        with served.connect() as client:
            assert client.request("GET", "/health").status == 200


def test_a_flood_of_connections_stays_within_the_limit(long_room_wait: None) -> None:
    """However many connect, threads stay bounded and a real client is served in between."""
    with serving(max_connections=8) as served, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(served.connect())
            # One that has left the table may still be on its way out.
            assert eventually(lambda: num_live_threads(served.server) <= 9)
        with served.connect() as client:
            assert client.request("GET", "/health").status == 200
        assert served.server.num_open_connections <= 8
        assert served.server._connections.num_evicted >= 92


def test_the_end_finishes_running_streams_well_formed() -> None:
    """A stream gets an error and `[DONE]`, and no finish reason, a whole answer 503, a half-sent request nothing; no
    thread stays."""
    service = FakeService(script=(ContentDelta("a"), None))
    with serving(service) as served, ExitStack() as stack:
        stream, whole, half, idle = (stack.enter_context(served.connect()) for _ in range(4))
        stream.send(STREAM_WIRE)
        assert stream.read_head()[0] == 200
        whole.send(WHOLE_WIRE)
        half.send(WHOLE_WIRE[:-5])
        assert idle.request("GET", "/health").status == 200
        assert eventually(lambda: service.turns.qsize() == 2)
        assert eventually(lambda: phases(served) == ["receiving", "serving", "serving", "silent"])
        started = time.monotonic()
        assert served.server.close(4 * PATIENCE_SECONDS)
        assert time.monotonic() - started < 2 * PATIENCE_SECONDS, "nobody had to be shut"
        data = b"".join(iter(stream.read_chunk, b""))
        events = data.decode().split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "not_ready"
        assert b'"finish_reason":"' not in data
        assert events[-2:] == ["data: [DONE]", ""]
        assert stream.is_closed() and idle.is_closed()
        response = whole.read_response()
        assert (response.status, response.headers["connection"]) == (503, "close")
        assert eventually(lambda: all("web-" not in thread.name for thread in threading.enumerate()))


def test_draining_lets_running_answers_finish() -> None:
    """After `stop_accepting` nobody new gets in, idle connections end, and what runs goes on undisturbed."""
    may_answer = threading.Event()
    service = FakeService(script=(may_answer, ContentDelta("whole"), FINISHED))
    with serving(service) as served, served.connect() as running, served.connect() as idle:
        port = served.server.port
        idle.request("GET", "/health")
        running.send(WHOLE_WIRE)
        turn = service.turns.get(timeout=PATIENCE_SECONDS)
        served.server.stop_accepting()
        assert idle.is_closed()
        with pytest.raises(ConnectionRefusedError):
            RawClient(port)
        may_answer.set()
        response = running.read_response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert not turn.cancelled.is_set() and running.is_closed()


def test_an_answer_that_ignores_its_end_loses_its_socket() -> None:
    """After the timeout sockets are shut; a client that reads nothing cannot hold up the end."""
    script = (*[ContentDelta("x" * 100_000)] * 2000, FINISHED)
    with serving(FakeService(script=script), write_timeout_seconds=600) as served, served.connect() as client:
        client.send(STREAM_WIRE)
        turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
        time.sleep(0.3)  # until its buffers are full and it waits for the client
        started = time.monotonic()
        assert served.server.close(0.3)
        assert time.monotonic() - started < PATIENCE_SECONDS
        assert turn.cancelled.is_set()
