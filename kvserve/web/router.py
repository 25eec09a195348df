"""Finds the row of the endpoint table for a method and a path. It knows no endpoint by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvserve.web.exchange import EncodeError, Exchange
from kvserve.web.service import WebService

type Handle = Callable[[Exchange, WebService], None]


@dataclass(frozen=True, slots=True)
class Route:
    """One row: `path` is exact, or ends with `*` for any rest, which the function finds in `exchange.path_rest`.

    `encode_error` is the error form of the endpoint's protocol; None is the router's own.
    """

    method: str
    path: str
    handle: Handle
    needs_body: bool = False
    needs_key: bool = True
    encode_error: EncodeError | None = None


@dataclass(frozen=True, slots=True)
class Match:
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
    """The endpoint table and what its functions need. Frozen after construction, safe from any thread."""

    def __init__(self, routes: Iterable[Route], service: WebService, encode_error: EncodeError) -> None:
        self.service = service
        self.encode_error = encode_error
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = self._prefixes if route.path.endswith("*") else self._exact
            table.setdefault(route.path.removesuffix("*"), {})[route.method] = route

    def find(self, path: str) -> Match:
        """The exact row, else the longest prefix that leaves a rest, else an empty match."""
        if rows := self._exact.get(path):
            return Match(rows)
        fitting = [prefix for prefix in self._prefixes if path.startswith(prefix) and path != prefix]
        if not fitting:
            return Match()
        prefix = max(fitting, key=len)
        return Match(self._prefixes[prefix], path[len(prefix) :])
