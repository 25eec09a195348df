"""Decides who may speak to either port: checks Host (against DNS rebinding), Origin (against foreign web pages) and the
API key, and makes the headers for browsers. Pure functions over header values; it knows no sockets.
"""

import hmac
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from kvserve.errors import Forbidden, Unauthorized

type Headers = Mapping[str, Sequence[str]]
type HeaderLines = tuple[tuple[str, str], ...]

READ_HEADERS = ("host", "origin", "authorization", "x-api-key", "access-control-request-headers")
"""The headers that this file reads."""

# No public name server gives out these names, so no web page can take one and point it at this machine: this machine's
# own names, a container's names of its host, and names of the local network (RFC 6762).
_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "gateway.docker.internal", "host.containers.internal"})
_LOCAL_NAME = re.compile(r"[^.].*\.(?:localhost|local)")

_USUAL_HEADERS = "authorization, content-type, x-api-key, x-session-id, anthropic-version, anthropic-beta"
_HEADER_NAMES = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")
_ANY = "*"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """`host` is the address that the port is bound to; the operator sets the rest."""

    host: str
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Authority:
    name: str
    port: int | None


def check_access(headers: Headers, rules: AccessRules, *, needs_key: bool) -> str | None:
    """The Origin that may read the answer, or None if the request has none.

    Raises Forbidden for a foreign Host or Origin, Unauthorized for a missing or wrong key.
    """
    check_host(headers, rules)
    origin = check_origin(headers, rules)
    if needs_key:
        check_key(headers, rules)
    return origin


def check_host(headers: Headers, rules: AccessRules) -> None:
    """Raises Forbidden unless the request was sent to an address in numbers, a local name, the bound host or an allowed
    one.

    A web page whose name was re-pointed at this machine still sends its own name as Host; an address cannot be
    re-pointed.
    """
    sent = headers.get("host", ())
    if not sent:  # only HTTP/1.0 may leave it out, which no browser speaks
        return
    own = _parse_authority(sent[0]) if len(sent) == 1 else None
    allowed = {rules.host.lower(), *(name.lower().rstrip(".") for name in rules.allowed_hosts)}
    if own is not None and (_is_local(own.name) or own.name in allowed or _ANY in allowed):
        return
    raise Forbidden("The Host header names no host of this server; ALLOWED_HOSTS admits further names.")


def check_origin(headers: Headers, rules: AccessRules) -> str | None:
    """The Origin that may read the answer, None if the request has none. Raises Forbidden for a foreign one.

    Pages of this machine, the server's own pages and `allowed_origins` may call. `null`, which sandboxed pages send, is
    foreign unless it is listed.
    """
    origins = headers.get("origin", ())
    if not origins:
        return None
    origin = origins[0]
    allowed = {origin.lower().rstrip("/") for origin in rules.allowed_origins}
    if len(origins) == 1 and (_is_own_page(origin, headers) or origin.lower() in allowed or _ANY in allowed):
        return origin
    raise Forbidden("This Origin may not call the server; ALLOWED_ORIGINS admits further ones.")


def check_key(headers: Headers, rules: AccessRules) -> None:
    """Raises Unauthorized if an API key is set and neither `Authorization: Bearer` nor `x-api-key` carries it."""
    if rules.api_key is not None and not is_among(rules.api_key, sent_keys(headers)):
        raise Unauthorized(
            "The API key is missing or wrong: send the server's API_KEY, the only key that it knows, as "
            "`Authorization: Bearer KEY` or `x-api-key`."
        )


def sent_keys(headers: Headers) -> list[bytes]:
    """The keys that a request carries, that of `Authorization: Bearer` first."""
    scheme, _, bearer = ", ".join(headers.get("authorization", ())).partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [key.encode("latin-1") for key in (*sent, *headers.get("x-api-key", ()))]  # as they were decoded


def is_among(api_key: str, sent: Sequence[bytes]) -> bool:
    """Whether one of the sent keys is this one; each is compared in constant time."""
    expected = api_key.encode("utf-8")
    return any([hmac.compare_digest(key, expected) for key in sent])


def sharing_headers(origin: str | None) -> HeaderLines:
    """The headers that let an accepted Origin's page read the answer."""
    if origin is None:
        return (("Vary", "Origin"),)
    exposed = "x-request-id, request-id, x-client-request-id, retry-after"
    return (("Vary", "Origin"), ("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", exposed))


def preflight_headers(headers: Headers, methods: Sequence[str]) -> HeaderLines:
    """The answer to an accepted Origin's preflight; it grants the requested headers if they are valid names."""
    asked = ", ".join(headers.get("access-control-request-headers", ()))
    return (
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        ("Access-Control-Allow-Headers", asked if _HEADER_NAMES.fullmatch(asked) else _USUAL_HEADERS),
        ("Access-Control-Max-Age", "600"),
    )


def _is_own_page(origin: str, headers: Headers) -> bool:
    """Whether this machine serves the page, or the Origin is the Host that `check_host` accepted, port and all."""
    scheme, _, authority = origin.partition("://")
    page, own = _parse_authority(authority), _parse_authority("".join(headers.get("host", ())))
    if scheme.lower() not in ("http", "https") or page is None:
        return False
    return is_loopback(page.name) or page == own


def _parse_authority(text: str) -> _Authority | None:
    """`name`, `name:port` or `[v6]:port` with the name in lower case, or None if the text is none of these."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    name = (parts.hostname or "").rstrip(".")
    if parts.path or parts.query or parts.fragment or parts.username is not None or not name:
        return None
    return _Authority(name, port)


def is_loopback(name: str) -> bool:
    """Whether the name always means the local machine."""
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _is_local(name: str) -> bool:
    """Whether no public name server can point this name anywhere: an address, a local name, or this machine's own."""
    if _address(name) is not None or name in _LOCAL_NAMES or _LOCAL_NAME.fullmatch(name):
        return True
    own = socket.gethostname().lower().rstrip(".")  # read each time: on some systems it changes with the network
    return name in (own, own.partition(".")[0])


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
