"""Stands in LiteLLM's place inside the guard: sends on what LiteLLM would, to the backend that the guard chose."""

import json

from kvserve.core import KEY_HEADER
from kvserve.errors import NotReady
from kvserve.proxy.asgi import Receive, Scope, Send, at_path, replay
from kvserve.proxy.attempts import CURRENT_ATTEMPT
from kvserve.proxy.entry import Backend
from kvserve.proxy.envelope import CURRENT_EXCHANGE, pass_through_endpoint

RAW = "litellm_pass_through_raw_body"
SENT_ON = (b"content-type", b"x-session-id", KEY_HEADER.encode(), b"x-kvserve-begin-seconds", b"anthropic-version")


class PlainRelay:
    """The application inside the guard."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; where nobody answers it says 500, as LiteLLM does."""
        await receive()
        attempt, exchange = CURRENT_ATTEMPT.get(), CURRENT_EXCHANGE.get()
        assert attempt is not None
        place = str(pass_through_endpoint(attempt.backend)["path"])
        raw = json.dumps(exchange.body).encode() if exchange is not None else scope["state"][RAW]
        headers = [pair for pair in scope["headers"] if pair[0] in SENT_ON]
        if attempt.backend.api_key is not None:
            headers.append((b"authorization", f"Bearer {attempt.backend.api_key}".encode()))
        inner = at_path(scope, scope["path"].removeprefix(place)) | {"headers": headers}
        try:
            await self._backend.of(attempt.backend)(inner, replay(raw, receive), send)
        except NotReady:
            attempt.is_unreached = True
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b""})
