"""Finds the row of the endpoint table for a method and a path. It knows no endpoint by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvserve.web.exchange import EncodeError, HttpExchange
from kvserve.web.service import WebService

type Handle = Callable[[HttpExchange, WebService], None]


@dataclass(frozen=True, slots=True)
class Route:
    """One row: `path` is exact, or has one `*` for anything, which the function finds in `exchange.path_rest`.

    `encode_error` is the error form of the endpoint's protocol; None is the router's own. `statuses` maps an error's
    status to another one where the protocol has one of its own.
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
    """The rows of one path by method; none if the path is unknown. GET rows answer HEAD too."""

    rows: Mapping[str, Route] = field(default_factory=dict)
    path_rest: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """What stands in `Allow`."""
        return tuple(sorted({*self.rows, "OPTIONS", *(["HEAD"] if "GET" in self.rows else [])}))

    def row(self, method: str) -> Route | None:
        """The row that answers this method."""
        return self.rows.get("GET" if method == "HEAD" else method)


class Router:
    """The endpoint table and what its functions need. Frozen after construction, safe from any thread.

    A path that is not in the table is looked for below `prefix`, too.
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
            rows = self._patterns.setdefault((begin, end), {}) if star else self._exact.setdefault(begin, {})
            rows[route.method] = route

    def above(self, path: str) -> Route | None:
        """A row of the nearest endpoint whose path an unknown one continues, for what is not there is refused in its
        protocol's form; None where there is none."""
        return self._above(path) or self._above(self._prefix + path)

    def _above(self, path: str) -> Route | None:
        nearest = max((known for known in self._exact if path.startswith(f"{known}/")), key=len, default=None)
        return next(iter(self._exact[nearest].values())) if nearest is not None else None

    def find(self, path: str) -> RouteMatch:
        """The exact row, else the longest pattern that leaves something for its star, else an empty match."""
        found = self._found(path)
        return found if found.rows else self._found(self._prefix + path)

    def _found(self, path: str) -> RouteMatch:
        if rows := self._exact.get(path):
            return RouteMatch(rows)
        fitting = [
            (begin, end)
            for begin, end in self._patterns
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end)
        ]
        if not fitting:
            return RouteMatch()
        begin, end = max(fitting, key=lambda pattern: len(pattern[0]) + len(pattern[1]))
        return RouteMatch(self._patterns[begin, end], path[len(begin) : len(path) - len(end)])
