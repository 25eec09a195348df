"""Rows are written behind, outlive a killed process, and whatever goes wrong costs records only, never the server."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvserve.sessions import archive, archive_file
from kvserve.sessions.archive import Archive, Upkeep, sweep_stale
from kvserve.sessions.archive_file import FILE_NAME, open_file
from kvserve.sessions.journal import Kind

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0


class Owner:
    """Rows, their archive, and what was reported. `start` begins the thread."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.lines: list[str] = []
        self.rows: dict[tuple[Kind, bytes], bytes] = {}
        self.archive = Archive(folder, max_bytes=max_bytes, report=self.lines.append)
        self.found = self.archive.take_rows()

    def start(self) -> "Owner":
        self.archive.start(Upkeep(self.put_all, self.expire, self.make_room))
        return self

    def put(self, key: bytes, body: bytes = b"body", kind: Kind = "node") -> None:
        self.rows[kind, key] = body
        self.archive.put(kind, key, lambda: body)

    def drop(self, key: bytes) -> None:
        del self.rows["node", key]
        self.archive.drop("node", key)

    def put_all(self) -> None:
        for (kind, key), body in self.rows.items():
            self.put(key, body, kind)

    def expire(self) -> None:
        """Nothing is out of date."""

    def make_room(self) -> None:
        for _, key in list(self.rows)[: len(self.rows) // 2]:
            self.drop(key)

    def wait_for_line(self) -> None:
        """Until the writer has said something: it may be a while before it has its turn."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.lines:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def file(self) -> archive_file.ArchiveFile:
        assert self.archive._file is not None
        return self.archive._file


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Owner]]:
    """Makes owners whose archives end with the test; nothing waits long."""
    monkeypatch.setattr(archive, "GATHER_SECONDS", 0.01)
    monkeypatch.setattr(archive, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.05)
    owners: list[Owner] = []

    def make(folder: Path = tmp_path, max_bytes: int = 1 << 20) -> Owner:
        owners.append(Owner(folder, max_bytes))
        return owners[-1]

    yield make
    for owner in owners:
        owner.archive.close(PATIENCE_SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvserve-records"]


def kept(folder: Path) -> dict[tuple[Kind, bytes], bytes]:
    """What the next process finds."""
    opened = open_file(folder / FILE_NAME)
    opened.file.close()
    assert opened.fault is None
    return {(kind, key): body for kind, pairs in opened.rows.items() for key, body in pairs}


def test_the_next_process_finds_what_was_told(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """The newest body of each row, nothing of what was dropped, and it goes on from there."""
    owner = owned().start()
    for number in range(100):
        owner.put(bytes([number % 10]), str(number).encode())
    owner.drop(b"\x03")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.put(b"last")
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == owner.rows and len(owner.rows) == 10
    again = owned()
    assert dict(again.found["node"]) == {key: body for (_, key), body in owner.rows.items()}
    again.rows = dict(owner.rows)
    again.start().drop(b"last")
    again.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == again.rows and again.archive.totals().num_faults == 0


def test_nobody_waits_for_the_disk(owned: Callable[..., Owner]) -> None:
    """While a write hangs, telling costs nothing; then all of it is written."""
    owner = owned().start()
    hangs, goes_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        hangs.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return b"slow"

    owner.archive.put("node", b"slow", slow)
    assert hangs.wait(PATIENCE_SECONDS)
    started = time.perf_counter()
    for number in range(1_000):
        owner.put(number.to_bytes(2))
    assert time.perf_counter() - started < PATIENCE_SECONDS / 2, "it did not wait for the write"
    assert not owner.archive.flush(0.05)
    goes_on.set()
    assert owner.archive.flush(PATIENCE_SECONDS) and owner.archive.totals().num_rows == 1_001


def test_a_full_disk_is_said_once_and_tried_again(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """Nothing is lost meanwhile, the newest state is what is written once there is room."""
    owner = owned().start()
    owner.put(b"before")
    assert owner.archive.flush(PATIENCE_SECONDS)
    connection = owner.file._connection
    connection.execute("PRAGMA max_page_count = 8")
    for number in range(20):
        owner.put(b"big", bytes([number]) * 200_000)
        time.sleep(0.01)
    owner.wait_for_line()
    assert not owner.archive.flush(0.2)
    assert len(owner.lines) == 1 and "full" in owner.lines[0], owner.lines
    owner.put(b"big", b"small")
    owner.put(b"after")
    assert owner.archive.flush(PATIENCE_SECONDS)
    assert len(owner.lines) == 2 and "again" in owner.lines[1]
    assert owner.archive.totals().num_faults == 1 and owner.archive.totals().is_on
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == owner.rows


def test_what_was_told_while_a_write_failed_is_what_is_written_later(
    owned: Callable[..., Owner], tmp_path: Path
) -> None:
    """Of a row that changed meanwhile the newest body comes into the file, and one that was dropped does not."""
    owner = owned().start()
    is_writing, goes_on = threading.Event(), threading.Event()

    def old() -> bytes:
        is_writing.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return b"too large" * 20_000

    owner.file._connection.execute("PRAGMA max_page_count = 8")
    for key in (b"changed", b"dropped"):
        owner.rows["node", key] = b"old"
        owner.archive.put("node", key, old)
    assert is_writing.wait(PATIENCE_SECONDS)
    owner.put(b"changed", b"new")
    owner.drop(b"dropped")
    goes_on.set()
    owner.wait_for_line()
    owner.file._connection.execute("PRAGMA max_page_count = 1000000")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == owner.rows == {("node", b"changed"): b"new"}


def test_a_disk_that_takes_nothing_for_long_is_given_up(
    owned: Callable[..., Owner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded; the next process finds the last moment that was written."""
    monkeypatch.setattr(archive, "MAX_PENDING", 100)
    owner = owned().start()
    owner.put(b"before")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.file._connection.execute("PRAGMA max_page_count = 1")  # as many as it has
    for number in range(200):
        owner.put(number.to_bytes(2), b"x" * 10_000)
    assert owner.archive.flush(PATIENCE_SECONDS) and not owner.archive.totals().is_on
    owner.put(b"after")
    assert not owner.archive._pending
    owner.archive.close(PATIENCE_SECONDS)
    assert set(kept(tmp_path)) == {("node", b"before")}


def test_what_is_to_stay_free_stays_free(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """Below it nothing is added, said once; what goes goes all the same; with room all of it is written."""
    owner = owned().start()
    owner.put(b"a")
    owner.put(b"b")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.archive._min_free_bytes = 1 << 62
    owner.drop(b"a")
    assert owner.archive.flush(PATIENCE_SECONDS) and owner.archive.totals().num_rows == 1
    owner.put(b"c")
    owner.wait_for_line()
    assert not owner.archive.flush(0.2) and len(owner.lines) == 1 and "stay free" in owner.lines[0]
    owner.archive._min_free_bytes = 0
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == owner.rows and len(owner.rows) == 2


def test_a_disk_that_became_read_only_keeps_the_server_alive(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """The same as a full one; what was written before is there."""
    owner = owned().start()
    owner.put(b"before")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.file._connection.execute("PRAGMA query_only = ON")
    owner.put(b"never")
    assert not owner.archive.flush(0.2)
    owner.archive.close(PATIENCE_SECONDS)
    assert set(kept(tmp_path)) == {("node", b"before")}
    assert owner.archive.totals().num_faults == 1


def test_a_file_that_breaks_is_replaced_by_all_that_is_held(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """What its owners hold is put into a new one; said and counted."""
    owner = owned().start()
    for number in range(50):
        owner.put(bytes([number]), b"x" * 1_000)
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.file._connection.execute("UPDATE rows SET digest = 'broken'")
    owner.put(b"\x07", b"new")
    assert owner.archive.flush(PATIENCE_SECONDS)
    assert len(owner.lines) == 1 and "anew" in owner.lines[0]
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == owner.rows and len(owner.rows) == 50


def test_a_folder_that_somebody_cleared_is_filled_again(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """Removed under the running server: the next write makes it whole."""
    owner = owned(tmp_path / "cache").start()
    owner.put(b"before")
    assert owner.archive.flush(PATIENCE_SECONDS)
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    (tmp_path / "cache").rmdir()
    owner.put(b"after")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path / "cache") == owner.rows


def test_a_disk_that_breaks_every_file_is_left_alone(owned: Callable[..., Owner]) -> None:
    """After a few new files in vain everything stays in RAM, and telling still costs nothing."""
    owner = owned().start()
    for number in range(archive.MAX_RENEWALS + 1):
        owner.put(b"a", bytes([number]))
        owner.archive.flush(PATIENCE_SECONDS)
        if owner.archive._file is not None:
            owner.file._connection.execute("UPDATE rows SET digest = 'broken'")
    owner.put(b"a")
    owner.archive.flush(PATIENCE_SECONDS)
    assert not owner.archive.totals().is_on
    owner.put(b"b")
    assert owner.archive.flush(0)


def test_a_place_that_cannot_be_used_leaves_everything_in_ram(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """A file where the folder should be: said once, counted, no thread."""
    (tmp_path / "cache").write_text("a file")
    owner = owned(tmp_path / "cache").start()
    owner.put(b"a")
    assert owner.archive.flush(0) and not owner.archive.totals().is_on
    assert len(owner.lines) == 1 and "RAM only" in owner.lines[0] and owner.archive.totals().num_faults == 1


def test_the_second_of_two_servers_keeps_its_rows_in_ram(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """It does not touch the file of the first, which goes on."""
    first = owned().start()
    first.put(b"a")
    second = owned().start()
    second.put(b"b")
    assert not second.archive.totals().is_on and "another server" in second.lines[0]
    first.put(b"c")
    first.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == first.rows


def test_what_is_found_and_makes_no_sense_is_begun_anew(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """The owner may refuse what it is given."""
    owner = owned().start()
    owner.put(b"a")
    owner.archive.close(PATIENCE_SECONDS)
    again = owned()
    again.archive.reject("a riddle")
    again.start().put(b"b")
    again.archive.close(PATIENCE_SECONDS)
    assert kept(tmp_path) == again.rows and "a riddle" in again.lines[0]


def test_a_row_that_cannot_be_written_costs_itself_only(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """Template arguments nested beyond what JSON takes, for instance."""
    owner = owned().start()
    owner.put(b"a", b"old")

    def broken() -> bytes:
        raise RecursionError("too deep")

    owner.archive.flush(PATIENCE_SECONDS)
    owner.archive.put("node", b"a", broken)
    owner.put(b"b")
    assert owner.archive.flush(PATIENCE_SECONDS)
    owner.archive.close(PATIENCE_SECONDS)
    assert set(kept(tmp_path)) == {("node", b"b")} and "too deep" in owner.lines[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_breaks_is_given_up(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """A defect of ours costs records, and is said; nobody waits for it, and what was written stays."""
    owner = owned().start()
    owner.put(b"a")
    assert owner.archive.flush(PATIENCE_SECONDS)

    def broken() -> bytes:
        raise ZeroDivisionError

    owner.archive.put("node", b"b", broken)
    assert owner.archive.flush(PATIENCE_SECONDS) and not owner.archive.totals().is_on
    assert "writer has ended" in owner.lines[0]
    owner.put(b"c")
    assert owner.archive.flush(0)
    owner.archive.close(PATIENCE_SECONDS)
    assert set(kept(tmp_path)) == {("node", b"a")}


def test_a_file_over_its_bytes_makes_its_owner_forget(owned: Callable[..., Owner], tmp_path: Path) -> None:
    """The least recently used go until it fits."""
    owner = owned(max_bytes=20_000).start()
    for number in range(64):
        owner.put(bytes([number]), b"x" * 1_000)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not owner.archive.flush(1) or owner.archive.totals().num_bytes > 20_000:
        assert time.monotonic() < deadline
    owner.archive.close(PATIENCE_SECONDS)
    assert 0 < len(owner.rows) < 20 and kept(tmp_path) == owner.rows


def test_old_archives_of_other_models_go(tmp_path: Path) -> None:
    """By their age; the one that is served, young ones and whatever is no archive stay."""
    for name, age in (("old", 1_000), ("young", 10), ("served", 1_000)):
        opened = open_file(tmp_path / name / FILE_NAME)
        opened.file.close()
        os.utime(tmp_path / name / FILE_NAME, (time.time() - age,) * 2)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "notes.txt").write_text("mine")
    lines: list[str] = []
    removed = sweep_stale(tmp_path, keep=tmp_path / "served", older_than=time.time() - 500, report=lines.append)
    assert removed == 1 and not lines
    assert {path.name for path in tmp_path.iterdir()} == {"young", "served", "strange"}


CHILD = """
import sys, time
from pathlib import Path
from kvserve.sessions import archive as archive_module
from kvserve.sessions.archive import Archive, Upkeep

archive_module.GATHER_SECONDS = 0.01  # far less than the second that is asked for, for a machine that is busy
archive = Archive(Path(sys.argv[1]), max_bytes=1 << 30, report=print)
found = [int.from_bytes(key) for key, _ in archive.take_rows().get("node", ())]
first = max(found, default=-1) + 1
for number in found:
    if number <= first - 51:
        archive.drop("node", number.to_bytes(8))
nothing = lambda: None
archive.start(Upkeep(nothing, nothing, nothing))
for number in range(first, 1_000_000):
    archive.put("node", number.to_bytes(8), lambda number=number: b"body %d " % number * 40)
    if number >= 50:
        archive.drop("node", (number - 50).to_bytes(8))
    print(number, time.time(), flush=True)
    time.sleep(0.001)
"""


def test_what_was_told_a_second_ago_outlives_kill_9(tmp_path: Path) -> None:
    """Killed while it writes, and its follower too: the file is whole, a moment of the past, at most a second old."""
    for seconds in (1.3, 1.15):
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(seconds)
        killed_at = time.time()
        child.send_signal(signal.SIGKILL)
        whole_lines = child.communicate()[0].rpartition("\n")[0].splitlines()
        told = [line.split() for line in (first, *whole_lines)]
        numbers = [int(number) for number, said_at in told if float(said_at) < killed_at - 1.0]
        found = sorted(int.from_bytes(key) for _, key in kept(tmp_path))
        assert found and found == list(range(found[0], found[-1] + 1)), "a hole"
        assert len(found) in (50, 51) or found[0] == 0
        assert numbers and found[-1] >= numbers[-1]
        bodies = kept(tmp_path)
        assert all(body == b"body %d " % int.from_bytes(key) * 40 for (_, key), body in bodies.items())


def test_sqlite_may_be_shared_between_threads() -> None:
    """The file is opened on one thread and written on another."""
    assert sqlite3.threadsafety == 3
