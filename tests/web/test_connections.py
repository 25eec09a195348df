"""The bound on connections over real socket pairs: who makes room, who does not."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvserve.web import connections
from kvserve.web.connections import ConnectionTable, OpenConnection


class Peers:
    """Connections with a thread each that leaves the table when its socket is shut, as the server's do."""

    def __init__(self, table: ConnectionTable, stack: ExitStack) -> None:
        self.table = table
        self._stack = stack

    def admit(self) -> OpenConnection | None:
        client, server = socket.socketpair()
        self._stack.enter_context(client)
        self._stack.enter_context(server)
        entry = self.table.admit(server)
        if entry is not None:
            thread = threading.Thread(target=self._serve, args=(entry,))
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(client.close)
        return entry

    def _serve(self, entry: OpenConnection) -> None:
        entry.connection.recv(1)
        self.table.leave(entry)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    """A table with room for three, which waits for whoever is to leave however long that takes."""
    monkeypatch.setattr(connections, "_ROOM_WAIT_SECONDS", 600.0)
    with ExitStack() as stack:
        yield Peers(ConnectionTable(3), stack)


def test_the_oldest_silent_one_makes_room(peers: Peers) -> None:
    """At the limit the one that has been silent longest is shut; busy ones are left alone."""
    first, second, third = peers.admit(), peers.admit(), peers.admit()
    assert first and second and third
    assert peers.table.enter_phase(first, "serving")
    assert peers.admit() is not None
    assert (first.is_shut, second.is_shut, third.is_shut) == (False, True, False)
    assert (len(peers.table), peers.table.num_evicted) == (3, 1)
    assert not peers.table.enter_phase(second, "receiving")


def test_silence_counts_from_the_last_answer(peers: Peers) -> None:
    """A connection that has just been used is younger than one that was opened after it."""
    first, second, third = peers.admit(), peers.admit(), peers.admit()
    assert first and second and third
    assert peers.table.enter_phase(first, "serving")
    assert peers.table.enter_phase(first, "silent")
    peers.admit()
    assert (first.is_shut, second.is_shut) == (False, True)


def test_nobody_makes_room_while_all_are_busy(peers: Peers) -> None:
    """The newcomer is refused without waiting for anybody."""
    for phase in ("receiving", "serving", "serving"):
        entry = peers.admit()
        assert entry is not None
        peers.table.enter_phase(entry, phase)
    started = time.monotonic()
    assert peers.admit() is None
    assert time.monotonic() - started < 60


def test_closing_shuts_half_sent_requests_and_spares_running_answers(peers: Peers) -> None:
    """Draining shuts the silent, closing the half-received, and only `shut_all` what is being answered."""
    silent, receiving, serving = peers.admit(), peers.admit(), peers.admit()
    assert silent and receiving and serving
    peers.table.enter_phase(receiving, "receiving")
    peers.table.enter_phase(serving, "serving")
    peers.table.drain()
    assert peers.admit() is None
    assert (silent.is_shut, receiving.is_shut, serving.is_shut) == (True, False, False)
    peers.table.begin_closing()
    assert (receiving.is_shut, serving.is_shut) == (True, False)
    assert not peers.table.enter_phase(serving, "silent")
    assert not peers.table.wait_until_empty(0.05)
    peers.table.shut_all()
    assert peers.table.wait_until_empty(60)
