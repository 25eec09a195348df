"""Who may speak to this server, by the rules of `proxy/access.py`, which both ports share, and whose key the proxy says
that a request came with. Pure functions over a request's head; it knows no sockets.
"""

import hmac
from dataclasses import replace

from kvserve.core import KEY_HEADER
from kvserve.proxy import access
from kvserve.proxy.access import AccessRules, HeaderLines, sharing_headers
from kvserve.web.head import RequestHead
from kvserve.web.settings import WebSettings

__all__ = [
    "check_host",
    "check_key",
    "check_origin",
    "is_preflight",
    "preflight_headers",
    "sharing_headers",
    "with_told_key",
]


def check_host(head: RequestHead, settings: WebSettings) -> None:
    """Raises Forbidden for a Host that is not ours; an absolute target's authority counts in its place."""
    access.check_host(_read(head), _rules(settings))


def check_origin(head: RequestHead, settings: WebSettings) -> str | None:
    """The Origin to which the answer may be shown, None if the request has none. Raises Forbidden for a foreign one."""
    return access.check_origin(_read(head), _rules(settings))


def check_key(head: RequestHead, settings: WebSettings) -> None:
    """Raises Unauthorized if an API key is set and the request does not carry it."""
    access.check_key(_read(head), _rules(settings))


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


def preflight_headers(head: RequestHead, methods: tuple[str, ...]) -> HeaderLines:
    """The answer to a preflight of an accepted Origin."""
    asked = "access-control-request-headers"
    return access.preflight_headers({asked: head.values(asked)}, methods)


def _read(head: RequestHead) -> dict[str, tuple[str, ...]]:
    sent = {name: head.values(name) for name in access.READ_HEADERS}
    return sent if head.authority is None else {**sent, "host": (head.authority,)}


def _rules(settings: WebSettings) -> AccessRules:
    return AccessRules(settings.host, settings.api_key, settings.allowed_origins, settings.allowed_hosts)
