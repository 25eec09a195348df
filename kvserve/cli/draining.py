"""`kvserve drain`: takes a server out of what its proxies choose from, and waits until it has nothing to do. It asks
the server itself; proxies see it when they look."""

import time

import click

from kvserve.cli.asking import Address, NoAnswer, address_of, server_options
from kvserve.cli.output import Json, json_option, show

QUIET_SECONDS = 3.0
"""So long nothing may run or wait: three looks of every proxy, so that none sends anything any more."""

_LOOK_SECONDS = 0.25


@click.command()
@click.option("--undo", is_flag=True, help="Let proxies choose it again.")
@click.option("--wait", "wait_seconds", type=float, default=600.0, show_default=True, metavar="SECONDS")
@server_options
@json_option
def drain(undo: bool, wait_seconds: float, server_url: str | None, api_key: str | None, as_json: bool) -> None:
    """Have new requests go to other servers, and wait until this one is idle: then it can be stopped.

    Its sessions come back once it runs again. The exit code is 2 where it does not answer or is not idle in time.
    """
    server = address_of(server_url, api_key)
    state = server.post("/v1/drain", {"draining": not undo})
    if not undo:
        state = wait_until_idle(server, wait_seconds)
    words = "takes requests again" if undo else "is idle and gets no more requests through its proxies"
    show({"draining": not undo, **_load(state)}, as_json, lambda: f"{server.url} {words}.")


def wait_until_idle(server: Address, seconds: float) -> Json:
    """The server's state once it has been idle for a while. Raises NoAnswer if that does not come in time."""
    deadline = time.monotonic() + seconds
    idle_since: float | None = None
    while True:
        state, now = server.get("/health"), time.monotonic()
        is_idle = not any(_load(state).values())
        idle_since = (idle_since or now) if is_idle else None
        if idle_since is not None and now - idle_since >= QUIET_SECONDS:
            return state
        if now > deadline:
            raise NoAnswer(f"{server.url}: {state['num_running']} requests still run, {state['num_waiting']} wait")
        time.sleep(_LOOK_SECONDS)


def _load(state: Json) -> Json:
    return {name: state[name] for name in ("num_running", "num_waiting")}
