"""Rows in a shared server: what is sent, what of it is read back, and what a server costs that fails."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvserve.remote import shared_rows, shared_server
from kvserve.remote.redis_link import Command, LinkFailed, LinkRefusal
from kvserve.remote.shared_rows import MAX_FIELDS, RowToSend, SharedRows
from kvserve.remote.shared_server import SharedServer
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_engines import wait_until

BOUND_SECONDS = 2.0
"""What is to take half a second, on a machine that does something else too."""


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def rows(redis: FakeRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedRows]:
    monkeypatch.setattr(shared_server, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("kvserve.remote.rates.FIRST_PAUSE_SECONDS", 0.02)
    server = SharedServer("redis://fake", redis.link, lambda _: None)
    sent = SharedRows(server, 3600)
    server.start(sent.next_put)
    wait_until(lambda: server.is_open)
    yield sent
    server.close()


def row(key: str, body: bytes = b"x", mark: int = 1) -> RowToSend:
    return RowToSend(key, mark, lambda: ("field", body))


def path(letters: str) -> list[RowToSend]:
    return [row(letter, letter.encode()) for letter in letters]


def settled(rows: SharedRows) -> None:
    wait_until(lambda: rows.num_queued == 0 and not rows.server.is_putting)


def sent(redis: FakeRedis) -> list[str]:
    return [str(command[1]) for command in redis.commands if command[0] == "HSET"]


def test_what_is_sent_is_read_up_to_the_first_hole(rows: SharedRows, redis: FakeRedis) -> None:
    """Each has a time after which it goes."""
    rows.send(path("abc"))
    settled(rows)
    assert rows.read(list("abxc")) == [{"field": b"a"}, {"field": b"b"}]
    assert redis.expires.keys() >= set("abc") and rows.counts.num_sent == 3 and rows.counts.num_sent_bytes == 3
    assert (rows.counts.num_reads, rows.counts.num_given_up) == (1, 0)


def test_what_is_there_is_not_sent_again_but_stays(rows: SharedRows, redis: FakeRedis) -> None:
    """What was evicted meanwhile, or says something else now, is sent."""
    rows.send(path("abc"))
    settled(rows)
    del redis.values["b"], redis.expires["a"]
    redis.commands.clear()
    rows.send([*path("ab"), row("c", b"other", 2), row("d")])
    settled(rows)
    assert sorted(sent(redis)) == ["b", "c", "d"] and "a" in redis.expires
    assert rows.read(list("abcd"))[2] == {"field": b"other"}


def test_a_path_takes_the_place_of_its_beginning(rows: SharedRows, redis: FakeRedis) -> None:
    """Another branch does not; of too many the oldest are dropped, and counted."""
    with rows.server.paused():
        for letters in ("ab", "abcd", "abx"):
            rows.send(path(letters))
        assert rows.num_queued == 2
        for number in range(shared_rows.MAX_JOBS):
            rows.send([row(f"key{number}")])
        assert rows.num_queued == shared_rows.MAX_JOBS and rows.counts.num_dropped == 2
    settled(rows)
    assert "x" not in sent(redis)


def test_what_could_not_be_sent_is_sent_once_the_server_is_there(rows: SharedRows, redis: FakeRedis) -> None:
    """What can never be written is left out, and keeps nothing from going."""
    is_gone = threading.Event()
    is_gone.set()

    def fail(_: Sequence[Command]) -> None:
        if is_gone.is_set():
            raise LinkFailed("unreachable", "gone")

    redis.on_run = fail
    rows.send([*path("a"), RowToSend("never", 1, lambda: None), *path("b")])
    wait_until(lambda: not rows.server.breaker.is_closed)
    assert rows.num_queued == 1 and rows.read(["a"]) == []
    assert redis.keys() == []
    is_gone.clear()
    settled(rows)
    assert redis.keys() == ["a", "b"]


def test_a_server_without_room_is_left_alone(rows: SharedRows, redis: FakeRedis) -> None:
    """And what was not sent is counted."""
    redis.is_full = True
    rows.send(path("a"))
    settled(rows)
    assert rows.counts.num_dropped == 1 and rows.server.is_full and redis.keys() == []


def test_a_row_that_raises_is_dropped(rows: SharedRows, redis: FakeRedis) -> None:
    """It is not tried for ever."""

    def fail() -> tuple[str, bytes]:
        raise ZeroDivisionError

    rows.send([RowToSend("a", 1, fail)])
    rows.send(path("b"))
    settled(rows)
    assert sent(redis) == ["b"] and rows.server.faults() == {"crashed": 1}


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_server_that_fails_or_is_silent_costs_half_a_second_once(
    is_silent: bool, rows: SharedRows, redis: FakeRedis
) -> None:
    """Whoever asks while it is gone waits not at all."""
    rows.send(path("a"))
    settled(rows)

    def fail(commands: Sequence[Command]) -> None:
        if commands and commands[0][0] == "HGETALL":
            if is_silent:
                rows.server.asks_link.wait_for_hang_up(30)  # type: ignore[attr-defined]
            raise LinkFailed("unreachable", "gone")
        if commands and commands[0][0] == "PING":
            raise LinkFailed("unreachable", "gone")

    redis.on_run = fail
    began = time.monotonic()
    assert rows.read(["a"]) == [] and time.monotonic() - began < BOUND_SECONDS
    assert not rows.server.is_open and rows.counts.num_given_up == is_silent
    began = time.monotonic()
    assert rows.read(["a"]) == [] and time.monotonic() - began < 0.2 and rows.counts.num_reads == 1


def test_what_is_no_place_is_a_hole(rows: SharedRows, redis: FakeRedis) -> None:
    """A value of another type is none of ours; one with too many ways to be read is not gone on from."""
    rows.send(path("abc"))
    settled(rows)
    redis.values["b"] = b"a text"
    assert rows.read(list("abc")) == [{"field": b"a"}] and rows.server.faults() == {"strange": 1}
    assert rows.counts.num_crowded == 0
    redis.values["b"] = {f"field{number}": b"x" for number in range(MAX_FIELDS + 1)}
    assert rows.read(list("abc")) == [{"field": b"a"}] and rows.server.faults() == {"strange": 1}
    assert rows.counts.num_crowded == 1


@pytest.mark.parametrize(
    ("reply", "fault", "state"),
    [
        (LinkRefusal("refused", "NOPERM this user has no permissions"), "refused", "up"),
        (LinkRefusal("strange", "WRONGTYPE"), "strange", "up"),
        ([b"field", None], "damaged", "lying"),
        (7, "damaged", "lying"),
    ],
)
def test_a_server_that_refuses_a_read_is_no_liar(
    reply: object, fault: str, state: str, rows: SharedRows, redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV goes on; one whose answer to it is none is left alone for a while."""
    monkeypatch.setattr(redis, "_hgetall", lambda _: reply)
    for _ in range(3):
        assert rows.read(["a"]) == []
    assert rows.server.faults() == {fault: 3} and rows.server.state == state


def test_what_is_dropped_is_neither_sent_nor_given(
    rows: SharedRows, redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was being read meanwhile; what others wait for goes on."""
    monkeypatch.setattr(shared_rows, "FORGOTTEN_SECONDS", 0.0)
    rows.send(path("a"))
    settled(rows)
    with rows.server.paused():
        rows.send(path("b"))
        rows.send(path("c"))
        rows.drop(lambda key: key == "b")
    settled(rows)
    assert sent(redis) == ["a", "c"]

    def drop(commands: Sequence[Command]) -> None:
        if commands and commands[0][0] == "HGETALL":
            rows.drop(lambda _: True)

    redis.on_run = drop
    assert rows.read(["a"]) == []
    redis.on_run = lambda _: None
    assert rows.read(["a"]) == [{"field": b"a"}]
