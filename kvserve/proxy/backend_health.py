"""How each backend is, as this proxy saw it last, and the order in which they are asked because of it. It knows what
/health says, no request.

Nothing of it is shared: proxies that see the same choose the same.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import httpx

from kvserve.core import KEY_HEADER, NO_KEY, JsonObject
from kvserve.proxy.backends import BackendAddress, rendezvous

type BackendState = Literal["ready", "busy", "starting", "draining", "down", "refused"]
"""`busy`: more wait there than may; `starting`: no model yet; `refused`: it does not believe this proxy, so all users
would be one there, and it is never asked."""

_RANK: Mapping[BackendState, int] = {"ready": 0, "busy": 1, "draining": 2, "starting": 2, "down": 3}
"""Who is asked first; among equals the key decides. One that refuses is never asked."""

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 2.0
MAX_TIMEOUTS = 3
"""So many polls without an answer in time make a backend `down`: one may hit a machine that is only very busy."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """A whole answer of a backend."""

    status: int
    headers: Mapping[str, str]
    body: bytes


type Ask = Callable[[BackendAddress, str, str, Mapping[str, str], float | None, bytes], Awaitable[PlainAnswer]]
"""Asks a backend: method, target with query, headers, seconds at most, body. Raises httpx.HTTPError."""


@dataclass(frozen=True, slots=True)
class BackendSeen:
    """What was seen of a backend: its state, and the last body of /health that it gave. `is_believing`: it said that it
    believes this proxy, and nothing since then says that another process may be there."""

    state: BackendState = "starting"
    body: JsonObject = field(default_factory=dict)
    num_timeouts: int = 0
    is_believing: bool = False


def judge(before: BackendState, status: int, body: JsonObject, max_waiting: int) -> BackendState:
    """The state that an answer of /health means. A busy backend is ready again when half as many wait as may: at the
    bound itself its sessions would come and go."""
    if status in (401, 403):
        return "refused"
    if status not in (200, 503):
        return "down"
    if body.get("knows_proxy") is not True:
        return "refused"
    if body.get("draining") is True:
        return "draining"
    if status == 503:
        return "starting"
    waiting = body.get("num_waiting")
    bound = max_waiting // 2 if before == "busy" else max_waiting
    return "busy" if isinstance(waiting, int) and waiting > bound else "ready"


class Fleet:
    """The backends and how they are. It belongs to the loop of the proxy's process.

    `is_watched`: nobody is asked who has not said that it believes this proxy; otherwise the proxy is their own.
    """

    def __init__(self, backends: Sequence[BackendAddress], max_waiting: int, *, is_watched: bool = False) -> None:
        self.backends = tuple(backends)
        self._max_waiting = max_waiting
        self._is_watched = is_watched
        self._seen = {each.name: BackendSeen() for each in backends}
        self.num_requests: Counter[str] = Counter()
        self.num_passed_over: Counter[str] = Counter()

    def order(self, key: bytes) -> tuple[BackendAddress, ...]:
        """Who is asked, in this order: the usable ones first, each group in the key's own order. Empty if none is known
        to believe this proxy."""
        believing = [each for each in rendezvous(key, self.backends) if self.may_be_asked(each)]
        return tuple(sorted(believing, key=lambda each: _RANK[self.state(each)]))

    def may_be_asked(self, backend: BackendAddress) -> bool:
        """Whether it would know whose a request is."""
        seen = self._seen[backend.name]
        return seen.state != "refused" and (seen.is_believing or not self._is_watched)

    def state(self, backend: BackendAddress) -> BackendState:
        """How this backend was seen last."""
        return self._seen[backend.name].state

    def seen(self, backend: BackendAddress) -> BackendSeen:
        """All that was seen of this backend."""
        return self._seen[backend.name]

    def note_answer(self, backend: BackendAddress, status: int, body: JsonObject) -> None:
        """What /health said."""
        state = judge(self._seen[backend.name].state, status, body, self._max_waiting)
        self._seen[backend.name] = BackendSeen(state, body, is_believing=state not in ("refused", "down"))

    def note_unreached(self, backend: BackendAddress) -> None:
        """Nobody answers there; who does so next may be another process, with another secret."""
        self._seen[backend.name] = BackendSeen("down", self._seen[backend.name].body)

    def note_timeout(self, backend: BackendAddress) -> None:
        """/health gave no answer in time."""
        seen = self._seen[backend.name]
        num_timeouts = seen.num_timeouts + 1
        state = "down" if num_timeouts >= MAX_TIMEOUTS else seen.state
        self._seen[backend.name] = replace(seen, state=state, num_timeouts=num_timeouts)

    def note_elsewhere(self, backend: BackendAddress) -> None:
        """A request went on to another backend."""
        self.num_passed_over[backend.name] += 1


async def look(fleet: Fleet, backend: BackendAddress, ask: Ask, secret: str) -> None:
    """Asks one backend how it is."""
    headers = {KEY_HEADER: f"{secret} {NO_KEY}"}
    try:
        answer = await ask(backend, "GET", "/health", headers, PATIENCE_SECONDS, b"")
        body = json.loads(answer.body)
    except httpx.TimeoutException:
        fleet.note_timeout(backend)
    except httpx.HTTPError:
        fleet.note_unreached(backend)
    except ValueError:  # not ours: it says nothing of this proxy
        fleet.note_answer(backend, 403, {})
    else:
        fleet.note_answer(backend, answer.status, body if isinstance(body, dict) else {})


async def watch(fleet: Fleet, ask: Ask, secret: str) -> None:
    """Asks every backend about once a second, for ever. Proxies do not ask in step."""

    async def follow(backend: BackendAddress) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS * random.uniform(0.8, 1.2))
            await look(fleet, backend, ask, secret)

    async with asyncio.TaskGroup() as group:
        for backend in fleet.backends:
            group.create_task(follow(backend))
