"""The laws of the shared cache: whatever conversations are there, another server finds as much of a prompt as was sent,
and whatever is altered there, it never takes a token for another one."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobName
from kvserve.cache.remote_keys import borders
from kvserve.cache.remote_path import MIN_GAIN_TOKENS, RemoteBlob, StrangePath, packed, unpacked
from kvserve.core import Unshared
from kvserve.remote.rates import MAX_LIES
from tests.cache.disks import HASHER
from tests.laws import num_examples
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_disks import SharedDisk

BLOCK = HASHER.block_size
LENGTHS = st.integers(1, 90)


@contextmanager
def two_disks(redis: FakeRedis) -> Iterator[tuple[SharedDisk, SharedDisk]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        SharedDisk(Path(folder) / "a", redis) as one,
        SharedDisk(Path(folder) / "b", redis) as other,
    ):
        yield one, other


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that go on from beginnings of one another."""
    found: list[list[int]] = []
    for number in range(draw(st.integers(1, 5))):
        before = draw(st.sampled_from(found)) if found else []
        kept = draw(st.integers(0, len(before)))
        found.append([*before[:kept], *range(1000 * number + kept, 1000 * number + kept + draw(LENGTHS))])
    return found


@settings(max_examples=num_examples(8), deadline=None)
@given(conversations(), st.data())
def test_another_server_finds_what_was_sent(said: list[list[int]], data: st.DataObject) -> None:
    """To the block, at any cut, wherever a prompt leaves a conversation; every byte is of its tokens."""
    before = data.draw(st.sampled_from(said))
    asked = [*before[: data.draw(st.integers(0, len(before)))], *range(90_000, 90_000 + data.draw(LENGTHS))]
    redis = FakeRedis()
    with two_disks(redis) as (one, other):
        for ids in said:
            one.say(ids)
        common = one.disk.found(asked).depth
        if len(asked) <= 33:
            return
        before_look = redis.num_exchanges
        fetch = other.fetch(asked)
        rows, _ = other.disk.recall(asked)
        usable = min(common, len(asked) - 1) // BLOCK * BLOCK
        assert len(rows) >= (usable if usable >= MIN_GAIN_TOKENS + BLOCK else 0)
        assert len(rows) <= common and other.server.faults() == {}
        assert redis.num_exchanges - before_look <= 6 + fetch._counts.num_read


@settings(max_examples=num_examples(5), deadline=None)
@given(st.lists(st.integers(20, 70), min_size=1, max_size=4), st.booleans(), st.data())
def test_states_come_with_all_that_they_go_on_from(lengths: list[int], is_based: bool, data: st.DataObject) -> None:
    """A prompt that needs a state has the deepest one that was sent, also of windows that go on from others."""
    redis = FakeRedis()
    with two_disks(redis) as (one, other):
        ids: list[int] = []
        for number, length in enumerate(lengths):
            ids = [*ids, *range(1000 * number, 1000 * number + length)]
            one.say(ids, states=[len(ids)], is_based=is_based)
        asked = [*ids, *range(90_000, 90_040)]
        other.fetch(asked, needs_checkpoints=True)
        rows, states = other.disk.recall(asked)
        assert len(ids) in states and rows == ids


@settings(max_examples=num_examples(16), deadline=None)
@given(st.data())
def test_what_was_altered_is_a_miss_or_the_same(data: st.DataObject) -> None:
    """One byte of any value, or a value in another's place: what comes back is of its tokens, or does not."""
    redis = FakeRedis()
    with two_disks(redis) as (one, other):
        ids = list(range(150))
        one.say(ids[:80], states=[80])
        one.say(ids, states=[150])
        key = data.draw(st.sampled_from([key for kind in "bmi" for key in redis.keys(kind)]))
        value = bytearray(redis.values[key])
        if data.draw(st.booleans()):
            value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif data.draw(st.booleans()):
            del value[data.draw(st.integers(0, len(value) - 1)) :]
        else:
            value = bytearray(redis.values[data.draw(st.sampled_from(redis.keys(key.split(":")[3])))])
        redis.values[key] = bytes(value)
        asked = [*ids, *range(90_000, 90_040)]
        other.fetch(asked)
        rows, _ = other.disk.recall(asked)
        assert rows == asked[: len(rows)]


@given(st.lists(st.integers(0, 700), min_size=2, max_size=6, unique=True), st.sampled_from([1, 4, 16]))
def test_a_prefix_is_found_wherever_it_was_cut_into_blobs(cuts: list[int], size: int) -> None:
    """Every coarse border, and every fine one behind a blob's start, up to the first coarse one, is some blob's."""
    cuts.sort()
    step = 16 * size
    covered = {border for start, end in pairwise(cuts) for border in borders(start, end, size)}
    assert covered >= {border for border in range(0, cuts[-1] + 1, step) if border > cuts[0]}
    for start, end in pairwise(cuts):
        own = list(borders(start, end, size))
        assert own == sorted(set(own)) and all(start < border <= end and border % size == 0 for border in own)
        first_coarse = (start // step + 1) * step
        assert {each for each in range(start + 1, min(end, first_coarse) + 1) if each % size == 0} <= set(own)
    assert len(covered) <= (cuts[-1] - cuts[0]) // step + 1 + 16 * len(cuts)


@pytest.mark.parametrize("data", [None, b"", b"short", b"\0" * 40, 7, [b"x"]])
def test_what_is_no_path_is_told_from_one(data: object) -> None:
    """Negative control: what was packed is one."""
    with pytest.raises(StrangePath):
        unpacked(data)
    assert unpacked(packed([])) == []


def test_a_path_whose_numbers_were_altered_is_none() -> None:
    """It would still be JSON, of blobs that are there."""
    path = [RemoteBlob(BlobName("a" * 40), "segment", "", 0, 60, "user", "", 1111)]
    assert unpacked(packed(path)) == path
    with pytest.raises(StrangePath, match="checksum"):
        unpacked(packed(path).replace(b"1111", b"1112"))


def test_nothing_is_sent_twice_and_what_went_is_sent_again(tmp_path: Path) -> None:
    """A server that was emptied, or has evicted a part, is filled again by the next turn."""
    redis = FakeRedis()
    ids = list(range(120))
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(ids)
        [part], sent = redis.keys("b"), _num_sets(redis)
        one.say([*ids, *range(500, 560)])
        assert _num_sets(redis) == sent + 1
        del redis.values[part]
        one.say([*ids, *range(600, 660)])
        assert part in redis.values and _num_sets(redis) == sent + 3
        redis.values.clear()
        one.say([*ids, *range(600, 660), *range(700, 740)])
        with SharedDisk(tmp_path / "b", redis) as other:
            asked = [*ids, *range(600, 660), *range(700, 740), *range(90_000, 90_040)]
            other.fetch(asked)
            assert other.disk.recall(asked)[0] == asked[:220]


def _num_sets(redis: FakeRedis) -> int:
    return sum(command[0] == "SET" and ":b:" in str(command[1]) for command in redis.commands)


def test_what_makes_a_blob_known_comes_last(tmp_path: Path) -> None:
    """Its users first, then its parts, the path to it, its blocks: what broke off is never found half."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(list(range(120)))
    order = [str(command[1]).split(":")[3] for command in redis.commands if command[0] in ("SET", "ZADD")]
    assert list(dict.fromkeys(order)) == ["u", "b", "m", "i"] and order == sorted(order, key="ubmi".index)


def test_nobodys_words_are_not_sent(tmp_path: Path) -> None:
    """What no client's request has used is a guess."""
    redis = FakeRedis()
    with SharedDisk(tmp_path / "a", redis) as one:
        assert one.disk.say(list(range(120)))
        one.send()
        assert redis.values == {}


@pytest.mark.parametrize("is_slow", [False, True])
def test_it_is_read_where_that_beats_computing(is_slow: bool, tmp_path: Path) -> None:
    """By measured rates; what would not pay is neither read nor sent."""
    redis, ids = FakeRedis(), list(range(400))
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say(ids)
        bytes_per_token = sum(len(redis.values[key]) for key in redis.keys("b")) / len(ids)
        other.disk.tier.worker.prefill_rate = 100.0
        other.disk.tier.worker.read_rate = 1e12
        other.server.rates.read_bytes_per_second = 100.0 * bytes_per_token * (0.8 if is_slow else 1.25)
        fetch = other.fetch([*ids, *range(90_000, 90_040)])
        assert fetch.outcome == ("declined" if is_slow else "read")
        assert fetch.unshared == (Unshared("slower", len(ids)) if is_slow else None)
        other.say([*ids, *range(700, 900)])
        assert other.remote.sent.num_not_worth == is_slow


def test_a_blob_of_several_parts_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts come in order; where one was evicted the look says so, and none of the others is read."""
    for module in ("remote_keys", "remote_fetch", "remote_sending"):
        monkeypatch.setattr(f"kvserve.cache.{module}.PART_BYTES", 200)
    redis, ids = FakeRedis(), list(range(120))
    asked = [*ids, *range(90_000, 90_040)]
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say(ids)
        assert len(redis.keys("b")) > 3
        with SharedDisk(tmp_path / "c", redis) as third:
            third.fetch(asked)
            assert third.disk.recall(asked)[0] == ids
        del redis.values[redis.keys("b")[1]]
        redis.commands.clear()
        fetch = other.fetch(asked)
        assert fetch.outcome == "nothing" and other.disk.files() == []
        assert not [command for command in redis.commands if command[0] == "GET" and ":b:" in str(command[1])]


def test_nothing_is_read_that_our_own_tokens_do_not_prove(tmp_path: Path) -> None:
    """A sound path, of somebody else's tokens, in the place of ours."""
    redis, ids, others = FakeRedis(), list(range(120)), list(range(5000, 5120))
    asked = [*ids, *range(90_000, 90_040)]
    with SharedDisk(tmp_path / "a", redis) as one, SharedDisk(tmp_path / "b", redis) as other:
        one.say(ids)
        [ours] = redis.keys("m")
        one.say(others)
        [theirs] = set(redis.keys("m")) - {ours}
        redis.values[ours] = redis.values[theirs]
        redis.commands.clear()
        assert other.fetch(asked).outcome == "nothing" and other.disk.files() == []
        assert not [command for command in redis.commands if command[0] == "GET" and ":b:" in str(command[1])]


def test_why_a_row_was_brought_nothing_is_known(tmp_path: Path) -> None:
    """Each reason, and how far the prompt was seen to be there; none where all of it came."""
    redis, ids = FakeRedis(), list(range(120))
    asked = [*ids, *range(90_000, 90_040)]
    with SharedDisk(tmp_path / "a", redis) as one:
        one.say(ids)
    sound, [part] = dict(redis.values), redis.keys("b")
    found: dict[str, Unshared | None] = {}

    def fetched(name: str, room_bytes: float = math.inf) -> None:
        with SharedDisk(tmp_path / name, redis) as other:
            other.disk.tier.worker.prefill_rate = 1.0
            found[name] = other.fetch(asked, room_bytes=room_bytes).unshared

    fetched("all of it")
    fetched("no room", room_bytes=1.0)
    redis.on_run = lambda commands: _drop(redis, part) if commands and commands[0][:2] == ("GET", part) else None
    fetched("gone")
    redis.on_run = lambda _: None
    redis.values = {**sound, part: sound[part][:-1] + bytes([sound[part][-1] ^ 1])}
    fetched("damaged")
    redis.values = {}
    fetched("not there")
    assert found == {
        "all of it": None,
        "no room": Unshared("no room", len(ids)),
        "gone": Unshared("gone", len(ids)),
        "damaged": Unshared("damaged", len(ids)),
        "not there": Unshared("not there"),
    }


def test_why_a_server_is_not_asked_is_known(tmp_path: Path) -> None:
    """It failed, it lied too often, or there is too little to ask for."""
    with SharedDisk(tmp_path, FakeRedis()) as disk:
        assert disk.begin(list(range(20))) == Unshared("too short")
        disk.remote.fetched.look_seconds, disk.disk.tier.worker.prefill_rate = 1.0, 1000.0
        assert disk.begin(list(range(200))) == Unshared("too short")
        disk.server.breaker.failed(0.0)
        assert disk.begin(list(range(200))) == Unshared("away")
        disk.server.breaker.succeeded()
        for _ in range(MAX_LIES):
            disk.server.lied("a test")
        assert disk.begin(list(range(200))) == Unshared("lying")


def _drop(redis: FakeRedis, key: str) -> None:
    redis.values.pop(key, None)
