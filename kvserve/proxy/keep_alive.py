"""How soon a connection to a machine that is gone without a word, as one that lost power, is given up: TCP's
keep-alive, for the guard's own client and, as variables, for LiteLLM's. It knows socket options and asks nobody.
"""

import socket

IDLE_SECONDS, INTERVAL_SECONDS, NUM_PROBES = 20, 10, 4
"""A minute in all: silent for so long, then so many questions that nobody answers. A live machine's kernel answers
them however busy its processes are."""

type SocketOption = tuple[int, int, int]

LITELLM_VARIABLES = {
    "AIOHTTP_SO_KEEPALIVE": "True",
    "AIOHTTP_TCP_KEEPIDLE": str(IDLE_SECONDS),
    "AIOHTTP_TCP_KEEPINTVL": str(INTERVAL_SECONDS),
    "AIOHTTP_TCP_KEEPCNT": str(NUM_PROBES),
}


def socket_options() -> list[SocketOption]:
    """The options of one connection: level, name, value."""
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)  # macOS has the other name
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [(socket.IPPROTO_TCP, idle, IDLE_SECONDS)] if idle is not None else []
    options += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES),
    ]
    # What was sent and is not acknowledged is sent again for a quarter of an hour, and asks nothing meanwhile.
    if (user_timeout := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        all_seconds = IDLE_SECONDS + INTERVAL_SECONDS * NUM_PROBES
        options.append((socket.IPPROTO_TCP, user_timeout, 1000 * all_seconds))
    return options
