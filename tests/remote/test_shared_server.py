"""The two threads in front of a shared server: steps of several in turn, what is first, what stays while it is gone."""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kvserve.cache.remote_fetch import Fetch
from kvserve.remote import shared_server
from kvserve.remote.redis_link import Command, LinkFailed
from kvserve.remote.shared_server import SharedServer, Task
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_disks import SharedDisk
from tests.remote.shared_engines import wait_until


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def server(redis: FakeRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedServer]:
    monkeypatch.setattr("kvserve.remote.rates.FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(shared_server, "FIRST_PAUSE_SECONDS", 0.02)
    server = SharedServer("redis://fake", redis.link, lambda _: None)
    server.start(lambda: None)
    wait_until(lambda: server.is_open)
    yield server
    server.close()


def test_a_look_goes_between_two_steps_of_a_read(server: SharedServer) -> None:
    """What came last is next; the end of each is told once."""
    order, ends, go = list[str](), list[str](), threading.Event()

    def long() -> Iterator[float]:
        order.append("one")
        go.wait(10)
        yield 0.0
        order.append("two")

    def short() -> Iterator[float]:
        order.append("look")
        yield from ()

    server.ask(Task(long(), lambda: ends.append("long")))
    wait_until(lambda: order == ["one"])
    server.ask(Task(short(), lambda: ends.append("short")))
    go.set()
    wait_until(lambda: len(ends) == 2)
    assert (order, ends) == (["one", "look", "two"], ["short", "long"])


@pytest.mark.parametrize("error", [LinkFailed("timed_out", "x"), ZeroDivisionError()])
def test_a_failure_ends_what_was_asked_and_the_thread_goes_on(error: Exception, server: SharedServer) -> None:
    """A connection's opens the breaker, which a probe closes again."""
    ends = threading.Event()

    def fail() -> Iterator[float]:
        raise error
        yield 0.0

    server.ask(Task(fail(), ends.set))
    assert ends.wait(10)
    wait_until(lambda: sum(server.faults().values()) == 1 and server.is_open)
    again = threading.Event()
    server.ask(Task(iter(()), again.set))
    assert again.wait(10)


def test_what_is_first_is_done_once_the_server_is_there(server: SharedServer, redis: FakeRedis) -> None:
    """It is tried again for as long as it takes, and nothing is sent before."""
    tries, is_gone = list[int](), threading.Event()
    is_gone.set()

    def fail(_: Sequence[Command]) -> None:
        if is_gone.is_set():
            raise LinkFailed("unreachable", "gone")

    redis.on_run = fail

    def work() -> None:
        tries.append(1)
        server.puts_link.run([("PING",)], 0.0)

    assert not server.first(work, 0.2)
    assert not server.breaker.is_closed and server.is_putting
    is_gone.clear()
    wait_until(lambda: not server.is_putting)
    assert server.first(work, 10)


def test_what_speaks_against_it_is_measured_again(server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more often than once in a while."""
    server.rates.read_bytes_per_second = 1.0
    server.measure()
    assert not server.faults() and server.rates.read_bytes_per_second == 1.0
    monkeypatch.setattr(shared_server, "MEASURE_SECONDS", 0.0)
    server._measure_at = 0.0
    wait_until(lambda: (server.rates.read_bytes_per_second or 0) > 1000)


def test_nothing_is_asked_before_what_is_first_is_done(server: SharedServer) -> None:
    """Also where whoever asked for it waits no longer: it may be about what would be read."""
    go, steps, ends = threading.Event(), list[int](), threading.Event()

    def work() -> None:
        go.wait(10)

    def read() -> Iterator[float]:
        steps.append(1)
        yield from ()

    assert not server.first(work, 0.01)
    assert server.breaker.is_closed and not server.is_open and server.state == "forgetting"
    server.ask(Task(read(), ends.set))
    assert ends.wait(10) and steps == []
    go.set()
    wait_until(lambda: server.is_open)
    assert server.state == "up"


def test_what_is_first_and_always_refused_is_tried_less_and_less_often(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pauses are its own, as all else is answered, and the terminal has one line until it is done."""
    monkeypatch.setattr("kvserve.remote.rates.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(shared_server, "FIRST_PAUSE_SECONDS", 0.05)
    lines, tries, is_allowed = list[str](), list[float](), threading.Event()

    def work() -> None:
        tries.append(time.monotonic())
        if not is_allowed.is_set():
            raise LinkFailed("refused", "NOPERM")

    server = SharedServer("redis://fake", redis.link, lines.append)
    server.start(lambda: None)
    try:
        assert not server.first(work, 0.01)
        wait_until(lambda: len(tries) == 4)
        pauses = [after - before for before, after in pairwise(tries)]
        assert all(pause >= 0.9 * least for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True))
        assert len(lines) == 1 and "refuses us" in lines[0]
        is_allowed.set()
        assert server.first(work, 10) and not server.is_putting
        assert len(lines) == 2 and "answers again" in lines[1]
    finally:
        server.close()


def test_a_server_that_was_never_started_can_be_closed(redis: FakeRedis) -> None:
    """A start of the process may fail before."""
    SharedServer("redis://fake", redis.link, lambda _: None).close()


def test_another_checksum_is_a_lie_where_it_comes_again(redis: FakeRedis) -> None:
    """Two servers that send one blob at the same time leave parts of both, once."""
    server = SharedServer("redis://fake", redis.link, lambda _: None)
    for name in "abc":
        server.is_altered(name, "its checksum is another")
    assert not server.breaker.is_lying and server.faults() == {"damaged": 3}
    for name in "abc":
        server.is_altered(name, "its checksum is another")
    assert server.breaker.is_lying and server.faults() == {"damaged": 6}


@pytest.mark.parametrize(
    ("has_begun", "seconds", "is_silent"), [(True, 0.6, True), (False, 0.6, False), (False, 1.1, True)]
)
def test_a_row_calls_silent_only_what_it_can_judge(
    has_begun: bool, seconds: float, is_silent: bool, tmp_path: Path, redis: FakeRedis
) -> None:
    """Its own look for half a second; a step of another row, behind which it waits, for longer."""
    with SharedDisk(tmp_path, redis) as disk:
        fetch = disk.begin(list(range(60)))
        assert isinstance(fetch, Fetch)
        fetch.has_begun = has_begun
        disk.server._step_began_at = time.monotonic() - seconds
        fetch.give_up()
        assert fetch.is_over and disk.server.faults() == ({"timed_out": 1} if is_silent else {})
