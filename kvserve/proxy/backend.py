"""kvserve's own port as an ASGI application: what the guard passes on past LiteLLM. It knows HTTP and no path.

Only the child process imports it, as it does LiteLLM, whose HTTP client it uses.
"""

import httpx

from kvserve.errors import NotReady
from kvserve.proxy.asgi import HeaderList, Receive, Scope, Send

_CONNECT_SECONDS = 10.0
# What belongs to one connection, and what the server of this one says itself.
_OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
)
_SAID_ANEW = frozenset({*(_OF_A_CONNECTION - {b"content-length"}), b"date", b"vary"})


class Backend:
    """Passes each request on as it is and its answer back piece by piece. A connection serves one request: to this very
    machine it costs little, and none is ever found closed."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # an answer takes as long as it takes
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request whose body comes in one piece. Raises NotReady if kvserve gives no answer at all; one that
        breaks off raises httpx's own error, upon which this side's connection breaks off, too."""
        request = self._request(scope, (await receive()).get("body", b""))
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise NotReady("kvserve itself gives no answer.") from error
        try:
            lines = [(name.lower(), value) for name, value in response.headers.raw]
            headers = [line for line in lines if line[0] not in _SAID_ANEW]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _request(self, scope: Scope, body: bytes) -> httpx.Request:
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        headers: HeaderList = [pair for pair in scope["headers"] if pair[0].lower() not in _OF_A_CONNECTION | {b"host"}]
        # As a URL the path would be tidied up, and might then be another one than the guard has judged.
        return httpx.Request(
            scope["method"],
            self._url,
            headers=[*headers, (b"connection", b"close")],
            content=body,
            extensions={"target": target},
        )
