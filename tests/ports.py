"""Ports for servers that a test starts later, often in another process."""

import socket

_CANDIDATES = iter(range(10_000, 32_768))
"""Below the ports that systems give out by themselves (Linux from 32768, macOS from 49152)."""

_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that no test is given again while this process lives.

    A port that the system chose and got back may be its next choice, for a connection or for another test. This one is
    below those, and the UDP port of the same number stays bound, which keeps other test processes from it.
    """
    for port in _CANDIDATES:
        mark = socket.socket(type=socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
        else:
            _held.append(mark)
            return port
    raise OSError("no port from 10000 to 32767 is free")
