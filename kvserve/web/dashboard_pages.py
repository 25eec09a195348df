"""Serves the dashboard: its static files, and the stream of its values. It knows none of the values.

The files hold nothing of any request, so they need no key; the stream does. The page loads nothing from other servers.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from kvserve.errors import NotFound, NotReady
from kvserve.protocols.client_configs import NO_KEY, Endpoint, snippets
from kvserve.protocols.error_bodies import encode_openai_error
from kvserve.web.exchange import Header, HttpExchange
from kvserve.web.service import WebService

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "page.css": _STYLE,
    "page.js": _SCRIPT,
    "api.js": _SCRIPT,
    "charts.js": _SCRIPT,
    "controls.js": _SCRIPT,
    "draw.js": _SCRIPT,
    "sessions.js": _SCRIPT,
    "icon.svg": "image/svg+xml",
    "uPlot.iife.min.js": _SCRIPT,
    "uPlot.min.css": _STYLE,
    "uPlot.LICENSE.txt": "text/plain; charset=utf-8",
}
"""The files of the page with their content types; no other path is read."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: tuple[Header, ...] = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)

INTERVAL_SECONDS = 1.0
LOOK_SECONDS = 0.1
"""How often a stream checks whether its reader has left or the server ends."""

NOT_KEPT: Header = ("Cache-Control", "no-store")
"""Of what is another answer for another reader."""

SHOWN_KEY = "API_KEY"
"""What stands for the key, which no page shows."""

_FOLDER = Path(__file__).parent / "dashboard"


def get_page(exchange: HttpExchange, service: WebService) -> None:
    """GET /dashboard."""
    _send_file(exchange, "index.html")


def get_root(exchange: HttpExchange, service: WebService) -> None:
    """GET /: a browser is led to the dashboard, any other client is told that somebody is here."""
    if "text/html" in (exchange.head.get("accept") or ""):
        exchange.send_body(302, "text/plain; charset=utf-8", b"", [("Location", "/dashboard"), NOT_KEPT])
        return
    text = b"kvserve is running. Its dashboard is at /dashboard.\n"
    exchange.send_body(200, "text/plain; charset=utf-8", text, [NOT_KEPT])


def get_conversation(exchange: HttpExchange, service: WebService) -> None:
    """GET /dashboard/sessions/{id}: the turns of one conversation, as the events name it."""
    exchange.send_json(200, service.observability.conversation(exchange.path_rest))


def get_clients(exchange: HttpExchange, service: WebService) -> None:
    """GET /dashboard/clients: how clients are pointed at the server at `url`, in whose place the page puts the address
    by which it was found: port 4000 asks here itself. Raises NotReady."""
    context = next((card.context_limit for card in service.list_models() if card.context_limit is not None), None)
    if context is None:
        raise NotReady("No model says yet how long its context is.", retry_after_seconds=5)
    key = SHOWN_KEY if exchange.settings.access.api_key is not None else NO_KEY
    server = Endpoint(f"http://{exchange.head.get('host')}", key, context)
    exchange.send_json(200, {"url": server.url, "clients": snippets(server)})


def get_asset(exchange: HttpExchange, service: WebService) -> None:
    """GET /dashboard/{file}."""
    if exchange.path_rest not in FILES:
        raise NotFound(f"The dashboard has no file {exchange.path_rest!r}.")
    _send_file(exchange, exchange.path_rest)


def get_events(exchange: HttpExchange, service: WebService) -> None:
    """GET /dashboard/events: the page's values once per second, until the reader leaves or the server ends.

    A server that drains does not wait for it. Raises NotReady if too many pages watch.
    """
    watchers = service.watchers
    if not watchers.acquire(blocking=False):
        raise NotReady("As many pages watch this server as may; close one of them.", retry_after_seconds=10)
    try:
        _watch(exchange, service)
    finally:
        watchers.release()


def _watch(exchange: HttpExchange, service: WebService) -> None:
    exchange.may_keep_connection = False
    stream = exchange.open_stream(encode_openai_error)
    while not exchange.is_last:
        stream.send([service.observability.dashboard()])
        wake_at = time.monotonic() + INTERVAL_SECONDS
        while not exchange.is_last and (left := wake_at - time.monotonic()) > 0:
            exchange.check_client()
            time.sleep(min(left, LOOK_SECONDS))
    stream.end()


def _send_file(exchange: HttpExchange, name: str) -> None:
    exchange.send_body(200, FILES[name], (_FOLDER / name).read_bytes(), PAGE_HEADERS)
