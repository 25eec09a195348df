"""The head parser as tables: what is read, and what is refused because two parsers could read it differently."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import BadRequest, HeadersTooLarge, RequestError
from kvserve.web.head import BodyFraming, RequestHead, body_framing, parse_chunk_size, parse_head


def head_of(*lines: str, start: str = "GET / HTTP/1.1") -> RequestHead:
    return parse_head("\r\n".join([start, *lines]).encode("latin-1"), max_header_count=50)


def framing_of(*lines: str, version: str = "1.1") -> BodyFraming:
    return body_framing(head_of("Host: a", *lines, start=f"POST / HTTP/{version}"))


def test_a_head_is_read_with_lower_case_names_and_stripped_values() -> None:
    """Names lose their case, values their outer blanks, duplicates are kept in order."""
    head = head_of("HOST: a", "X-One:  1\t", "x-one: 2", "Empty:")
    assert head.values("x-one") == ("1", "2")
    assert head.get("x-one") == "1, 2"
    assert head.get("empty") == ""
    assert head.get("absent") is None
    assert head.as_mapping() == {"host": "a", "x-one": "1, 2", "empty": ""}


@pytest.mark.parametrize(
    ("target", "authority", "path", "query"),
    [
        ("/v1/models", None, "/v1/models", ""),
        ("/v1/models/a%2Fb%20c?x=%2F&y", None, "/v1/models/a/b c", "x=%2F&y"),
        ("http://evil.example:1/v1?q", "evil.example:1", "/v1", "q"),
        ("http://a", "a", "/", ""),
        ("//a/b", None, "//a/b", ""),
    ],
)
def test_targets(target: str, authority: str | None, path: str, query: str) -> None:
    """Paths are decoded, queries are not, an absolute target names its authority."""
    head = head_of("Host: a", start=f"GET {target} HTTP/1.1")
    assert (head.authority, head.path, head.query) == (authority, path, query)


@pytest.mark.parametrize(
    "start",
    [
        "GET /",
        "GET  / HTTP/1.1",
        "GET / HTTP/2.0",
        "GET / HTTP/1.1 ",
        "GET / http/1.1",
        "GET v1 HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET /\x7f HTTP/1.1",
        "GE(T / HTTP/1.1",
        "",
    ],
)
def test_bad_request_lines(start: str) -> None:
    """A request line that is not exactly method, target, version is refused."""
    with pytest.raises(BadRequest):
        head_of("Host: a", start=start)


@pytest.mark.parametrize(
    "line",
    ["X : 1", "X", ": 1", " folded", "X: a\nY: b", "X: a\rb", "X: a\x00b", "X(: 1", "\x0bX: 1", "Host: b"],
)
def test_bad_header_lines(line: str) -> None:
    """Folded, nameless, blank-before-colon and control characters are refused, and so is a second Host."""
    with pytest.raises(BadRequest):
        head_of("Host: a", line)


def test_http_1_1_needs_a_host_and_1_0_does_not() -> None:
    """Host is required where the version requires it."""
    with pytest.raises(BadRequest):
        head_of()
    assert head_of(start="GET / HTTP/1.0").version == (1, 0)


def test_too_many_lines() -> None:
    """More lines than allowed is an error of its own."""
    with pytest.raises(HeadersTooLarge):
        head_of("Host: a", *(f"X-{i}: 1" for i in range(50)))


@pytest.mark.parametrize(
    ("lines", "framing"),
    [
        ((), BodyFraming("none")),
        (("Content-Length: 0",), BodyFraming("length", 0)),
        (("Content-Length: 0012",), BodyFraming("length", 12)),
        (("Transfer-Encoding: Chunked",), BodyFraming("chunked")),
        (("Content-Length: " + "9" * 400,), BodyFraming("length", 10**18)),
    ],
)
def test_framings(lines: tuple[str, ...], framing: BodyFraming) -> None:
    """What delimits the body."""
    assert framing_of(*lines) == framing


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: -1",),
        ("Content-Length: +1",),
        ("Content-Length: 1_0",),
        ("Content-Length: 0x10",),
        ("Content-Length: 1.5",),
        ("Content-Length:",),
        ("Content-Length: \xb2",),
        ("Content-Length: 5, 5",),
        ("Content-Length: 5", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding:",),
        ("Transfer-Encoding: xchunked",),
    ],
)
def test_ambiguous_framings(lines: tuple[str, ...]) -> None:
    """A body whose end two parsers could see at different places is refused."""
    with pytest.raises(BadRequest):
        framing_of(*lines)


def test_chunked_needs_http_1_1() -> None:
    """HTTP/1.0 has no chunks."""
    with pytest.raises(BadRequest):
        framing_of("Transfer-Encoding: chunked", version="1.0")


@pytest.mark.parametrize(("line", "size"), [(b"0", 0), (b"1aF", 0x1AF), (b"5;a=b", 5), (b"5 ;x", 5), (b"000", 0)])
def test_chunk_sizes(line: bytes, size: int) -> None:
    """Hexadecimal, with extensions ignored."""
    assert parse_chunk_size(line) == size


@pytest.mark.parametrize("line", [b"", b"-1", b"+1", b"0x1", b"g", b"1 2", b" 1", b"1_0", b"f" * 16, b"5;\x00"])
def test_bad_chunk_sizes(line: bytes) -> None:
    """Everything else is refused."""
    with pytest.raises(BadRequest):
        parse_chunk_size(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """No bytes raise anything but a request error."""
    for data in (raw, b"POST / HTTP/1.1\r\nHost: a\r\n" + raw):
        try:
            body_framing(parse_head(data, 50))
        except RequestError as error:
            assert 400 <= error.status < 500
