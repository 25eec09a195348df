"""The data that the guard around LiteLLM and the hook inside it share about one request.

LiteLLM passes no request to a hook, so the data is in a context variable: each request runs in its own context.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """The backend's own answer to a failed request, before LiteLLM rewrote it."""

    status: int
    body: bytes
    content_type: str
    retry_after: str | None


@dataclass(slots=True)
class ProxyExchange:
    """One request on its way through LiteLLM.

    `body` is the client's JSON object; `headers` are those that LiteLLM would not forward. The hook sets
    `upstream_error` for the guard; the guard sets `has_begun` when the client's answer begins. `instead_of_backend` is
    another URL for the request.
    """

    body: Mapping[str, object]
    headers: Mapping[str, str]
    instead_of_backend: str | None = None
    upstream_error: UpstreamError | None = None
    has_begun: bool = False


CURRENT_EXCHANGE: ContextVar[ProxyExchange | None] = ContextVar("current_exchange", default=None)
