"""Who may speak: the same answers as on the server's own port."""

from itertools import product

import pytest

from kvserve.errors import Forbidden, RequestError, Unauthorized
from kvserve.proxy.access import AccessRules, check_access, check_host, check_key, check_origin
from kvserve.web.handler import access_headers
from kvserve.web.head import RequestHead
from kvserve.web.settings import WebSettings

HOSTS = [
    *(None, "localhost", "localhost:4000", "LOCALHOST.:4000", "a.localhost:4000", "127.0.0.1:4000", "127.8.8.8"),
    *("[::1]:4000", "box.local:4000", "10.0.0.5:4000", "evil.example", "evil.example:4000", "localhost.evil.example"),
    *("10.0.0.6:4000", "[fe80::1]:4000", "host.docker.internal:4000", "gateway.docker.internal", "box.example:4000"),
    *("host.containers.internal", "desk", "desk.evil.example", "2130706433"),
    *("", "a@localhost", "localhost:port", "127.0.0.1.evil.example:4000"),
]
ORIGINS = [
    *(None, "null", "http://localhost:4000", "http://127.0.0.1:4000", "https://localhost:4000", "http://[::1]:4000"),
    *("http://localhost:3000", "http://localhost", "https://allowed.example", "https://ALLOWED.example", "http://"),
    *("https://evil.example", "http://evil.example:4000", "http://box.local:4000", "file://", "chrome-extension://a"),
    *("http://10.0.0.6:4000", "http://10.0.0.6:3000", "http://[::1]:5173", "http://a.localhost:1", "ftp://localhost"),
]
KEYS: list[tuple[str, str] | None] = [
    None,
    ("authorization", "Bearer k\u00e9y"),
    ("authorization", "bearer  k\u00e9y "),
    ("authorization", "Bearer x"),
    ("authorization", "Basic k\u00e9y"),
    ("x-api-key", "k\u00e9y"),
    ("x-api-key", "x"),
]


def sent(host: str | None, origin: str | None, key: tuple[str, str] | None) -> tuple[tuple[str, str], ...]:
    """The header lines as they are after latin-1 decoding."""
    lines = [(name, value) for name, value in (("host", host), ("origin", origin)) if value is not None]
    return (*lines, (key[0], key[1].encode().decode("latin-1"))) if key else tuple(lines)


def verdict_here(headers: tuple[tuple[str, str], ...]) -> object:
    """The Origin that was accepted, or the class of the refusal."""
    collected: dict[str, list[str]] = {}
    for name, value in headers:
        collected.setdefault(name, []).append(value)
    rules = AccessRules("10.0.0.5", "k\u00e9y", ("https://allowed.example",), ("Box.example.",))
    try:
        return check_access(collected, rules, needs_key=True)
    except RequestError as error:
        return type(error), error.message


def verdict_there(headers: tuple[tuple[str, str], ...]) -> object:
    """The same of the server's own port."""
    head = RequestHead("POST", "/v1/chat/completions", "", (1, 0), headers)
    allowed = ("https://allowed.example",)
    settings = WebSettings(
        host="10.0.0.5", api_key="k\u00e9y", allowed_origins=allowed, allowed_hosts=("Box.example.",)
    )
    try:
        sent, rules = access_headers(head), settings.access
        check_host(sent, rules)
        origin = check_origin(sent, rules)
        check_key(sent, rules)
    except RequestError as error:
        return type(error), error.message
    return origin


def test_both_ports_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of Host, Origin and key gets the same verdict and the same words."""
    monkeypatch.setattr("socket.gethostname", lambda: "desk")
    for host, origin, key in product(HOSTS, ORIGINS, KEYS):
        headers = sent(host, origin, key)
        assert verdict_here(headers) == verdict_there(headers), headers


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({"host": ["evil.example"]}, Forbidden),
        ({"host": ["localhost", "evil.example"]}, Forbidden),
        ({"host": ["localhost"], "origin": ["null"]}, Forbidden),
        ({"host": ["localhost"], "origin": ["https://evil.example"]}, Forbidden),
        ({"host": ["localhost"], "origin": ["http://localhost", "http://localhost"]}, Forbidden),
        ({"host": ["localhost"]}, Unauthorized),
    ],
)
def test_refusals(headers: dict[str, list[str]], refusal: type[RequestError]) -> None:
    """A foreign or doubled Host or Origin is forbidden, a missing key unauthorized."""
    with pytest.raises(refusal):
        check_access(headers, AccessRules("127.0.0.1", "k"), needs_key=True)
