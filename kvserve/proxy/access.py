"""Who may speak to the proxy: Host (against DNS rebinding), Origin (against foreign web pages) and the API key, by the
same rules as on the backend's own port. Pure functions over header values; it knows no sockets.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvserve.errors import Forbidden, Unauthorized

type Headers = Mapping[str, Sequence[str]]

_ANY = "*"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """`host` is the address that the proxy is bound to; the rest is the operator's."""

    host: str
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Authority:
    name: str
    port: int | None


def check_access(headers: Headers, rules: AccessRules, *, needs_key: bool) -> str | None:
    """The Origin to which the answer may be shown, or None if the request has none.

    Raises Forbidden for a Host that is not ours or a foreign Origin, Unauthorized for a missing or wrong key.
    """
    check_host(headers, rules)
    origin = check_origin(headers, rules)
    if needs_key:
        check_key(headers, rules)
    return origin


def check_host(headers: Headers, rules: AccessRules) -> None:
    """Raises Forbidden unless the request was sent to a loopback name, the bound host or an allowed one."""
    sent = headers.get("host", ())
    if not sent:  # only HTTP/1.0 may leave it out, and no browser speaks that
        return
    own = _parse_authority(sent[0]) if len(sent) == 1 else None
    allowed = {rules.host.lower(), *(name.lower().rstrip(".") for name in rules.allowed_hosts)}
    if own is not None and (_is_loopback(own.name) or own.name in allowed or _ANY in allowed):
        return
    raise Forbidden("The Host header names no host of this server; ALLOWED_HOSTS admits further names.")


def check_origin(headers: Headers, rules: AccessRules) -> str | None:
    """The Origin to which the answer may be shown, None if the request has none. Raises Forbidden for a foreign one."""
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
    if rules.api_key is None:
        return
    scheme, _, bearer = ", ".join(headers.get("authorization", ())).partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    sent.extend(headers.get("x-api-key", ()))
    expected = rules.api_key.encode("utf-8")
    # Header values were read as latin-1; their bytes are compared, in constant time.
    if not any([hmac.compare_digest(key.encode("latin-1"), expected) for key in sent]):
        raise Unauthorized("The API key is missing or wrong: send it as `Authorization: Bearer KEY` or `x-api-key`.")


def _is_own_page(origin: str, headers: Headers) -> bool:
    """Whether the Origin is the Host that `check_host` accepted, or both are loopback names with the same port."""
    scheme, _, authority = origin.partition("://")
    page, own = _parse_authority(authority), _parse_authority("".join(headers.get("host", ())))
    if scheme.lower() not in ("http", "https") or page is None or own is None or page.port != own.port:
        return False
    return page.name == own.name or (_is_loopback(page.name) and _is_loopback(own.name))


def _parse_authority(text: str) -> _Authority | None:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    name = (parts.hostname or "").rstrip(".")
    if parts.path or parts.query or parts.fragment or parts.username is not None or not name:
        return None
    return _Authority(name, port)


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
