"""What the dashboard's history keeps over a restart, for how long, and what forgetting leaves of it."""

import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.core.keeping import Scope
from kvserve.observe import history_file
from kvserve.observe.request_history import KEEP_SECONDS, RANGES, TIDY_SECONDS, MinuteSums, RequestHistory
from kvserve.observe.trace import session_label
from kvserve.sessions import archive, archive_file
from tests.observe.past import ended

START = 6_000_000.0
MINUTE = int(START) // 60


class Clock:
    seconds = START

    def __call__(self) -> float:
        return self.seconds


class Opener:
    """Opens histories, and closes at the end what a test has left open."""

    def __init__(self) -> None:
        self._all: list[RequestHistory] = []

    def __call__(
        self, folder: Path | None, clock: Clock | None = None, told: list[str] | None = None, most: int = 2_000
    ) -> RequestHistory:
        told = told if told is not None else []
        history = RequestHistory(folder, told.append, clock if clock is not None else Clock(), most)
        history.open()
        self._all.append(history)
        return history

    def close(self) -> None:
        for each in self._all:
            each.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(archive, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.0)
    opener = Opener()
    yield opener
    opener.close()


def names(history: RequestHistory) -> list[str]:
    return [each.request_id for each in history.newest()]


def bytes_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_requests_and_sums_outlive_their_process(tmp_path: Path, opened: Opener) -> None:
    """A request that wants nothing kept is gone, words too; the salt stays."""
    folder = tmp_path / "state" / "dashboard"
    first = opened(folder)
    first.add(ended("r1", ended_at=START, cause="evicted", num_lost_tokens=9, words="SECRET"), on_disk=True)
    first.add(ended("r2", ended_at=START, principal="0123.-"), on_disk=False)
    for _ in range(2):
        first.count(MinuteSums(MINUTE, 1, 1_000, 900, 50, 2.5, 90))
    assert names(first) == ["r2", "r1"] and first.newest()[1].words == "SECRET"
    first.close()
    first.add(ended("late", ended_at=START), on_disk=True)
    assert b"SECRET" not in bytes_of(tmp_path) and b"r2" not in bytes_of(tmp_path)
    assert all(file.stat().st_mode & 0o077 == 0 for file in (folder, *folder.iterdir()))
    again = opened(folder)
    assert again.newest() == [ended("r1", ended_at=START, cause="evicted", num_lost_tokens=9, turn=1)]
    assert again.sums("hour") == [MinuteSums(MINUTE, 2, 2_000, 1_800, 100, 5.0, 180)]
    assert again.salt == first.salt != opened(None).salt


def test_it_is_bounded_in_number_and_in_time(tmp_path: Path, opened: Opener) -> None:
    """The newest stay, in the file too; after a week nothing does."""
    clock = Clock()
    history = opened(tmp_path, clock, most=3)
    for number in range(5):
        history.add(ended(f"r{number}", ended_at=START + number), on_disk=True)
    history.count(MinuteSums(MINUTE, 1))
    assert names(history) == ["r4", "r3", "r2"]
    history.close()
    assert names(opened(tmp_path, clock, most=3)) == ["r4", "r3", "r2"]
    clock.seconds += KEEP_SECONDS + 3
    assert names(history) == ["r4", "r3"] and history.sums("week") == []


def test_a_week_holds_while_a_server_runs(tmp_path: Path, opened: Opener) -> None:
    """What is too old leaves memory and the file with the next request, or when somebody looks; sums of all times take
    no more room than their steps."""
    clock = Clock()
    history = opened(tmp_path, clock)
    history.add(ended("too-old", ended_at=START), on_disk=True)
    for hour in range(500):
        clock.seconds = START + 3_600.0 * hour
        history.count(MinuteSums(int(clock.seconds) // 60, 1))
    assert "too-old" not in history._requests
    steps = {name: len(known) for name, known in history._steps.items()}
    assert all(steps[name] <= seconds // step for name, (seconds, step) in RANGES.items()), steps
    history.add(ended("newer", ended_at=clock.seconds), on_disk=True)
    clock.seconds += KEEP_SECONDS + TIDY_SECONDS
    assert names(history) == [] and not history._requests
    assert history.clear()
    assert b"too-old" not in bytes_of(tmp_path) and f"hour {MINUTE}".encode() not in bytes_of(tmp_path)


def test_a_clock_that_was_wrong_keeps_nothing_for_ever(tmp_path: Path, opened: Opener) -> None:
    """A time that is yet to come counts as now, and its sums are gone; the order is that in which requests ended."""
    clock = Clock()
    history = opened(tmp_path, clock)
    for name, at in (("r1", START + 1e5), ("r2", START)):
        history.add(ended(name, ended_at=at), on_disk=True)
    clock.seconds += 1e5
    history.count(MinuteSums(int(clock.seconds) // 60, 1))
    clock.seconds = START
    assert history.sums("week") == []
    history.close()
    again = opened(tmp_path, clock)
    assert [(each.request_id, each.ended_at) for each in again.newest()] == [("r2", START), ("r1", START)]
    assert again._steps["week"] == {}


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (Scope("s1"), ["r4", "r3"]),
        (Scope(None, "0123.-"), ["r4", "r1"]),
        (Scope("s1", "0123.-"), ["r4", "r3", "r1"]),
        (None, []),
    ],
)
def test_who_is_forgotten_is_gone_from_the_file(
    tmp_path: Path, opened: Opener, scope: Scope | None, left: list[str]
) -> None:
    """By session, whoever's, by principal, or all; the sums stay."""
    history = opened(tmp_path)
    for name, session, principal in (("r1", "s1", "-.-"), ("r2", "s1", "0123.-"), ("r3", "s2", "0123.-")):
        row = ended(name, ended_at=START, session=session_label(session), principal=principal)
        history.add(row, on_disk=True)
    history.add(ended("r4", ended_at=START), on_disk=True)
    history.count(MinuteSums(MINUTE, 4))
    assert history.forget(scope) if scope is not None else history.clear()
    gone = {"r1", "r2", "r3", "r4"} - set(left)
    assert not [name for name in gone if f'"{name}"'.encode() in bytes_of(tmp_path)]
    assert names(history) == left
    history.close()
    again = opened(tmp_path)
    assert names(again) == left and [sums.num_requests for sums in again.sums("hour")] == [4]


def test_a_file_that_was_given_up_is_erased_as_well(tmp_path: Path, opened: Opener) -> None:
    """What was written stays in a file that is written no more: it is opened anew, and others' rows stay."""
    history = opened(tmp_path, told=(told := []))
    for name, principal in (("r1", "0123.-"), ("r2", "-.-")):
        history.add(ended(name, ended_at=START, principal=principal), on_disk=True)
    history.count(MinuteSums(MINUTE, 2))
    assert history._file is not None and history._file._archive is not None
    assert history._file._archive.flush(20)
    history._file._archive._give_up("a test")
    history.add(ended("r3", ended_at=START), on_disk=True)
    assert b'"r1"' in bytes_of(tmp_path) and len(told) == 1
    assert history.forget(Scope(None, "0123.-")) and b'"r1"' not in bytes_of(tmp_path)
    history.close()
    again = opened(tmp_path)
    assert names(again) == ["r3", "r2"] and [sums.num_requests for sums in again.sums("day")] == [2]


@pytest.mark.parametrize("is_left", [False, True], ids=["removed", "not even that"])
def test_a_file_that_cannot_be_erased_is_removed(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """The history is worth less than the promise; where even that fails nobody is told that it is done."""
    history = opened(tmp_path)
    history.add(ended("r1", ended_at=START), on_disk=True)
    assert history._file is not None and history._file._archive is not None
    assert history._file._archive.flush(20)
    monkeypatch.setattr(history_file, "ERASE_SECONDS", 0.0)
    monkeypatch.setattr(archive.Archive, "erase", lambda self, timeout_seconds: False)

    def cannot(path: Path) -> archive_file.Opened:
        raise sqlite3.OperationalError("no room")

    monkeypatch.setattr(history_file, "begin_anew", cannot)
    if is_left:
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok: (_ for _ in ()).throw(PermissionError()))
    assert history.forget(Scope(None, "-.-")) is not is_left
    assert (names(history) == [] and list(tmp_path.glob("records.sqlite*")) == []) or is_left


def test_a_file_that_another_server_has_holds_nobody_up(tmp_path: Path, opened: Opener) -> None:
    """Its requests are kept in memory, it is told once, nothing of the other one's is removed or promised to be; once
    that has ended its rows can be forgotten, and the file is used."""
    one = opened(tmp_path)
    one.add(ended("theirs", ended_at=START, principal="0123.-"), on_disk=True)
    other = opened(tmp_path, told=(told := []))
    other.add(ended("ours", ended_at=START), on_disk=True)
    other.count(MinuteSums(MINUTE, 1))
    assert names(other) == ["ours"] and len(told) == 1 and "another server" in told[0]
    assert other.forget(Scope(None, "0123.-")) is False and names(one) == ["theirs"]
    one.close()
    assert b'"theirs"' in bytes_of(tmp_path)
    assert other.forget(Scope(None, "0123.-")) and b'"theirs"' not in bytes_of(tmp_path)
    other.close()
    assert names(opened(tmp_path)) == ["ours"]


def test_who_looks_or_adds_never_waits_for_the_disk(tmp_path: Path, opened: Opener) -> None:
    """A writer that hangs, as on a file that is busy, holds up no answer and no page."""
    history, hangs, entered = opened(tmp_path), threading.Event(), threading.Event()
    assert history._file is not None and history._file._archive is not None
    file = history._file._archive._file
    assert file is not None
    write = file.write

    def hang(changes: archive_file.Changes) -> None:
        entered.set()
        hangs.wait()
        write(changes)

    file.write = hang  # type: ignore[method-assign]
    history.add(ended("r1", ended_at=START), on_disk=True)
    entered.wait()
    history.add(ended("r2", ended_at=START), on_disk=True)
    history.count(MinuteSums(MINUTE, 1))
    assert names(history) == ["r2", "r1"] and len(history.sums("hour")) == 1
    hangs.set()
    history.close()
    assert names(opened(tmp_path)) == ["r2", "r1"]


def test_steps_begin_where_they_always_do(opened: Opener) -> None:
    """Sums of ten minutes have the same beginnings whenever they are asked for; empty ones are not there."""
    clock = Clock()
    history = opened(None, clock)
    for minute in (0, 1, 9, 10, 35):
        clock.seconds = START + 60 * minute
        history.count(MinuteSums(MINUTE + minute, 1))
    clock.seconds = START + 36 * 60
    assert [(sums.minute - MINUTE, sums.num_requests) for sums in history.sums("day")] == [(0, 3), (10, 1), (30, 1)]
    clock.seconds = START + 65 * 60
    assert [sums.minute - MINUTE for sums in history.sums("hour")] == [9, 10, 35]


def test_a_place_that_cannot_be_used_costs_nobody_anything(tmp_path: Path, opened: Opener) -> None:
    """It is told once; requests are kept in memory, and nothing is left to forget."""
    (tmp_path / "file").write_bytes(b"no folder")
    history = opened(tmp_path / "file" / "dashboard", told=(told := []))
    history.add(ended("r1", ended_at=START), on_disk=True)
    history.count(MinuteSums(MINUTE, 1))
    assert names(history) == ["r1"] and len(told) == 1


def test_rows_of_another_form_are_deleted(tmp_path: Path, opened: Opener) -> None:
    """The history begins anew."""
    for body in (b"[1, 2]", b'{"request_id": "r1", "ended_at": "soon"}', b'{"request_id": "r1"}', b"\xff"):
        first = opened(tmp_path)
        assert first._file is not None
        first._file.put("ended request", b"\x00", lambda body=body: body)  # type: ignore[misc]
        first.close()
        again = opened(tmp_path, told=(told := []))
        assert names(again) == [] and "begin anew" in told[0]
        again.add(ended("r2", ended_at=START), on_disk=True)
        again.close()
        third = opened(tmp_path, told=(told := []))
        assert names(third) == ["r2"] and not told
        third.clear()
        third.close()


def test_a_damaged_file_is_told_of_and_made_anew(tmp_path: Path, opened: Opener) -> None:
    """Whatever page is damaged, at a start and while it is written: nothing escapes, no broken row is shown, and what
    comes later is kept."""
    drawn = random.Random(3)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        first = opened(folder)
        for number in range(30):
            first.add(ended(f"r{number}", ended_at=START), on_disk=True)
        first.count(MinuteSums(MINUTE, 30))
        assert first._file is not None and first._file._archive is not None
        assert first._file._archive.erase(20)  # into the file, out of its log
        if not (is_running := attempt % 3 == 0):
            first.close()
        path = folder / archive_file.FILE_NAME
        content = bytearray(path.read_bytes())
        for _ in range(1 + attempt // 3):
            at = drawn.randrange(0 if attempt % 2 else 100, len(content))
            content[at : at + 64] = drawn.randbytes(len(content[at : at + 64]))
        path.write_bytes(content)
        running = first if is_running else opened(folder)
        assert set(names(running)) <= {f"r{number}" for number in range(30)}
        running.add(ended("later", ended_at=START), on_disk=True)
        running.count(MinuteSums(MINUTE, 1))
        assert names(running)[0] == "later"
        assert running.forget(Scope(None, "-.-")) and running.newest() == []
        running.close()
        assert b'"later"' not in bytes_of(folder)
        assert opened(folder).newest() == []


def test_turns_are_counted_by_their_conversation(tmp_path: Path, opened: Opener) -> None:
    """Whatever is kept of those before, over a restart as well, until somebody is forgotten."""
    history = opened(tmp_path, most=2)
    for number in range(4):
        history.add(ended(f"r{number}", ended_at=START), on_disk=True)
    history.add(ended("other", ended_at=START, conversation="b", principal="0123.-"), on_disk=True)
    assert [each.turn for each in history.newest()] == [1, 4]
    history.close()
    again = opened(tmp_path, most=2)
    again.add(ended("r5", ended_at=START), on_disk=True)
    assert [each.turn for each in again.newest()] == [5, 1]
    again.forget(Scope(None, "-.-"))
    again.add(ended("r6", ended_at=START), on_disk=True)
    assert [each.turn for each in again.newest()] == [1, 1]
