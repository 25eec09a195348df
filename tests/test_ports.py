"""What `tests.ports` promises: a port that neither the system nor another test gives out again."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

ANOTHER = "from tests.ports import free_port; print(free_port())"
ROOT = Path(__file__).resolve().parent.parent
SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_is_given_once() -> None:
    """Neither to this process again nor to another one, and a server can listen there."""
    ports = [free_port() for _ in range(3)]
    ports.append(int(subprocess.run([sys.executable, "-c", ANOTHER], cwd=ROOT, capture_output=True, check=True).stdout))
    assert len(set(ports)) == 4
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_listened_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port_after(20_000)
    behind = free_port_after(taken)
    monkeypatch.setattr("tests.ports._CANDIDATES", iter([taken, behind]))
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == behind


def free_port_after(port: int) -> int:
    return next(each for each in range(port + 1, 32_768) if _can_be_bound(each))


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as mark:
        try:
            probe.bind(("127.0.0.1", port))
            mark.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not SYSTEM_RANGE.exists(), reason="only Linux says which ports it gives out by itself")
def test_the_system_gives_out_others() -> None:
    """Where its range is the usual one; a wider one leaves no port that is free of it."""
    first = int(SYSTEM_RANGE.read_text("ascii").split()[0])
    assert free_port() < first or first < 32_768
