"""The reader over real socket pairs: deadlines, limits, chunks in any cutting, and who counts as gone."""

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import BadRequest, BodyTooLarge, HeadersTooLarge, RequestTimeout
from kvserve.web.head import BodyFraming
from kvserve.web.reader import ConnectionReader
from tests.web.fakes import eventually

CHUNKED = BodyFraming("chunked")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, ConnectionReader]]:
    """A client's socket and the reader of the other end."""
    client, server = socket.socketpair()
    with client, server:
        yield client, ConnectionReader(server)


def test_two_pipelined_requests_are_read_one_after_the_other(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """Bytes of the next request stay for it; empty lines before a request are skipped."""
    client, reader = pair
    client.sendall(b"\r\n\r\nA\r\nB\r\n\r\nhelloC\r\n\r\n")
    assert reader.wait_for_request(1)
    assert reader.read_head(100, 1) == b"A\r\nB"
    assert not reader.peer_is_gone()
    assert reader.read_body(BodyFraming("length", 5), 100, 1) == b"hello"
    assert reader.read_head(100, 1) == b"C"


def test_the_head_has_one_deadline(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """A client that keeps sending a byte now and then is cut off after the time for the whole head."""
    client, reader = pair
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            client.sendall(b"a")

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises(RequestTimeout):
        reader.read_head(10_000, 0.3)
    assert 0.25 < time.monotonic() - started < 60, "the next byte came in time again and again"
    stop.set()
    thread.join()


def test_an_idle_client_is_not_waited_for_longer_than_said(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """Silence, empty lines and a closed connection all mean that no request comes."""
    client, reader = pair
    assert not reader.wait_for_request(0.05)
    client.sendall(b"\r\n\r")
    assert not reader.wait_for_request(0.05)
    client.close()
    assert not reader.wait_for_request(5)


def test_head_limits(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """A head over the limit is refused before it is complete, and what cannot be HTTP at its first byte."""
    client, reader = pair
    client.sendall(b"A" * 101)
    with pytest.raises(HeadersTooLarge):
        reader.read_head(100, 5)
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"\x16\x03\x01")
        with pytest.raises(BadRequest):
            ConnectionReader(right).read_head(100, 5)


def test_an_announced_body_over_the_limit_is_refused_unread(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """Nothing of it needs to arrive."""
    _, reader = pair
    with pytest.raises(BodyTooLarge):
        reader.read_body(BodyFraming("length", 101), 100, 5)


def test_a_body_that_stalls_or_ends_early(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """A stalled body is a timeout, a closed one a bad request."""
    client, reader = pair
    client.sendall(b"abc")
    with pytest.raises(RequestTimeout):
        reader.read_body(BodyFraming("length", 4), 100, 0.05)
    client.close()
    with pytest.raises(BadRequest):
        reader.read_body(BodyFraming("length", 4), 100, 5)


def test_chunks_count_together(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """The limit holds for the sum, and a huge announced chunk is refused unread."""
    client, reader = pair
    client.sendall(b"40\r\n" + b"a" * 64 + b"\r\n40\r\n")
    with pytest.raises(BodyTooLarge):
        reader.read_body(CHUNKED, 100, 5)


@pytest.mark.parametrize(
    "wire",
    [
        b"zz\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"-5\r\nhello\r\n",
        b"5;" + b"x" * 2000 + b"\r\n",
        b"\r\n",
    ],
)
def test_broken_chunks(pair: tuple[socket.socket, ConnectionReader], wire: bytes) -> None:
    """Junk between chunks is a bad request."""
    client, reader = pair
    client.sendall(wire)
    with pytest.raises(BadRequest):
        reader.read_body(CHUNKED, 100, 5)


def test_endless_trailers(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """The trailer section has a limit too."""
    client, reader = pair
    client.sendall(b"0\r\n" + b"X-Trailer: aaaaaaaaaaaa\r\n" * 500)
    with pytest.raises(HeadersTooLarge):
        reader.read_body(CHUNKED, 100, 5)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5), st.lists(st.integers(1, 40), max_size=8))
def test_any_cutting_of_a_chunked_body_gives_the_same_bytes(chunks: list[bytes], cuts: list[int]) -> None:
    """However the wire cuts it, the body is the chunks joined, and the next request follows."""
    wire = b"".join(b"%x;e=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nT: 1\r\n\r\nNEXT\r\n\r\n"
    client, server = socket.socketpair()
    with client, server:
        reader = ConnectionReader(server)
        for cut in cuts:
            client.sendall(wire[:cut])
            wire = wire[cut:]
            reader.peer_is_gone()  # takes what is there, as a waiting answer does
        client.sendall(wire)
        assert reader.read_body(CHUNKED, 1000, 5) == b"".join(chunks)
        assert reader.read_head(100, 5) == b"NEXT"


def test_who_is_gone(pair: tuple[socket.socket, ConnectionReader]) -> None:
    """An open client is there, with or without bytes ahead; a closed or half-closed one is gone, also behind bytes."""
    client, reader = pair
    assert not reader.peer_is_gone()
    client.sendall(b"GET / HTTP/1.1\r\n")
    assert not reader.peer_is_gone()
    client.sendall(b"more")
    client.shutdown(socket.SHUT_WR)
    assert reader.peer_is_gone()


def test_gone_behind_more_bytes_than_are_kept() -> None:
    """Where the system tells, an end is seen even behind more pipelined bytes than the reader takes in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            reader = ConnectionReader(server)
            reader._buffer += b"x" * (1 << 20)
            client.sendall(b"x")
            assert not reader.peer_is_gone()
            client.shutdown(socket.SHUT_WR)
            if hasattr(select, "POLLRDHUP"):
                assert eventually(reader.peer_is_gone)
            else:
                assert not reader.peer_is_gone()
