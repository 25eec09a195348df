"""A machine that loses power says nothing: on every way to a backend the kernel asks whether it is still there."""

import asyncio
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from kvserve.proxy.entry import Backend as Direct
from kvserve.proxy.keep_alive import IDLE_SECONDS, INTERVAL_SECONDS, NUM_PROBES, socket_options
from tests.proxy.stubs import Backend, Client, Script

KEEP_ALIVE_TIMER = 2
JIFFIES_PER_SECOND = 100
MOST_SECONDS = 60


def test_a_silent_machine_is_given_up_within_a_minute() -> None:
    """By the options that a connection really has."""
    assert IDLE_SECONDS + INTERVAL_SECONDS * NUM_PROBES <= MOST_SECONDS

    async def options_of(url: str) -> dict[tuple[int, int], int]:
        client = Direct()
        async with client._client.stream("GET", url) as response:
            own: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
            found = {(level, name): own.getsockopt(level, name) for level, name, _ in socket_options()}
        await client.close()
        return found

    backend = Backend()
    try:
        found = asyncio.run(options_of(backend.url))
    finally:
        backend.close()
    assert found == {(level, name): value for level, name, value in socket_options()}
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE) in found and len(found) >= 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells it in /proc")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/cache/prewarm"])
def test_every_way_to_a_backend_has_it(client: Client, backend: Backend, path: str) -> None:
    """Through LiteLLM's client, through its pass-through endpoint, past LiteLLM: while an answer is waited for the
    kernel has a timer for the connection that rings in time."""
    go_on = threading.Event()
    backend.follow(Script(hold_seconds=30, go_on=go_on))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "input": "Hello"}
    asking = threading.Thread(target=client.post, args=(path, body))
    asking.start()
    try:
        assert backend.wait_until_asked(30)
        until, timers = time.monotonic() + 5, list[tuple[int, float]]()
        while not timers and time.monotonic() < until:  # the request is acknowledged a moment after it came
            timers = [each for each in _timers_to(backend.server.server_address[1]) if each[0] == KEEP_ALIVE_TIMER]
        assert timers and all(0 <= seconds <= IDLE_SECONDS for _, seconds in timers), timers
    finally:
        go_on.set()
        asking.join(30)


def _timers_to(port: int) -> list[tuple[int, float]]:
    """Of each open connection of this machine to a port: which timer the kernel has for it, and when it rings."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        remote, state, (timer, rings_in) = fields[2], fields[3], fields[5].split(":")
        if int(remote.partition(":")[2], 16) == port and state == "01":
            found.append((int(timer, 16), int(rings_in, 16) / JIFFIES_PER_SECOND))
    return found
