"""How rows come into a shared server: in bites that others go between, whole or not at all, never for ever, and nothing
of whom is forgotten."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from kvserve.cache import shared_cache
from kvserve.cache.remote_keys import FORGET_STREAM, RecordKeys
from kvserve.cache.shared_cache import SharedCache
from kvserve.core.keeping import Scope
from kvserve.remote import shared_rows, shared_server
from kvserve.remote.redis_link import Command, LinkFailed, RedisLink
from kvserve.remote.shared_rows import BITE_BYTES, MAX_TRIES, ROWS_AT_ONCE, RowToSend, SharedRows
from kvserve.remote.shared_server import SharedServer, Steps, Task
from kvserve.settings.redis_address import parse_address
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_engines import wait_until
from tests.remote.test_shared_rows import path, row, sent, settled

SESSION = RecordKeys.of("a model", b"a secret").session("key.user", "s")
THEIRS = RecordKeys.of("a model", b"a secret").session("key.user", "t")


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shared_server.__name__, "kvserve.remote.rates"):
        monkeypatch.setattr(f"{module}.FIRST_PAUSE_SECONDS", 0.02)


def new_server(redis: FakeRedis) -> SharedServer:
    return SharedServer("redis://fake", redis.link, lambda _: None)


@pytest.fixture
def rows(redis: FakeRedis) -> Iterator[SharedRows]:
    found = SharedRows(new_server(redis), 3600)
    found.server.start(found.next_put)
    wait_until(lambda: found.server.is_open)
    yield found
    found.server.close()


class Blob:
    """A model's part that has one large blob to send, in these steps."""

    num_queued = 0

    def __init__(self, steps: Steps) -> None:
        self._tasks = [Task(steps)]

    def next_put(self) -> Task | None:
        return self._tasks.pop() if self._tasks else None

    def forbid(self) -> None:
        pass


@pytest.fixture
def sends(redis: FakeRedis) -> Iterator[Callable[[Callable[[SharedCache], Steps]], SharedCache]]:
    """A shared cache that begins to send a blob."""
    opened: list[SharedCache] = []

    def begin(steps: Callable[[SharedCache], Steps]) -> SharedCache:
        cache = SharedCache(new_server(redis), 3600, lambda: "0-0", lambda _: None)
        opened.append(cache)
        cache._tiers.append(cast("Any", Blob(steps(cache))))
        cache.start(lambda _: True)
        return cache

    yield begin
    for cache in opened:
        cache.close()


def number_of(command: Command) -> int:
    return int(str(command[1])[1:])


def bites(redis: FakeRedis) -> list[list[Command]]:
    found = list[list[Command]]()
    for command in redis.commands:
        if command[0] == "MULTI":
            found.append([])
        elif command[0] == "HSET":
            found[-1].append(command)
    return found


def fails_at(key: str, is_meant: Callable[[], bool] = lambda: True) -> Callable[[Sequence[Command]], None]:
    """A connection that breaks wherever this row is sent."""

    def fail(commands: Sequence[Command]) -> None:
        if is_meant() and any(command[:2] == ("HSET", key) for command in commands):
            raise LinkFailed("timed_out", "it took too long")

    return fail


# --- bites ------------------------------------------------------------------------------------------------------------


def test_a_path_goes_in_bites_that_others_go_between(rows: SharedRows, redis: FakeRedis) -> None:
    """Of so many rows or bytes; a larger row alone. All is there at the end, in its order."""
    sizes = [10] * 100 + [BITE_BYTES // 3] * 10 + [2 * BITE_BYTES] + [10] * 3
    heard = list[int]()
    rows.server.hear = lambda: heard.append(len(bites(redis)))
    redis.on_run = lambda commands: rows.server.hear_soon() if ("EXEC",) in commands else None
    rows.send([row(f"k{number}", bytes(size)) for number, size in enumerate(sizes)])
    settled(rows)
    found = bites(redis)
    assert [number_of(each) for bite in found for each in bite] == list(range(len(sizes)))
    for bite in found:
        num_bytes = sum(len(cast("bytes", each[3])) for each in bite)
        assert len(bite) <= ROWS_AT_ONCE and (num_bytes <= BITE_BYTES or len(bite) == 1)
    assert {1, 2, 3} <= set(heard), "others go between two bites"


def test_a_path_that_is_broken_off_goes_on_where_it_was(rows: SharedRows, redis: FakeRedis) -> None:
    broken = list[Sequence[Command]]()
    fail = fails_at("k100")

    def fail_once(commands: Sequence[Command]) -> None:
        if not broken:
            try:
                fail(commands)
            except LinkFailed:
                broken.append(commands)
                redis.commands.clear()
                raise

    redis.on_run = fail_once
    rows.send([row(f"k{number}") for number in range(150)])
    settled(rows)
    assert len(broken) == 1 and len(redis.keys()) == 150
    assert sent(redis) == [f"k{number}" for number in range(ROWS_AT_ONCE, 150)]


def test_a_path_that_never_comes_through_is_dropped_and_counted(rows: SharedRows, redis: FakeRedis) -> None:
    """What is behind it goes, and what of it came before the fault is not sent again."""
    redis.on_run = fails_at("k100")
    rows.send([row(f"k{number}") for number in range(150)])
    rows.send(path("a"))
    settled(rows)
    assert "a" in redis.values and rows.counts.num_dropped == 1
    assert sent(redis).count("k0") == 1 and sent(redis).count("k100") == MAX_TRIES
    assert rows.server.faults() == {"timed_out": MAX_TRIES}


def test_sending_ends_in_time_also_where_the_server_takes_it_slowly() -> None:
    """Each part of it comes through before the connection counts as silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_over = threading.Event()

        def take_slowly() -> None:
            taken, _ = listening.accept()
            with taken:
                while not is_over.wait(0.02) and taken.recv(2**14):
                    pass

        taker = threading.Thread(target=take_slowly, daemon=True)
        taker.start()
        link = RedisLink(parse_address(f"redis://127.0.0.1:{listening.getsockname()[1]}"), 30.0)
        began = time.monotonic()
        with pytest.raises(LinkFailed) as failed:
            link.run([("SET", f"k{number}", bytes(5000)) for number in range(4000)], began + 0.3)
        assert failed.value.kind == "timed_out" and time.monotonic() - began < 5.0
        is_over.set()
        taker.join(5.0)


# --- whole or not at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["EXPIRE", "HSET", "MULTI", "EXEC"])
def test_no_row_is_there_without_the_time_after_which_it_goes(command: str, rows: SharedRows, redis: FakeRedis) -> None:
    """Whatever the server refuses; that is counted, and no path behind it waits."""
    redis.forbidden = {command, "EXPIRE"}
    rows.send(path("ab"))
    settled(rows)
    assert redis.keys() == [] and rows.counts.num_dropped == 1 and rows.counts.num_sent == 0
    assert rows.server.faults() == {"refused": 1}
    redis.forbidden = set()
    rows.send(path("ab"))
    settled(rows)
    assert redis.keys() == ["a", "b"] and redis.expires.keys() >= {"a", "b"}


def test_a_process_that_ends_between_two_commands_leaves_no_row(rows: SharedRows, redis: FakeRedis) -> None:
    """Each row and its time are in one transaction."""
    rows.send(path("ab"))
    settled(rows)
    names = [command[0] for command in redis.commands if command[0] in ("MULTI", "HSET", "EXPIRE", "EXEC")]
    assert names == ["MULTI", "HSET", "EXPIRE", "HSET", "EXPIRE", "EXEC"]


def test_a_row_that_is_refused_keeps_no_other_from_being_noted(rows: SharedRows, redis: FakeRedis) -> None:
    """A value of another type stands in its place."""
    redis.values["b"] = b"a text"
    rows.send(path("abc"))
    settled(rows)
    assert rows.counts.num_dropped == 1 and rows.counts.num_sent == 2
    redis.commands.clear()
    rows.send(path("abcd"))
    settled(rows)
    assert sent(redis) == ["b", "d"] and rows.server.faults() == {"strange": 2}


def test_a_row_that_raises_ends_neither_its_path_nor_a_blob(
    redis: FakeRedis, sends: Callable[[Callable[[SharedCache], Steps]], SharedCache]
) -> None:
    def fail() -> tuple[str, bytes]:
        raise ZeroDivisionError

    has_ended = threading.Event()

    def steps(cache: SharedCache) -> Steps:
        yield 0.0
        cache.rows.send([*path("a"), RowToSend("raises", 1, fail), *path("b")])
        yield 0.0
        has_ended.set()

    cache = sends(steps)
    wait_until(has_ended.is_set)
    assert sent(redis) == ["a", "b"] and cache.server.faults() == {"crashed": 1}


# --- what waits -------------------------------------------------------------------------------------------------------


def test_what_waits_is_bounded_in_bytes(rows: SharedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first, and is counted."""
    monkeypatch.setattr(shared_rows, "MAX_QUEUED_BYTES", 1000)
    with rows.server.paused():
        for letter in "abcd":
            rows.send([RowToSend(letter, 1, lambda: None, 300)])
        assert [job.rows[0].key for job in rows._jobs] == ["b", "c", "d"] and rows.counts.num_dropped == 1
        rows.send([RowToSend("e", 1, lambda: None, 1001)])
        assert rows.num_queued == 0 and rows.counts.num_dropped == 5


def test_what_waited_longer_than_it_may_stay_is_not_sent(rows: SharedRows, redis: FakeRedis) -> None:
    with rows.server.paused():
        rows.send(path("a"))
        rows._jobs[0].until = time.monotonic() - 1.0
        rows.send(path("b"))
        assert rows.num_queued == 1
        rows._jobs[0].until = time.monotonic() - 1.0
    settled(rows)
    assert sent(redis) == [] and rows.counts.num_dropped == 2


def test_rows_are_read_before_what_else_is_asked(rows: SharedRows, redis: FakeRedis) -> None:
    """Also the second exchange of a long path: a request waits for all of it."""
    keys = [f"k{number}" for number in range(2 * ROWS_AT_ONCE)]
    redis.values |= {key: {"field": b"x"} for key in keys}
    order, has_begun, is_over = list[str](), threading.Event(), threading.Event()
    redis.on_run = lambda commands: order.append(str(commands[0][0])) if commands[0][0] == "HGETALL" else None

    def blob() -> Steps:
        has_begun.set()
        wait_until(lambda: len(rows.server._asks) > 0)  # what the request asks for
        for _ in range(3):
            order.append("blob")
            yield 0.0
        is_over.set()

    rows.server.ask(Task(blob()))
    wait_until(has_begun.is_set)
    assert len(rows.read(keys)) == len(keys)
    wait_until(is_over.is_set)
    assert order == ["blob", "HGETALL", "HGETALL", "blob", "blob"]


# --- forgetting -------------------------------------------------------------------------------------------------------


def test_nothing_of_whom_is_forgotten_is_read_for_a_while(rows: SharedRows, redis: FakeRedis) -> None:
    """A server that has not heard yet sends it again; what others said is read."""
    rows.drop(lambda key: key == "a")
    rows.drop(lambda key: key == "c")
    redis.values |= {letter: {"field": b"x"} for letter in "abc"}
    assert [len(rows.read([letter])) for letter in "abc"] == [0, 1, 0]
    rows._forgotten = [(until - shared_rows.FORGOTTEN_SECONDS, is_meant) for until, is_meant in rows._forgotten]
    assert [len(rows.read([letter])) for letter in "abc"] == [1, 1, 1]
    rows.drop(lambda key: key == "b")
    assert len(rows._forgotten) == 1, "what is over is not kept"


def test_what_others_forgot_is_heard_right_behind_rows(
    redis: FakeRedis, sends: Callable[[Callable[[SharedCache], Steps]], SharedCache]
) -> None:
    """Also between two steps of a blob, which may take long."""
    has_ended = threading.Event()

    def steps(cache: SharedCache) -> Steps:
        yield 0.0
        cache.rows.send(path("a"))
        yield 0.0
        redis.commands.append(("the blob goes on",))
        has_ended.set()

    sends(steps)
    wait_until(has_ended.is_set)
    names = [str(command[0]) for command in redis.commands]
    begin, end = names.index("HSET"), names.index("the blob goes on")
    assert "XRANGE" in names[begin:end]


def test_what_others_forgot_is_heard_before_anything_is_sent_to_a_server_that_was_gone(
    redis: FakeRedis, sends: Callable[[Callable[[SharedCache], Steps]], SharedCache]
) -> None:
    cache = sends(lambda _: iter(()))
    wait_until(lambda: any(command[0] == "XRANGE" for command in redis.commands))
    cache.server._hear_at = time.monotonic() + 60.0
    is_gone = threading.Event()
    is_gone.set()

    def fail(_: Sequence[Command]) -> None:
        if is_gone.is_set():
            raise LinkFailed("unreachable", "gone")

    def forget(scope: Scope) -> bool:
        with cache.forgetting(scope, is_heard=True) as is_done:
            return is_done

    cache._on_heard = forget
    redis.answer(("XADD", FORGET_STREAM, "MAXLEN", "~", 100, "*", "by", "another", "session", "s"))
    redis.on_run = fail
    cache.rows.send([row(SESSION(b"a"))])
    wait_until(lambda: not cache.server.breaker.is_closed)
    redis.commands.clear()
    is_gone.clear()
    wait_until(lambda: cache.num_heard == 1 and cache.server.is_open)
    assert sent(redis) == [] and cache.num_queued == 0


def test_whom_to_forget_comes_before_paths_that_wait(
    redis: FakeRedis, sends: Callable[[Callable[[SharedCache], Steps]], SharedCache]
) -> None:
    """Also where they go between two steps of a blob."""
    may_go = threading.Event()

    def steps(cache: SharedCache) -> Steps:
        yield 0.0
        for number in range(50):
            cache.rows.send([row(f"k{number}")])
        yield 0.0

    def wait_for_forgetting(commands: Sequence[Command]) -> None:
        if any(command[0] == "HSET" for command in commands):
            may_go.wait(10.0)

    redis.on_run = wait_for_forgetting
    cache = sends(steps)
    wait_until(lambda: cache.rows.num_queued > 40)
    left = list[int]()
    threading.Timer(0.1, may_go.set).start()
    with cache.forgetting(Scope("s")) as is_gone:
        left.append(cache.rows.num_queued)
    assert is_gone and left[0] > 40


def test_what_a_killed_server_sent_of_the_forgotten_goes_some_seconds_later(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It heard nothing any more. What others said stays, and it is done once."""
    monkeypatch.setattr(shared_cache, "AGAIN_SECONDS", 0.0)
    cache = SharedCache(new_server(redis), 3600, lambda: "0-0", lambda _: None)
    cache._forget(Scope("s"), [])
    for key in (SESSION(b"a"), THEIRS(b"a")):
        redis.values[key] = {"field": b"x"}
    cache._hear()
    assert redis.keys("r") == [THEIRS(b"a")]
    redis.values[SESSION(b"a")] = {"field": b"x"}
    cache._hear()
    assert len(redis.keys("r")) == 2
