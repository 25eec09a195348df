"""Which backends a request goes to where there are several, and the answer that all of them give together. It knows
paths and what the fleet saw; it passes no request on.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping

import httpx

from kvserve.core import KEY_HEADER, JsonObject
from kvserve.errors import NotFound
from kvserve.proxy.access import Headers
from kvserve.proxy.all_backends import (
    PAGE_POLICY,
    Said,
    merged_agents,
    merged_health,
    merged_json,
    merged_metrics,
    newest_json,
    page_of_all,
)
from kvserve.proxy.asgi import HeaderList, Scope, json_header, read_headers
from kvserve.proxy.backend_health import Ask, Fleet, PlainAnswer
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.kept_where import holder_of, named_thing
from kvserve.proxy.paths import ProxyRoute
from kvserve.proxy.routing_key import routing_key

_LOOK_SECONDS = 10.0
_PAGES = ("/", "/dashboard")
_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Routing:
    """Chooses among the backends of a fleet."""

    def __init__(self, fleet: Fleet, ask: Ask) -> None:
        self._fleet = fleet
        self._ask = ask

    @property
    def has_several(self) -> bool:
        """Whether there is anything to choose."""
        return len(self._fleet.backends) > 1

    async def order(self, route: ProxyRoute, scope: Scope, body: JsonObject, told: str) -> tuple[BackendAddress, ...]:
        """Whom to ask, one after the other. `told` is the header that says whose the request is. Raises NotFound,
        NotReady."""
        if route.backend is not None:
            return (self._named(route.backend),)
        if not self.has_several:
            return self._fleet.order(b"")  # none, where it does not believe this proxy
        if route.goal == "one":
            raise NotFound(
                f"Each server has its own: an operator asks /backends/NAME{route.path}, where NAME is {self._names}."
            )
        if (thing := named_thing(route.path, body)) is not None:
            holder = await holder_of(thing, {KEY_HEADER: told}, self._fleet, self._ask)
            if holder is not None:
                return (holder,)
        if route.goal in ("kept", "all"):  # it says itself that it has none, or makes it, under a name of its own too
            return self._fleet.order(thing.encode("utf-8") if thing is not None else secrets.token_bytes(16))[:1]
        own = {name: values[0] for name, values in read_headers(scope).items()}
        return self._fleet.order(routing_key(body, {**own, KEY_HEADER: told.rpartition(" ")[2]}))

    def is_for_all(self, route: ProxyRoute, method: str) -> bool:
        """Whether all backends answer this together."""
        makes_one = route.path == "/v1/agents" and method == "POST"
        return self.has_several and route.backend is None and route.goal in ("all", "newest") and not makes_one

    async def answer_of_all(
        self, route: ProxyRoute, scope: Scope, raw: bytes, told: str
    ) -> tuple[int, bytes, HeaderList]:
        """Status, body and headers of what all of them say."""
        if route.path in _PAGES:
            headers = [
                (b"content-type", b"text/html; charset=utf-8"),
                (b"content-security-policy", PAGE_POLICY.encode()),
            ]
            return 200, page_of_all(self._fleet).encode("utf-8"), headers
        if route.path == "/health":
            status, body = merged_health(self._fleet)
            return status, json.dumps(body).encode(), json_header()
        said = await self._ask_all(scope, raw, told)
        if route.path == "/metrics":
            return 200, merged_metrics(said, self._fleet).encode("utf-8"), [(b"content-type", _METRICS_TYPE)]
        if route.goal == "newest":
            status, body = newest_json(said)
        elif route.path == "/v1/agents":
            status, body = merged_agents(said)
        else:
            status, body = merged_json(said, needs_all=scope["method"] not in ("GET", "HEAD"))
        return status, json.dumps(body).encode(), json_header()

    async def _ask_all(self, scope: Scope, raw: bytes, told: str) -> Said:
        query = scope.get("query_string", b"")
        target = scope["raw_path"].decode("ascii") + (f"?{query.decode('latin-1')}" if query else "")
        headers = {**_described(read_headers(scope)), KEY_HEADER: told}
        asked = [each for each in self._fleet.backends if self._fleet.may_be_asked(each)]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        answers = await asyncio.gather(*(self._answer(each, method, target, headers, raw) for each in asked))
        said = dict(zip((each.name for each in asked), answers, strict=True))
        return {each.name: said.get(each.name) for each in self._fleet.backends}

    async def _answer(
        self, backend: BackendAddress, method: str, target: str, headers: Mapping[str, str], raw: bytes
    ) -> PlainAnswer | None:
        """None without one. A model that is loaded or a prompt that is computed takes as long as it takes."""
        try:
            return await self._ask(backend, method, target, headers, None if method == "POST" else _LOOK_SECONDS, raw)
        except httpx.HTTPError:
            return None

    def _named(self, name: str) -> BackendAddress:
        for backend in self._fleet.backends:
            if backend.name == name and self._fleet.may_be_asked(backend):
                return backend
        raise NotFound(f"No server behind this proxy has this name: there are {self._names}.")

    @property
    def _names(self) -> str:
        return ", ".join(backend.name for backend in self._fleet.backends)


def _described(sent: Headers) -> dict[str, str]:
    """The headers that say what a request is."""
    return {name: sent[name][0] for name in ("content-type", "anthropic-version", "user-agent") if name in sent}
