"""Who may speak to this server: Host (against DNS rebinding), Origin (against foreign web pages) and the API key.

Pure functions over header values; it knows no sockets and no wire forms.
"""

import hmac
import re
from dataclasses import dataclass, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvserve.core import KEY_HEADER
from kvserve.errors import Forbidden, Unauthorized
from kvserve.web.head import RequestHead
from kvserve.web.settings import WebSettings

_HEADER_NAMES = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")
_ANY = "*"


@dataclass(frozen=True, slots=True)
class _Authority:
    name: str
    port: int | None


def parse_authority(text: str) -> _Authority | None:
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
    """Whether the name can only mean this machine: `localhost`, a name below it, or a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(head: RequestHead, settings: WebSettings) -> None:
    """Raises Forbidden unless the request was sent to a loopback name, the bound host or an allowed one.

    A web page whose name was re-pointed at this machine still sends its own name as Host.
    """
    sent = _own_authority(head)
    if sent is None:  # only HTTP/1.0 may leave it out, and no browser speaks that
        return
    own = parse_authority(sent)
    allowed = {settings.host.lower(), *(name.lower().rstrip(".") for name in settings.allowed_hosts)}
    if own is not None and (is_loopback(own.name) or own.name in allowed or _ANY in allowed):
        return
    raise Forbidden("The Host header names no host of this server; ALLOWED_HOSTS admits further names.")


def check_origin(head: RequestHead, settings: WebSettings) -> str | None:
    """The Origin to which the answer may be shown, None if the request has none. Raises Forbidden for a foreign one.

    The server's own pages and those of `allowed_origins` may call. `null`, which sandboxed pages send, is foreign
    unless it is listed.
    """
    origins = head.values("origin")
    if not origins:
        return None
    origin = origins[0]
    allowed = {origin.lower().rstrip("/") for origin in settings.allowed_origins}
    if len(origins) == 1 and (_is_own_page(origin, head) or origin.lower() in allowed or _ANY in allowed):
        return origin
    raise Forbidden("This Origin may not call the server; ALLOWED_ORIGINS admits further ones.")


def _own_authority(head: RequestHead) -> str | None:
    return head.authority if head.authority is not None else head.get("host")


def _is_own_page(origin: str, head: RequestHead) -> bool:
    """Whether the Origin is the Host that `check_host` accepted, or both are loopback names with the same port."""
    scheme, _, authority = origin.partition("://")
    page, own = parse_authority(authority), parse_authority(_own_authority(head) or "")
    if scheme.lower() not in ("http", "https") or page is None or own is None or page.port != own.port:
        return False
    return page.name == own.name or (is_loopback(page.name) and is_loopback(own.name))


def check_key(head: RequestHead, settings: WebSettings) -> None:
    """Raises Unauthorized if an API key is set and neither `Authorization: Bearer` nor `x-api-key` carries it."""
    if settings.api_key is None:
        return
    scheme, _, bearer = (head.get("authorization") or "").partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    sent.extend(head.values("x-api-key"))
    expected = settings.api_key.encode("utf-8")
    # Header values were read as latin-1; their bytes are compared, in constant time.
    if not any([hmac.compare_digest(key.encode("latin-1"), expected) for key in sent]):
        raise Unauthorized("The API key is missing or wrong: send it as `Authorization: Bearer KEY` or `x-api-key`.")


def with_told_key(head: RequestHead, settings: WebSettings) -> RequestHead:
    """The head with the digest that the proxy tells of a client's key, less the proof that the proxy tells it. What
    others tell is left out: a principal's name stands in its explanations, and is no key."""
    told = head.values(KEY_HEADER)
    if not told:
        return head
    proof, _, digest = told[0].partition(" ")
    secret = settings.proxy_secret.encode("utf-8")
    is_proxy = bool(secret) and len(told) == 1 and hmac.compare_digest(proof.encode("latin-1"), secret)
    rest = tuple(pair for pair in head.headers if pair[0] != KEY_HEADER)
    return replace(head, headers=(*rest, (KEY_HEADER, digest)) if is_proxy else rest)


def is_preflight(head: RequestHead) -> bool:
    """Whether a browser asks for permission on behalf of a page of another origin."""
    return (
        head.method == "OPTIONS" and bool(head.values("origin")) and bool(head.values("access-control-request-method"))
    )


def sharing_headers(origin: str | None) -> tuple[tuple[str, str], ...]:
    """What lets the page of an accepted Origin read the answer."""
    if origin is None:
        return (("Vary", "Origin"),)
    exposed = "x-request-id, request-id, x-client-request-id, retry-after"
    return (("Vary", "Origin"), ("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", exposed))


def preflight_headers(head: RequestHead, methods: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The answer to a preflight of an accepted Origin; the headers it asks for are granted if they are header names."""
    asked = head.get("access-control-request-headers") or ""
    granted = asked if _HEADER_NAMES.fullmatch(asked) else "authorization, content-type, x-api-key"
    return (
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        ("Access-Control-Allow-Headers", granted),
        ("Access-Control-Max-Age", "600"),
    )
