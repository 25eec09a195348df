"""Host, Origin and API key as tables over header values."""

import pytest

from kvserve.errors import Forbidden, Unauthorized
from kvserve.proxy.access import check_host, check_key, check_origin, preflight_headers
from kvserve.web.handler import access_headers, is_preflight
from kvserve.web.head import RequestHead, parse_head
from kvserve.web.settings import WebSettings

SETTINGS = WebSettings(
    host="192.168.1.5",
    allowed_hosts=("Box.example", "box2"),
    allowed_origins=("https://Ui.example", "http://ui2.example:3000/"),
)


USUAL_HEADERS = ("authorization", "content-type", "x-api-key", "x-session-id", "anthropic-version", "anthropic-beta")


def head_of(*lines: str, method: str = "GET", target: str = "/") -> RequestHead:
    return parse_head("\r\n".join([f"{method} {target} HTTP/1.1", *lines]).encode("latin-1"), 50)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "localhost.:8080",
        "app.localhost",
        "127.0.0.1",
        "127.8.8.8:1",
        "[::1]:8080",
        "192.168.1.5:8080",
        "box.example",
        "BOX2.:80",
        "192.168.1.6",
        "203.0.113.5:8080",
        "[fe80::1]:8080",
        "0.0.0.0:8080",
        "box.local:8080",
        "Host.Docker.Internal:8080",
        "gateway.docker.internal",
        "host.containers.internal:8080",
        "desk:8080",
        "DESK.office.example.",
    ],
)
def test_own_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any address in numbers, names that no public name server gives out, this machine's own name, the bound host and
    allowed names are ours, on any port."""
    monkeypatch.setattr("socket.gethostname", lambda: "Desk.office.example")
    check_host(access_headers(head_of(f"Host: {host}")), SETTINGS.access)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "local",
        ".local",
        "local.evil.example",
        "desk.evil.example",
        "office.example",
        "docker.internal",
        "evil.docker.internal",
        "",
        "localhost:port",
        "localhost:99999",
        "user@localhost",
        "localhost/x",
        "a b",
        "127.0.0.1:80:80",
        "[::1",
        "2130706433",
        "0x7f.1",
        "localhost, evil.example",
    ],
)
def test_foreign_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could be re-pointed at this machine, and anything malformed, is refused."""
    monkeypatch.setattr("socket.gethostname", lambda: "desk.office.example")
    with pytest.raises(Forbidden):
        check_host(access_headers(head_of(f"Host: {host}")), SETTINGS.access)


def test_an_absolute_target_overrides_host() -> None:
    """The authority of the target counts, whatever the Host header says."""
    with pytest.raises(Forbidden):
        check_host(access_headers(head_of("Host: localhost", target="http://evil.example/")), SETTINGS.access)


def test_a_star_admits_every_host_and_origin() -> None:
    """`*` switches both checks off."""
    settings = WebSettings(allowed_hosts=("*",), allowed_origins=("*",))
    head = head_of("Host: anything.example", "Origin: https://evil.example")
    check_host(access_headers(head), settings.access)
    assert check_origin(access_headers(head), settings.access) == "https://evil.example"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("127.0.0.1:8080", "http://localhost:8080"),
        ("LocalHost:8080", "HTTP://localhost:8080"),
        ("box.example", "https://box.example"),
        ("localhost:8080", "http://localhost:3000"),
        ("localhost:8080", "http://localhost"),
        ("192.168.1.5:8080", "https://127.0.0.1:5173"),
        ("host.docker.internal:8080", "http://[::1]:3000"),
        ("127.0.0.1:8080", "http://app.localhost:3000"),
        ("192.168.1.6:8080", "http://192.168.1.6:8080"),
        ("localhost:8080", "https://ui.example"),
        ("localhost:8080", "http://UI2.example:3000"),
    ],
)
def test_own_origins(host: str, origin: str) -> None:
    """Pages that this machine serves, on whichever port, the server's own pages and the listed ones may call."""
    assert check_origin(access_headers(head_of(f"Host: {host}", f"Origin: {origin}")), SETTINGS.access) == origin


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://192.168.1.6:8080",
        "http://192.168.1.5:3000",
        "http://box.local:8080",
        "http://host.docker.internal:8080",
        "http://localhost.evil.example",
        "ftp://localhost",
        "null",
        "",
        "http://localhost:8080.evil.example",
        "http://ui.example",
        "https://ui.example.evil.example",
        "file://localhost:8080",
        "localhost:8080",
        "http://user@localhost:8080",
        "http://localhost:8080/path",
    ],
)
def test_foreign_origins(origin: str) -> None:
    """Another machine, scheme, name or none at all is foreign."""
    with pytest.raises(Forbidden):
        check_origin(access_headers(head_of("Host: localhost:8080", f"Origin: {origin}")), SETTINGS.access)


def test_another_port_of_a_machine_of_the_network_is_foreign() -> None:
    """Under its own address the server's own page is known by its port: what else is served there is not ours."""
    with pytest.raises(Forbidden):
        check_origin(
            access_headers(head_of("Host: 192.168.1.6:8080", "Origin: http://192.168.1.6:3000")), SETTINGS.access
        )


def test_two_origins_are_foreign() -> None:
    """Nobody may hide a foreign Origin behind an own one."""
    lines = ("Host: localhost:1", "Origin: http://localhost:1", "Origin: https://evil.example")
    with pytest.raises(Forbidden):
        check_origin(access_headers(head_of(*lines)), SETTINGS.access)


def test_no_origin_passes() -> None:
    """Programs send none."""
    assert check_origin(access_headers(head_of("Host: localhost")), SETTINGS.access) is None


@pytest.mark.parametrize(
    "lines",
    [
        ("Authorization: Bearer s3cr\xe9t",),
        ("authorization: bearer  s3cr\xe9t",),
        ("X-Api-Key: s3cr\xe9t",),
        ("Authorization: Bearer other", "x-api-key: s3cr\xe9t"),
    ],
)
def test_the_right_key(lines: tuple[str, ...]) -> None:
    """Either header may carry it; a key that is not ASCII is compared as the bytes that were sent."""
    wire = tuple(line.encode("utf-8").decode("latin-1") for line in lines)
    check_key(access_headers(head_of("Host: a", *wire)), WebSettings(api_key="s3cr\xe9t").access)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("Authorization: Bearer",),
        ("Authorization: Basic key",),
        ("Authorization: key",),
        ("Authorization: Bearer keyy",),
        ("x-api-key: ke",),
        ("x-api-key:",),
    ],
)
def test_a_wrong_key(lines: tuple[str, ...]) -> None:
    """Missing, misplaced, cut or longer keys are refused."""
    with pytest.raises(Unauthorized):
        check_key(access_headers(head_of("Host: a", *lines)), WebSettings(api_key="key").access)


def test_without_a_key_any_key_passes() -> None:
    """Clients that must send some key work with a server that wants none."""
    check_key(access_headers(head_of("Host: a", "Authorization: Bearer whatever")), WebSettings().access)


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        ("x-stainless-os, Authorization", "x-stainless-os, Authorization"),
        ("authorization,x-session-id, anthropic-beta", "authorization,x-session-id, anthropic-beta"),
        ("", ", ".join(USUAL_HEADERS)),
        ("a b", ", ".join(USUAL_HEADERS)),
    ],
)
def test_preflights_grant_header_names_only(asked: str, granted: str) -> None:
    """What is echoed is a list of header names."""
    lines = ("Host: a", "Origin: b", "Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {asked}")
    head = head_of(*lines, method="OPTIONS")
    assert is_preflight(head)
    headers = dict(preflight_headers(access_headers(head), ("GET", "POST")))
    assert headers["Access-Control-Allow-Headers"] == granted
    assert headers["Access-Control-Allow-Methods"] == "GET, POST"
