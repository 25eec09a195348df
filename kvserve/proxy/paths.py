"""The table of port 4000's paths: methods, whether they need the key, and who answers them. It knows no request."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import unquote

from kvserve.errors import MethodNotAllowed, NotFound
from kvserve.proxy.envelope import chat_envelope

type Envelope = Callable[[Mapping[str, object], str], dict[str, object]]
type Way = Literal["litellm", "as it is", "direct"]
"""Who answers: LiteLLM; kvserve through LiteLLM's pass-through endpoint, byte for byte; or kvserve alone."""


type Goal = Literal["conversation", "kept", "any", "all", "newest", "one"]
"""Which of several backends: the one of the conversation; the one that keeps what the path names; any that is ready;
all of them; the one of all whose answer is of the newest request; or the one that a path below /backends/ names, since
each has its own."""


@dataclass(frozen=True, slots=True)
class ProxyRoute:
    """A path that the proxy serves. `envelope` makes the body that LiteLLM sees of a JSON object; of several backends
    `goal` says which it goes to. `find_route` sets `path` to the request's path with its `/v1`, and `backend` to the
    one that a path below /backends/ names. Where holders have keys, `for_operator` is refused to all others, and POST
    requests count in their limits where `is_limited`."""

    methods: tuple[str, ...]
    way: Way
    envelope: Envelope | None = None
    needs_key: bool = True
    for_operator: bool = False
    is_limited: bool = True
    goal: Goal = "any"
    path: str = ""
    backend: str | None = None

    def counts(self, method: str) -> bool:
        """Whether a request of this method counts in its holder's limits: to read and to delete is free."""
        return self.is_limited and method == "POST"


_GET = ("GET", "HEAD")

# LiteLLM's hundred other paths are not served: some change its configuration, some send bodies to a cloud provider, and
# its /health runs a generation per call. kvserve's own reports bypass LiteLLM, which keeps all of a stream in memory:
# the dashboard's stream never ends.
ROUTES: Mapping[str, ProxyRoute] = {
    "/v1/chat/completions": ProxyRoute(("POST",), "litellm", chat_envelope, goal="conversation"),
    "/v1/models": ProxyRoute(("GET",), "litellm"),
    "/health/readiness": ProxyRoute(("GET",), "litellm", needs_key=False),
    "/health/liveliness": ProxyRoute(("GET",), "litellm", needs_key=False),
    "/v1/completions": ProxyRoute(("POST",), "as it is", goal="conversation"),
    "/v1/messages": ProxyRoute(("POST",), "as it is", goal="conversation"),
    "/v1/messages/count_tokens": ProxyRoute(("POST",), "as it is", is_limited=False, goal="conversation"),
    "/v1/responses": ProxyRoute(("POST",), "as it is", goal="conversation"),
    "/v1/responses/*": ProxyRoute(("GET", "DELETE"), "as it is", goal="kept"),
    "/v1/agents": ProxyRoute(("GET", "POST"), "as it is", goal="all"),
    "/v1/agents/*": ProxyRoute(("GET", "POST", "DELETE"), "as it is", goal="kept"),
    "/v1/models/*": ProxyRoute(_GET, "direct"),
    "/v1/models/load": ProxyRoute(("POST",), "direct", for_operator=True, is_limited=False, goal="all"),
    "/v1/cache": ProxyRoute((*_GET, "DELETE"), "direct", for_operator=True, goal="all"),
    "/v1/cache/explain": ProxyRoute(_GET, "direct", goal="newest"),
    "/v1/cache/explain/*": ProxyRoute(_GET, "direct", goal="kept"),
    "/v1/cache/prewarm": ProxyRoute(("POST",), "direct", goal="all"),
    "/v1/drain": ProxyRoute(("POST",), "direct", for_operator=True, is_limited=False, goal="one"),
    "/metrics": ProxyRoute(_GET, "direct", for_operator=True, goal="all"),
    "/health": ProxyRoute(_GET, "direct", needs_key=False, goal="all"),
    "/": ProxyRoute(_GET, "direct", needs_key=False, goal="all"),
    "/dashboard": ProxyRoute(_GET, "direct", needs_key=False, goal="all"),
    "/dashboard/events": ProxyRoute(_GET, "direct", for_operator=True, goal="one"),
    "/dashboard/clients": ProxyRoute(_GET, "direct", goal="one"),
    "/dashboard/sessions/*": ProxyRoute(_GET, "direct", for_operator=True, goal="one"),
    "/dashboard/*": ProxyRoute(_GET, "direct", needs_key=False, goal="one"),
}
"""By path; a path that ends with `*` stands for all that begin with it."""

ANTHROPIC_VERSION = "anthropic-version"
ANTHROPIC_ROUTES: Mapping[str, ProxyRoute] = {"/v1/models": ProxyRoute(_GET, "direct")}
"""The routes that differ for requests with this header: LiteLLM always lists models in OpenAI's form."""
_ALL_ANTHROPIC_ROUTES = {**ROUTES, **ANTHROPIC_ROUTES}

UNVERSIONED = ("/chat/completions", "/completions", "/models", "/messages", "/responses")
"""Paths that clients also request without `/v1`, and the paths below them: some base URLs end with the port."""

_BELOW = "/backends/"


def split_backend(path: str) -> tuple[str | None, str]:
    """The backend that a path below /backends/ names, and the path there; None and the path itself for any other."""
    if not path.startswith(_BELOW):
        return None, path
    name, slash, rest = path.removeprefix(_BELOW).partition("/")
    return name, slash + rest


# The beginnings of the paths of LiteLLM's key management.
_KEY_MANAGEMENT = ("/key", "/user", "/team", "/organization", "/budget", "/customer", "/sso", "/spend")


_CLIMBING = frozenset({".", ".."})


def find_route(method: str, path: str, headers: Container[str] = ()) -> ProxyRoute:
    """The route of a request with headers of these names. Raises NotFound or MethodNotAllowed."""
    backend, inside = split_backend(path)
    whole = versioned(inside)
    is_past_litellm = backend is not None or ANTHROPIC_VERSION in headers
    routes = _ALL_ANTHROPIC_ROUTES if is_past_litellm else ROUTES
    begins = [name[:-1] for name in routes if name.endswith("*")]
    begin = max((begin for begin in begins if whole.startswith(begin) and whole != begin), key=len, default="")
    route = routes.get(whole) or routes.get(f"{begin}*")
    # LiteLLM's client, or a proxy before a backend, tidies a path that climbs, and another one than was judged arrives.
    climbs = not _CLIMBING.isdisjoint(unquote(whole).split("/"))
    if route is None or climbs or (backend is not None and route.way != "direct"):
        raise NotFound(_why_not(path))
    if method not in route.methods:
        raise MethodNotAllowed(f"This path takes {' and '.join(route.methods)}.")
    is_operators = route.for_operator or backend is not None
    return replace(route, path=whole, backend=backend, for_operator=is_operators)


def versioned(path: str) -> str:
    """The path with `/v1`, which some clients leave out."""
    return f"/v1{path}" if _is_below(path, UNVERSIONED) else path


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _why_not(path: str) -> str:
    if _is_below(path, _KEY_MANAGEMENT):
        return (
            "LiteLLM's virtual keys, users, teams and budgets need a database, and this proxy has none: its keys are "
            "API_KEY and those of API_KEYS_FILE."
        )
    return "Neither kvserve nor the proxy serves this path."
