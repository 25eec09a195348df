"""Finds the backend that keeps a thing by its name: a response, an agent, an explanation. It asks all of them at once
and remembers nothing, so that every proxy finds everything. It knows paths, no bodies but the name of what they go on
with.
"""

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import quote

import httpx

from kvserve.core import JsonObject
from kvserve.errors import NotReady
from kvserve.proxy.backend_health import Ask, Fleet
from kvserve.proxy.backends import BackendAddress

_LOOK_SECONDS = 5.0
_PLACES = ("/v1/responses/", "/v1/agents/", "/v1/cache/explain/")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


def named_thing(path: str, body: JsonObject) -> str | None:
    """The path of the thing that a request is about: what its own path names, the response that it goes on from, or
    the agent that it makes; None for none."""
    if path == "/v1/responses":
        return _place(path, body.get("previous_response_id"))
    if path == "/v1/agents":
        return _place(path, body.get("agent_id"))
    for place in _PLACES:
        if path.startswith(place):
            rest = path.removeprefix(place)
            is_agent = place == "/v1/agents/"  # the operator names a holder's as DIGEST/ID
            return place + (rest.removesuffix("/generate") if is_agent else rest.partition("/")[0])
    return None


def _place(path: str, name: object) -> str | None:
    """None for what is no name: the backend refuses it in its own words."""
    return f"{path}/{name}" if isinstance(name, str) and _NAME.fullmatch(name) else None


async def holder_of(thing: str, headers: Mapping[str, str], fleet: Fleet, ask: Ask) -> BackendAddress | None:
    """The backend that answers for this path; None if all say that they have none. `headers` say whose it is.

    Raises NotReady if none has it and one gives no answer: it may be there.
    """
    usable = [each for each in fleet.backends if fleet.may_be_asked(each)]
    statuses = await asyncio.gather(*(_status(each, thing, headers, ask) for each in usable))
    for backend, status in zip(usable, statuses, strict=True):
        if status == 200:
            return backend
    silent = [each.name for each, status in zip(usable, statuses, strict=True) if status is None]
    silent += [each.name for each in fleet.backends if each not in usable and fleet.state(each) != "refused"]
    if silent:
        raise NotReady(f"It is on none of the servers that answer; {', '.join(silent)} gives no answer now.")
    return None


async def _status(backend: BackendAddress, thing: str, headers: Mapping[str, str], ask: Ask) -> int | None:
    try:
        return (await ask(backend, "HEAD", quote(thing), headers, _LOOK_SECONDS, b"")).status
    except httpx.HTTPError:
        return None
