"""Whoever is forgotten is gone from the shared cache as well, for each server that reaches it; others keep theirs."""

import threading
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobName, unpack_blob
from kvserve.cache.remote_fetch import Fetch
from kvserve.cache.remote_forgetting import clear, heard, newest, remove, tell
from kvserve.cache.shared_cache import MAX_RETRIES, SharedCache
from kvserve.core import Unshared
from kvserve.core.keeping import Scope
from kvserve.identity.owner import belongs_to
from kvserve.remote.redis_link import Command, LinkFailed, LinkRefusal
from kvserve.remote.shared_rows import RowToSend
from tests.laws import num_examples
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_disks import SharedDisk
from tests.remote.test_shared_law import two_disks

ONE, OTHER, THIRD = "key.user/one", "key.user/other", "another.user/one"
SYSTEM = list(range(60))
SCOPE = Scope(session="one", principal="key.user")


def holds(redis: FakeRedis, tokens: Sequence[int]) -> bool:
    words = array("I", tokens).tobytes()
    return any(words in redis.values[key] for key in redis.keys("b"))


def names(redis: FakeRedis, kind: str) -> set[str]:
    return {key.split(":")[4] for key in redis.keys(kind)}


@pytest.mark.parametrize(
    ("scope", "goes"),
    [
        (Scope(session="one"), (True, False, True)),
        (Scope(principal="key.user"), (True, True, False)),
        (SCOPE, (True, False, False)),
        (Scope(session="nobody's"), (False, False, False)),
    ],
)
def test_what_only_they_used_goes(scope: Scope, goes: tuple[bool, ...], tmp_path: Path) -> None:
    """By session, by principal, by both; what others share with them stays."""
    redis = FakeRedis()
    words = [list(range(1000 * number, 1000 * number + 60)) for number in (1, 2, 3)]
    with SharedDisk(tmp_path / "a", redis) as one:
        for user, own in zip((ONE, OTHER, THIRD), words, strict=True):
            one.say(SYSTEM, user=user)
            one.say([*SYSTEM, *own], user=user)
        remove(one.server.puts_link, scope)
        assert [holds(redis, own[1:-1]) for own in words] == [not is_gone for is_gone in goes]
        assert holds(redis, SYSTEM)
        assert names(redis, "b") == names(redis, "m") == names(redis, "u")
        named = {value.decode() for key in redis.keys("i") if isinstance(value := redis.values[key], bytes)}
        assert named <= names(redis, "b")


@settings(max_examples=num_examples(8), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER, THIRD]), st.integers(0, 150), st.integers(5, 50)), max_size=6))
def test_what_is_left_are_words_of_others(turns: list[tuple[str, int, int]]) -> None:
    """Whoever shared which beginning with whom: no blob holds a token that nobody else's prompt had; and what others
    had by themselves is all there."""
    redis = FakeRedis()
    with two_disks(redis) as (one, _):
        said, theirs, shared_with = list[int](), set[int](), set[int]()
        for number, (user, kept, length) in enumerate(turns):
            said = [*said[:kept], *range(1000 * number, 1000 * number + length)]
            one.say(said, user=user)
            (shared_with if user == ONE else theirs).update(said)
        remove(one.server.puts_link, SCOPE)
        blobs = [unpack_blob(redis.values[key], BlobName(key.split(":")[4])) for key in redis.keys("b")]
        left = {token for blob in blobs for token in memoryview(blob.head.tokens.ids).cast("I")}
        assert theirs - shared_with <= left <= theirs


def test_blobs_without_a_known_user_go_with_anybody(tmp_path: Path) -> None:
    """Redis may evict who used a blob before the blob."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(SYSTEM, user=OTHER)
        for key in redis.keys("u"):
            del redis.values[key]
        remove(one.server.puts_link, SCOPE)
        assert redis.keys() == []


def test_whose_path_was_not_sent_by_itself_keeps_it(tmp_path: Path) -> None:
    """The longer path of another one took its place in the queue."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(SYSTEM, user=OTHER, sends=False)
        one.say([*SYSTEM, *range(100, 160)], user=ONE)
        remove(one.server.puts_link, SCOPE)
        assert holds(redis, SYSTEM) and not holds(redis, list(range(100, 160)))


def shared(one: SharedDisk, heard_by: list[Scope], since: str | None = None) -> SharedCache:
    """The shared cache of a disk's server: it forgets on its disk whom another server forgets."""
    remembered: list[str] = []
    cache = SharedCache(one.server, 3600, lambda: remembered[-1] if remembered else since, remembered.append)

    def hear(scope: Scope) -> bool:
        with cache.forgetting(scope, is_heard=True) as is_gone:
            heard_by.append(scope)
            one.disk.tier.forget(partial(belongs_to, scope=scope))
        return is_gone

    cache._on_heard = hear
    return cache


def test_what_was_sent_while_they_were_forgotten_goes_as_well(tmp_path: Path) -> None:
    """One server has told and removed; another one sends behind that, hears, and removes what it has sent."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        scopes: list[Scope] = []
        cache = shared(other, scopes, "0-0")
        one.say([*SYSTEM, 1, 2, 3, 4, 5], user=ONE)
        shared(one, [])._forget(SCOPE, [])
        assert redis.keys("b") == []
        other.say([*SYSTEM, 6, 7, 8, 9, 10], user=ONE)
        assert redis.keys("b") != []
        cache._hear()
        assert scopes == [SCOPE] and redis.keys("b") == [] and other.disk.files() == []
        cache._hear()
        assert scopes == [SCOPE], "it is heard once"


def test_a_server_hears_what_was_told_while_it_was_off(tmp_path: Path) -> None:
    """From the place that it remembers; one that never was there begins with what comes."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        link = one.server.puts_link
        tell(link, Scope(session="before"), "x")
        place = newest(link)
        tell(link, SCOPE, "x")
        known, new = list[Scope](), list[Scope]()
        shared(one, known, place)._hear()
        shared(one, new, None)._hear()
        assert (known, new) == ([SCOPE], [])
        redis.values["kvs1:forget"].append([b"99-0", [b"by", b"x"]])
        assert [told.scope for told in heard(link, "0-0")] == [Scope(session="before"), SCOPE], (
            "nobody is not everybody"
        )


def test_a_place_is_not_left_before_all_of_it_is_gone_here(tmp_path: Path) -> None:
    """It is tried again later; nothing behind it is heard before."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        tell(one.server.puts_link, SCOPE, "x")
        answers, asked = [False, True], list[Scope]()
        cache = shared(one, [], "0-0")
        cache._on_heard = lambda scope: (asked.append(scope), answers.pop(0))[1]
        cache._hear()
        cache._hear()
        assert len(asked) == 1
        cache._retry_at = 0.0
        cache._hear()
        assert len(asked) == 2 and answers == []


@pytest.mark.parametrize("kind", ["link", "refusal"])
def test_what_could_not_be_removed_is_not_called_done(kind: str, tmp_path: Path) -> None:
    """A connection that breaks, or rights that lack a command: it raises, and is tried again before all else."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say([*SYSTEM, 1, 2, 3], user=ONE)
        cache = shared(one, [])

        def fail(commands: Sequence[Command]) -> None:
            if kind == "link" and commands and commands[0][0] == "UNLINK":
                raise LinkFailed("unreachable", "gone")

        redis.on_run = fail
        if kind == "refusal":
            redis._unlink = lambda *_: LinkRefusal("refused", "NOPERM")  # type: ignore[method-assign]
        with pytest.raises(LinkFailed):
            cache._forget(SCOPE, [])


def test_nothing_is_asked_or_brought_while_somebody_is_forgotten(tmp_path: Path) -> None:
    """What a row was being brought does not come to disk any more, and no other row begins to ask."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say([*SYSTEM, *range(100, 160)], user=ONE)
        asked = [*SYSTEM, *range(100, 160), *range(900, 940)]
        cache = shared(other, [])
        cache._tiers.append(other.remote)
        fetch = other.begin(asked)
        assert isinstance(fetch, Fetch)
        steps = fetch.steps(other.server.asks_link)
        next(steps)
        with cache.forgetting(SCOPE, is_heard=True):
            assert other.begin(asked) == Unshared("paused") and fetch.is_over
        assert list(steps) == []
        assert other.disk.tier.flush(60) and other.disk.files() == []
        assert isinstance(other.begin(asked), Fetch)


def test_one_models_all_can_be_cleared(tmp_path: Path) -> None:
    """Keys of others stay."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(SYSTEM)
        redis.values["kvs1:other:-:b:x:0"] = redis.values["somebody else's"] = b"x"
        clear(one.server.puts_link, one.remote.keys("").model)
        assert redis.keys() == ["kvs1:other:-:b:x:0", "somebody else's"]


def test_what_was_read_and_waits_for_the_disk_is_not_written_either(tmp_path: Path) -> None:
    """It was read before, and the disk takes it after."""
    redis, gate = FakeRedis(), threading.Event()
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say([*SYSTEM, *range(100, 160)], user=ONE)
        fetch = other.begin([*SYSTEM, *range(100, 160), *range(900, 940)])
        assert isinstance(fetch, Fetch)
        other.disk.tier.soon(lambda: gate.wait(60) and None)
        assert list(fetch.steps(other.server.asks_link)) and fetch.outcome == "read" and fetch.num_hand_bytes > 0
        fetch.forbid()
        gate.set()
        assert other.disk.tier.flush(60) and other.disk.files() == [] and fetch.num_hand_bytes == 0


def test_what_a_row_left_while_it_was_read_is_not_written_either(tmp_path: Path) -> None:
    """Its client went, and another row began to ask, before somebody is forgotten; then its last part is handed on."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say([*SYSTEM, *range(100, 160)], user=ONE)
        fetch = other.begin([*SYSTEM, *range(100, 160), *range(900, 940)])
        assert isinstance(fetch, Fetch)
        steps = fetch.steps(other.server.asks_link)
        while not fetch._counts.num_read_bytes:
            next(steps)
        fetch.leave()
        assert isinstance(other.begin(list(range(5000, 5060))), Fetch)
        other.remote.forbid()
        assert list(steps) == [] and fetch.outcome == "read" and other.disk.tier.flush(60)
        assert other.disk.files() == []
        fetch.end()
        assert other.disk.tier.flush(60) and isinstance(other.begin(list(range(6000, 6060))), Fetch)
        assert fetch not in other.remote._fetches, "what has ended is not kept"


def test_others_are_told_once_however_often_the_removal_is_tried(tmp_path: Path) -> None:
    """Rights may lack a command for ever."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        cache, is_told = shared(one, []), list[bool]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis, "_scan", lambda *_: LinkRefusal("refused", "NOPERM"))
            for _ in range(3):
                with pytest.raises(LinkFailed):
                    cache._forget(SCOPE, is_told)
        cache._forget(SCOPE, is_told)
        assert [told.scope for told in heard(one.server.puts_link, "0-0")] == [SCOPE]


def test_a_user_who_could_not_be_noted_there_is_noted_with_the_next_sending(tmp_path: Path) -> None:
    """Else what is theirs too would go with the first who is forgotten."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(SYSTEM, user=ONE)
        [name] = names(redis, "b")
        entry = one.disk.tier.index.entry_of(BlobName(name))
        assert entry is not None
        one.say(SYSTEM, user=OTHER, sends=False)

        def fail(commands: Sequence[Command]) -> None:
            if any(command[0] == "ZADD" for command in commands):
                raise LinkFailed("unreachable", "gone")

        redis.on_run = fail
        with pytest.raises(LinkFailed):
            list(one.remote._steps(entry))
        redis.on_run = lambda _: None
        list(one.remote._steps(entry))
        remove(one.server.puts_link, SCOPE)
        assert holds(redis, SYSTEM)


def test_what_cannot_be_named_there_is_not_called_cleared(tmp_path: Path) -> None:
    """Before a model has a name nothing of it can be removed."""
    with SharedDisk(tmp_path / "a", FakeRedis()) as one, shared(one, []).clearing() as is_gone:
        assert not is_gone


def test_rows_of_conversations_go_with_their_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that wait to be sent; another session's stay, until all is cleared."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        cache = shared(one, [])
        cache._tiers.append(one.remote)
        monkeypatch.setattr(one.server, "first", lambda work, _: work() is None)
        keys = cache.open_records("a model", b"a secret")
        mine, theirs = (keys.session("key.user", name)(bytes(32)) for name in ("one", "other"))
        for is_heard in (False, True):
            for key in (mine, theirs):
                redis.answer(("HSET", key, "field", b"x"))
                cache.rows.send([RowToSend(key, 1, lambda: ("another", b"y"))])
            with cache.forgetting(SCOPE, is_heard=is_heard) as is_gone:
                assert is_gone and redis.keys("r") == [theirs] and cache.rows.num_queued == 1
        with cache.clearing() as is_gone:
            assert is_gone and redis.keys("r") == [] and cache.rows.num_queued == 0


def test_what_is_given_up_on_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person has to see to it: files here may still have it."""
    monkeypatch.setattr("kvserve.cache.shared_cache.RETRY_SECONDS", 0.0)
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        tell(one.server.puts_link, SCOPE, "x")
        cache, lines = shared(one, [], "0-0"), list[str]()
        one.server._report = lines.append
        cache._on_heard = lambda _: False
        for _ in range(MAX_RETRIES):
            cache._hear()
        assert lines == []
        cache._hear()
        assert one.server.faults() == {"not_forgotten": 1} and "may still be in files here" in lines[0]
