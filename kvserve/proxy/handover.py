"""What the guard around LiteLLM and the hook inside it tell each other about one request. It knows neither of them.

LiteLLM hands a hook no request, so both meet in a context variable: each request runs in its own context.
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

    `body` is the JSON object as the client sent it; `headers` are those that LiteLLM would not forward. The hook fills
    in `upstream_error`, the guard reads it, and notes when the client's answer `has_begun`. With `instead_of_backend`
    the request goes to that URL.
    """

    body: Mapping[str, object]
    headers: Mapping[str, str]
    instead_of_backend: str | None = None
    upstream_error: UpstreamError | None = None
    has_begun: bool = False


CURRENT_EXCHANGE: ContextVar[ProxyExchange | None] = ContextVar("current_exchange", default=None)
