"""Which paths port 4000 serves, with which methods, whether they need the key, and who answers them. It knows names and
no request.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvserve.errors import MethodNotAllowed, NotFound
from kvserve.proxy.envelope import chat_envelope

type Envelope = Callable[[Mapping[str, object], str], dict[str, object]]
type Way = Literal["litellm", "as it is", "direct"]
"""Who answers: LiteLLM, or kvserve through LiteLLM's pass-through endpoint, byte for byte, or kvserve alone."""


@dataclass(frozen=True, slots=True)
class ProxyRoute:
    """A path that the proxy serves. With `envelope` the body is a JSON object of which LiteLLM sees only that. `path`,
    which `find_route` fills in, is the request's path with its `/v1`."""

    methods: tuple[str, ...]
    way: Way
    envelope: Envelope | None = None
    needs_key: bool = True
    path: str = ""


_GET = ("GET", "HEAD")

# LiteLLM has some hundred paths more. Some change its configuration, some send what they get to a cloud provider, and
# its /health runs a generation per call. What kvserve tells of itself needs no LiteLLM, which keeps in memory all that
# it passes on of a stream: the dashboard's has no end.
ROUTES: Mapping[str, ProxyRoute] = {
    "/v1/chat/completions": ProxyRoute(("POST",), "litellm", chat_envelope),
    "/v1/models": ProxyRoute(("GET",), "litellm"),
    "/health/readiness": ProxyRoute(("GET",), "litellm", needs_key=False),
    "/health/liveliness": ProxyRoute(("GET",), "litellm", needs_key=False),
    "/v1/completions": ProxyRoute(("POST",), "as it is"),
    "/v1/messages": ProxyRoute(("POST",), "as it is"),
    "/v1/messages/count_tokens": ProxyRoute(("POST",), "as it is"),
    "/v1/responses": ProxyRoute(("POST",), "as it is"),
    "/v1/responses/*": ProxyRoute(("GET", "DELETE"), "as it is"),
    "/v1/agents": ProxyRoute(("GET", "POST"), "as it is"),
    "/v1/agents/*": ProxyRoute(("GET", "POST", "DELETE"), "as it is"),
    "/v1/models/*": ProxyRoute(_GET, "direct"),
    "/v1/cache": ProxyRoute((*_GET, "DELETE"), "direct"),
    "/v1/cache/explain": ProxyRoute(_GET, "direct"),
    "/v1/cache/explain/*": ProxyRoute(_GET, "direct"),
    "/v1/cache/prewarm": ProxyRoute(("POST",), "direct"),
    "/metrics": ProxyRoute(_GET, "direct"),
    "/health": ProxyRoute(_GET, "direct", needs_key=False),
    "/dashboard": ProxyRoute(_GET, "direct", needs_key=False),
    "/dashboard/events": ProxyRoute(_GET, "direct"),
    "/dashboard/*": ProxyRoute(_GET, "direct", needs_key=False),
}
"""By path, or by its beginning where it ends with `*`."""

ANTHROPIC_VERSION = "anthropic-version"
ANTHROPIC_ROUTES: Mapping[str, ProxyRoute] = {"/v1/models": ProxyRoute(_GET, "direct")}
"""The same for requests with this header: LiteLLM lists its models as OpenAI does, whoever asks."""
_ALL_ANTHROPIC_ROUTES = {**ROUTES, **ANTHROPIC_ROUTES}

UNVERSIONED = ("/chat/completions", "/completions", "/models", "/messages", "/responses")
"""Paths, and what lies below them, that clients also ask for without `/v1`: their base URL names the port alone."""

# LiteLLM's management of keys, by the beginning of its paths.
_KEY_MANAGEMENT = ("/key", "/user", "/team", "/organization", "/budget", "/customer", "/sso", "/spend")


def find_route(method: str, path: str, headers: Container[str] = ()) -> ProxyRoute:
    """The route of a path, for a request with headers of these names. Raises NotFound or MethodNotAllowed."""
    whole = versioned(path)
    routes = _ALL_ANTHROPIC_ROUTES if ANTHROPIC_VERSION in headers else ROUTES
    begins = [name[:-1] for name in routes if name.endswith("*")]
    begin = max((begin for begin in begins if whole.startswith(begin) and whole != begin), key=len, default="")
    route = routes.get(whole) or routes.get(f"{begin}*")
    if route is None:
        raise NotFound(_why_not(path))
    if method not in route.methods:
        raise MethodNotAllowed(f"This path takes {' and '.join(route.methods)}.")
    return replace(route, path=whole)


def versioned(path: str) -> str:
    """The path with the `/v1` that some clients leave out."""
    return f"/v1{path}" if _is_below(path, UNVERSIONED) else path


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _why_not(path: str) -> str:
    if _is_below(path, _KEY_MANAGEMENT):
        return (
            "LiteLLM's virtual keys, users, teams and budgets need a database, and this proxy has none: API_KEY is its "
            "only key."
        )
    return "Neither kvserve nor the proxy serves this path."
