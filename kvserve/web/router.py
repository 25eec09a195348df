"""Finds the route for a method and a path. It knows no endpoint by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvserve.web.exchange import EncodeError, HttpExchange
from kvserve.web.service import WebService

type Handle = Callable[[HttpExchange, WebService], None]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint: `path` is exact, or has one `*` for any text, which `handle` reads from `exchange.path_rest`.

    `encode_error` is the error form of the endpoint's protocol; None is the router's own. `statuses` maps an error's
    status to the protocol's own one.
    """

    method: str
    path: str
    handle: Handle
    needs_body: bool = False
    needs_key: bool = True
    encode_error: EncodeError | None = None
    statuses: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The routes of one path by method; none for an unknown path. GET routes answer HEAD too."""

    routes: Mapping[str, Route] = field(default_factory=dict)
    path_rest: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """The value of `Allow`."""
        return tuple(sorted({*self.routes, "OPTIONS", *(["HEAD"] if "GET" in self.routes else [])}))

    def route(self, method: str) -> Route | None:
        """The route for this method."""
        return self.routes.get("GET" if method == "HEAD" else method)


class Router:
    """The endpoint table and the service that its functions call. Frozen after construction, safe from any thread.

    A path that is not in the table is also looked up below `prefix`.
    """

    def __init__(
        self, routes: Iterable[Route], service: WebService, encode_error: EncodeError, prefix: str = ""
    ) -> None:
        self._prefix = prefix
        self.service = service
        self.encode_error = encode_error
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[tuple[str, str], dict[str, Route]] = {}
        for route in routes:
            begin, star, end = route.path.partition("*")
            known = self._patterns.setdefault((begin, end), {}) if star else self._exact.setdefault(begin, {})
            known[route.method] = route

    def above(self, path: str) -> Route | None:
        """A route of the nearest endpoint whose path an unknown path continues, whose protocol encodes the refusal;
        None if there is none."""
        return self._above(path) or self._above(self._prefix + path)

    def _above(self, path: str) -> Route | None:
        nearest = max((known for known in self._exact if path.startswith(f"{known}/")), key=len, default=None)
        return next(iter(self._exact[nearest].values())) if nearest is not None else None

    def find(self, path: str) -> RouteMatch:
        """The exact route, else the longest pattern that leaves text for its star, else an empty match."""
        found = self._found(path)
        return found if found.routes else self._found(self._prefix + path)

    def _found(self, path: str) -> RouteMatch:
        if routes := self._exact.get(path):
            return RouteMatch(routes)
        fitting = [
            (begin, end)
            for begin, end in self._patterns
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end)
        ]
        if not fitting:
            return RouteMatch()
        begin, end = max(fitting, key=lambda pattern: len(pattern[0]) + len(pattern[1]))
        return RouteMatch(self._patterns[begin, end], path[len(begin) : len(path) - len(end)])
