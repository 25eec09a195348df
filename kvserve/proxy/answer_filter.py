"""What a client gets of LiteLLM's answer: the backend's own errors and request ids in place of LiteLLM's. It knows ASGI
and no path."""

from collections.abc import Mapping

from kvserve.errors import EngineFailure
from kvserve.proxy.access import sharing_headers
from kvserve.proxy.asgi import HeaderList, Message, Send, answer, encoded, error_body, json_header
from kvserve.proxy.envelope import ProxyExchange

BACKEND_HEADER = "x-kvserve-backend"


class AnswerFilter:
    """LiteLLM's `send`: it replaces LiteLLM's version of an error by the backend's own. Where there are several
    backends, `backend_name` is that of the one which answers."""

    def __init__(self, send: Send, origin: str | None) -> None:
        self._send = send
        self._origin = origin
        self._is_replaced = False
        self.exchange: ProxyExchange | None = None
        self.backend_name: str | None = None

    async def __call__(self, message: Message) -> None:
        """Passes on, or replaces, one ASGI message of the answer."""
        if message["type"] == "http.response.start":
            replaced = self._replacement(message)
            if self.exchange is not None:
                self.exchange.has_begun = True
            if replaced is None:
                message["headers"] = [*outer_headers(message["headers"]), *self._own_headers()]
            else:
                self._is_replaced = True
                await answer(self._send, *replaced)
        if not self._is_replaced:
            await self._send(message)

    def _own_headers(self) -> HeaderList:
        named = [(BACKEND_HEADER, self.backend_name)] if self.backend_name is not None else []
        return encoded((*named, *sharing_headers(self._origin)))

    def _replacement(self, start: Message) -> tuple[int, bytes, HeaderList] | None:
        status = int(start["status"])
        if status < 400:
            return None
        sent = {name.lower(): value for name, value in start["headers"]}
        kept = [*outer_headers(request_id_of(sent)), *self._own_headers()]
        upstream = self.exchange.upstream_error if self.exchange is not None else None
        if upstream is not None:
            extra = [(b"content-type", upstream.content_type.encode("latin-1")), *kept]
            if upstream.retry_after is not None:
                extra.append((b"retry-after", upstream.retry_after.encode("latin-1")))
            return upstream.status, upstream.body, extra
        if b"json" in sent.get(b"content-type", b""):
            return None
        failure = EngineFailure("LiteLLM failed on this request; its log in the state folder says more.")
        return status, error_body(failure), [*json_header(), *kept]


def request_id_of(headers: Mapping[bytes, bytes]) -> HeaderList:
    """The backend's request id, if it set one: the only valid header of LiteLLM's error answers."""
    name = b"llm_provider-x-request-id"
    return [(name, headers[name])] if name in headers else []


def outer_headers(headers: HeaderList) -> HeaderList:
    """The answer's headers, with the backend's request id also under its own name."""
    for name, value in headers:
        if name.lower() == b"llm_provider-x-request-id":
            return [*(pair for pair in headers if pair[0].lower() != b"x-request-id"), (b"x-request-id", value)]
    return list(headers)
