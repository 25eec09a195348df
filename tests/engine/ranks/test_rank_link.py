"""The wire between two ranks: frames come out as they went in, and every end of it is told once, with its reason."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.engine.ranks import rank_link
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.ranks.rank_link import Ears, FrameReader, Progress, RankLink, frame_bytes
from tests.laws import num_examples

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
PATIENCE_SECONDS = 20.0


@settings(max_examples=num_examples(60), deadline=None)
@given(frames=st.lists(st.tuples(st.text(max_size=5), VALUES), max_size=4), data=st.data())
def test_frames_come_out_however_their_bytes_are_cut(frames: list[tuple[str, Any]], data: st.DataObject) -> None:
    whole, reader, found = b"".join(frame_bytes(*frame) for frame in frames), FrameReader(), list[tuple[str, Any]]()
    while whole:
        cut = data.draw(st.integers(1, len(whole)))
        found += reader.feed(whole[:cut])
        whole = whole[cut:]
    assert found == frames


def wait_until(look: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until
        time.sleep(0.01)


class End:
    """One end of a link, and what it heard of its end."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.reasons: list[str] = []
        self.named: list[tuple[int, str]] = []
        self.is_lost = threading.Event()
        self.progress = Progress()
        self.kept = {"ram_bytes": 0}
        ears = Ears(self._lose, lambda *each: self.named.append(each), lambda: self.kept)
        self.link = RankLink(connection, peer, self.progress, ears)

    def _lose(self, reason: str) -> None:
        self.reasons.append(reason)
        self.is_lost.set()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[End, End]]:
    """Both ends of one link, which look around often. The second one does not read yet."""
    monkeypatch.setattr(rank_link, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(rank_link, "ALIVE_SECONDS", 0.02)
    one, other = socket.socketpair()
    pair = End(one, 1), End(other, 0)
    pair[0].link.start()
    yield pair
    for end, connection in zip(pair, (one, other), strict=True):
        end.link.close()
        connection.close()


def test_what_is_said_arrives_in_order(ends: tuple[End, End]) -> None:
    """And a name is heard at once, whatever the engine awaits."""
    leader, follower = ends
    follower.link.start()
    follower.link.send("named", "f1")
    follower.link.send("depth", 3)
    assert leader.link.expect("depth") == 3
    assert leader.named == [(1, "f1")]
    follower.link.send("depth", 4)
    with pytest.raises(RanksLost, match="restored was awaited, depth came"):
        leader.link.expect("restored")


def test_a_rank_that_is_gone_is_told_once(ends: tuple[End, End]) -> None:
    leader, follower = ends
    follower.link._connection.close()
    assert leader.is_lost.wait(PATIENCE_SECONDS)
    for _ in range(2):
        with pytest.raises(RanksLost):
            leader.link.next()
    assert len(leader.reasons) == 1
    with pytest.raises(RanksLost):
        leader.link.send("plan")


def test_an_end_that_was_agreed_on_is_no_loss(ends: tuple[End, End]) -> None:
    leader, follower = ends
    follower.link.start()
    leader.link.send("end")
    assert follower.link.expect("end") is None
    follower.link.send("named", "too late to matter")
    leader.link.close()
    follower.link.close()
    follower.link._connection.close()
    assert not leader.is_lost.wait(0.1)
    assert not follower.is_lost.is_set()


def test_signs_of_life_tell_what_a_rank_keeps(ends: tuple[End, End]) -> None:
    """As it is then, and without its engine; the last word counts once it is gone."""
    leader, follower = ends
    assert leader.link.told == {}
    for num_bytes in (7, 8):
        follower.kept = {"ram_bytes": num_bytes}
        if num_bytes == 7:
            follower.link.start()
        wait_until(lambda num_bytes=num_bytes: leader.link.told == {"ram_bytes": num_bytes}, PATIENCE_SECONDS)
    follower.link._connection.close()
    assert leader.is_lost.wait(PATIENCE_SECONDS)
    assert leader.link.told == {"ram_bytes": 8}


def test_a_rank_that_says_nothing_is_lost(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped, with its connection open."""
    monkeypatch.setattr(rank_link, "SILENT_SECONDS", 0.1)
    assert ends[0].is_lost.wait(PATIENCE_SECONDS)
    assert "has said nothing" in ends[0].reasons[0]


def test_a_pass_without_end_is_lost(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is alive, and does not compute. A pass that ends in time costs nothing."""
    monkeypatch.setattr(rank_link, "LONGEST_PASS_SECONDS", 0.1)
    monkeypatch.setattr(rank_link, "PASS_FACTOR", 1.0)
    leader, follower = ends
    follower.link.start()
    leader.progress.begin()
    leader.progress.end()
    assert not leader.is_lost.wait(0.3)
    leader.progress.begin()
    assert leader.is_lost.wait(PATIENCE_SECONDS)
    assert "a pass has not ended" in leader.reasons[0]
