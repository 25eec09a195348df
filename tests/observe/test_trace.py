"""Trace files on a real disk: who may read them, what bounds them, and that they never cost a request."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core.keeping import Scope
from kvserve.observe.trace import TraceLimits, TraceLog, session_label
from tests.trace_lines import parse_line

NOON = datetime(2026, 11, 21, 12, 0, 0).astimezone().timestamp()
DAY = "2026-11-21"


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = NOON

    def __call__(self) -> float:
        return self.seconds


def open_log(root: Path, reports: list[str], **limits: int) -> TraceLog:
    """A trace log under `root` at noon."""
    return TraceLog(root, True, Clock(), reports.append, TraceLimits(**limits))


def mode(path: Path) -> int:
    """The permission bits of a path."""
    return stat.S_IMODE(path.stat().st_mode)


def test_an_event_is_one_line_in_the_file_of_its_session_and_day(tmp_path: Path) -> None:
    """Two sessions write two files; each line parses back and carries the time."""
    log = open_log(tmp_path / "logs", [])
    log.write("a1", "turn", num_prompt_tokens=3, prompt="line\nline")
    log.write("a1", "done", reason="stop")
    log.write("b2", "turn")
    files = sorted((tmp_path / "logs" / DAY).iterdir())
    assert [re.sub("-[0-9a-f]{12}", "", file.name) for file in files] == [
        "cache-session-a1.log",
        "cache-session-b2.log",
    ]
    first, second = (parse_line(line) for line in files[0].read_text().splitlines())
    assert (first.name, first.fields["prompt"], second.name) == ("turn", "line\nline", "done")
    assert datetime.fromisoformat(str(first.fields["time"])).timestamp() == NOON


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    """Files are 0600 and folders 0700, also where they were there before and open."""
    (tmp_path / "logs" / DAY).mkdir(parents=True, mode=0o755)
    before = tmp_path / "logs" / DAY / f"cache-session-{session_label('old')}.log"
    before.write_text("")
    before.chmod(0o644)
    log = open_log(tmp_path / "logs", [])
    log.write("old", "turn")
    log.write("new", "turn")
    assert mode(tmp_path / "logs" / DAY) == 0o700
    assert {mode(path) for path in (tmp_path / "logs" / DAY).iterdir()} == {0o600}
    fresh = open_log(tmp_path / "elsewhere" / "logs", [])
    fresh.write("s", "turn")
    assert mode(tmp_path / "elsewhere" / "logs") == 0o700


def test_switched_off_it_touches_nothing(tmp_path: Path) -> None:
    """With enabled=False there is not even a folder."""
    TraceLog(tmp_path / "logs", False, Clock(), lambda _: None).write("s", "turn")
    assert not (tmp_path / "logs").exists()


def test_a_new_day_is_a_new_folder(tmp_path: Path) -> None:
    """The folder is the local date of the event."""
    clock = Clock()
    log = TraceLog(tmp_path, True, clock, lambda _: None)
    log.write("s", "turn")
    clock.seconds += 24 * 3600
    log.write("s", "turn")
    assert sorted(path.name for path in tmp_path.iterdir()) == [DAY, "2026-11-22"]


@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_any_session_key_makes_a_plain_file_name(key: str) -> None:
    """Letters, digits, underscores and dashes only, short, whatever a client calls its session."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,24}-[0-9a-f]{12}", session_label(key))


def test_session_labels_are_readable_and_apart() -> None:
    """An id stays readable; what reads alike is kept apart; text that might be a prompt is not shown."""
    assert session_label("sess_42").startswith("sess_42-")
    assert session_label("../../etc/passwd").startswith("etc-passwd-")
    assert session_label("").startswith("unnamed-")
    assert session_label("会话").startswith("unnamed-")
    assert session_label("please mend the parser").startswith("unnamed-")
    assert len({session_label(key) for key in ("a/b", "a-b", "A-B", "x" * 10_000, "x" * 9_999)}) == 5


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    """Eight threads write into one file: every line is whole and none is missing."""
    log = open_log(tmp_path, [], max_file_bytes=2**30)

    def write(thread: int) -> None:
        for number in range(50):
            log.write("s", "turn", thread=thread, number=number, text="x" * 3000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    (file,) = (tmp_path / DAY).iterdir()
    seen = [parse_line(line).fields for line in file.read_text().splitlines()]
    assert {(fields["thread"], fields["number"]) for fields in seen} == {(t, n) for t in range(8) for n in range(50)}
    assert len(seen) == 400


def test_a_file_that_is_full_moves_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    """The newest events are in `.log`, older ones in `.1.log` and `.2.log`, and no file passes its limit."""
    log = open_log(tmp_path, [], max_file_bytes=1000, num_older_files=2)
    for number in range(100):
        log.write("s", "turn", number=number)
    name = f"cache-session-{session_label('s')}"
    files = [tmp_path / DAY / f"{name}{suffix}.log" for suffix in (".2", ".1", "")]
    assert set((tmp_path / DAY).iterdir()) == set(files)
    assert all(file.stat().st_size <= 1000 for file in files)
    numbers = [parse_line(line).fields["number"] for file in files for line in file.read_text().splitlines()]
    assert numbers == list(range(100 - len(numbers), 100))


def test_a_full_day_loses_what_was_written_longest_ago(tmp_path: Path) -> None:
    """The day's folder stays under its limit; the session being written survives."""
    log = open_log(tmp_path, [], max_day_bytes=10 * 4096)
    for number in range(40):
        log.write(f"s{number}", "turn")
        path = tmp_path / DAY / f"cache-session-{session_label(f's{number}')}.log"
        os.utime(path, (number, number))
        assert sum(max(file.stat().st_size, 4096) for file in (tmp_path / DAY).iterdir()) <= 11 * 4096
    assert path.exists()
    assert not (tmp_path / DAY / f"cache-session-{session_label('s0')}.log").exists()


def test_a_day_that_was_full_before_the_start_is_counted(tmp_path: Path) -> None:
    """A restart does not begin with an empty budget."""
    open_log(tmp_path, []).write("first", "turn", text="x" * 30_000)
    open_log(tmp_path, [], max_day_bytes=32_000).write("second", "turn", text="x" * 5_000)
    (file,) = (tmp_path / DAY).iterdir()
    assert "second" in file.name


def test_old_days_leave_and_nothing_else_does(tmp_path: Path) -> None:
    """The newest days stay, today among them; files and folders that are not ours are left alone."""
    for day in range(10, 21):
        folder = tmp_path / f"2026-11-{day}"
        folder.mkdir()
        (folder / "cache-session-a-0123.log").write_text("turn\n")
    (tmp_path / "2026-11-11" / "notes.txt").write_text("mine")
    (tmp_path / "2025-archive").mkdir()
    (tmp_path / "2026-11-30").mkdir()  # written while the clock was wrong
    (tmp_path / "2026-11-01").symlink_to(tmp_path / "2025-archive")
    open_log(tmp_path, [], max_days=4).write("s", "turn")
    kept = sorted(path.name for path in tmp_path.iterdir())
    days = ["2026-11-11", "2026-11-19", "2026-11-20", "2026-11-21", "2026-11-30"]
    assert kept == sorted(["2025-archive", "2026-11-01", *days])
    assert [path.name for path in (tmp_path / "2026-11-11").iterdir()] == ["notes.txt"]


def test_no_limit_on_days_keeps_them_all(tmp_path: Path) -> None:
    """0 means all."""
    for day in range(10, 21):
        (tmp_path / f"2026-11-{day}").mkdir()
    open_log(tmp_path, [], max_days=0).write("s", "turn")
    assert len(list(tmp_path.iterdir())) == 12


def test_an_event_that_is_too_long_keeps_its_short_fields(tmp_path: Path) -> None:
    """What does not fit is named instead of written."""
    log = open_log(tmp_path, [], max_line_bytes=5000)
    log.write("s", "turn", request_id="a1", prompt="x" * 6000, parts=["y" * 2000])
    (file,) = (tmp_path / DAY).iterdir()
    fields = parse_line(file.read_text()).fields
    assert (fields["request_id"], fields["too_long"]) == ("a1", ["prompt", "parts"])
    assert "prompt" not in fields


def test_a_place_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    """A file where the folder should be: one sentence, then silence; no exception."""
    (tmp_path / "logs").write_text("in the way")
    reports: list[str] = []
    log = open_log(tmp_path / "logs", reports)
    for _ in range(3):
        log.write("s", "turn")
    assert len(reports) == 1
    assert str(tmp_path / "logs") in reports[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once_and_costs_only_the_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC from the kernel loses the event; once there is room again, events arrive."""
    reports: list[str] = []
    log = open_log(tmp_path, reports)
    real_open = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags, mode=0o600: real_open("/dev/full", os.O_RDWR))
        log.write("s", "lost")
        log.write("s", "lost")
    log.write("s", "turn")
    assert len(reports) == 1
    assert "No space left" in reports[0]
    (file,) = (tmp_path / DAY).iterdir()
    assert parse_line(file.read_text()).name == "turn"


def test_a_line_that_was_cut_does_not_swallow_the_next(tmp_path: Path) -> None:
    """After half a line at the end of the file the next event starts on a line of its own."""
    log = open_log(tmp_path, [])
    log.write("s", "turn", number=1)
    (file,) = (tmp_path / DAY).iterdir()
    with file.open("a") as handle:
        handle.write("turn numb")
    log.write("s", "turn", number=2)
    assert parse_line(file.read_text().splitlines()[-1]).fields["number"] == 2


def test_a_folder_tidied_away_comes_back(tmp_path: Path) -> None:
    """Somebody removes the day's folder while the server runs: the next event is there, nothing is reported."""
    reports: list[str] = []
    log = open_log(tmp_path, reports)
    log.write("s", "turn")
    (file,) = (tmp_path / DAY).iterdir()
    file.unlink()
    file.parent.rmdir()
    log.write("s", "turn")
    assert file.exists()
    assert reports == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link under a session's name cannot make us write elsewhere."""
    reports: list[str] = []
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / "logs" / DAY).mkdir(parents=True)
    (tmp_path / "logs" / DAY / f"cache-session-{session_label('s')}.log").symlink_to(victim)
    open_log(tmp_path / "logs", reports).write("s", "turn")
    assert victim.read_text() == ""
    assert len(reports) == 1


# --- whose it is, and forgetting it ----------------------------------------------------------------------------------

WRITTEN = [
    # (session, the principal's name)
    ("s1", "key1.ann"),
    ("s1", "key1.ben"),
    ("s1", ""),
    ("s2", "key1.ann"),
    ("s-1", ""),
]


def test_principals_do_not_share_a_file(tmp_path: Path) -> None:
    """Also where they name the same session; no file is named after what a principal is called."""
    log = open_log(tmp_path, [])
    for session, principal in WRITTEN:
        log.write(session, "turn", principal)
    names = {path.name for path in (tmp_path / DAY).iterdir()}
    assert len(names) == len(WRITTEN) and not any("key1" in name for name in names)
    log.write("s3", "turn", "../../key/../x")
    assert len({path.name for path in (tmp_path / DAY).iterdir()} - names) == 1


FORGOTTEN: list[tuple[str | None, str | None, set[int]]] = [
    ("s1", None, {0, 1, 2}),
    (None, "key1.ann", {0, 3}),
    ("s1", "key1.ann", {0}),
    (None, "", {2, 4}),
    ("s3", None, set()),
    (None, "key1", set()),
]


@pytest.mark.parametrize(("session", "principal", "gone"), FORGOTTEN)
@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_files_of_a_session_and_of_a_principal_can_be_deleted(
    tmp_path: Path, session: str | None, principal: str | None, gone: set[int], is_enabled: bool
) -> None:
    """Of every day, older files too, also by a process that writes none; nothing else is touched."""
    clock = Clock()
    log = TraceLog(tmp_path, True, clock, pytest.fail, TraceLimits(max_file_bytes=1_000))
    of: dict[int, set[Path]] = {}
    for number, (written, whose) in enumerate(WRITTEN):
        before = set(tmp_path.rglob("*.log"))
        for day in range(2):
            clock.seconds = NOON + day * 86_400
            log.write(written, "turn", whose, text="x" * 800)
            log.write(written, "turn", whose, text="x" * 800)
        of[number] = set(tmp_path.rglob("*.log")) - before
        assert len(of[number]) == 4
    foreign = tmp_path / DAY / "cache-session-notes.txt", tmp_path / "elsewhere" / next(iter(of[0])).name
    foreign[1].parent.mkdir()
    for path in foreign:
        path.write_text("mine")
    (tmp_path / "2026-01-01").symlink_to(foreign[1].parent)
    log = log if is_enabled else TraceLog(tmp_path, False, clock, pytest.fail)
    assert log.forget(Scope(session, principal)) == 4 * len(gone)
    kept = set.union(*(paths for number, paths in of.items() if number not in gone))
    assert {path for path in tmp_path.rglob("*.log") if path not in foreign} == kept
    assert all(path.read_text() == "mine" for path in foreign)
    if is_enabled:
        log.write("s1", "turn", "key1.ann")


def test_a_file_that_cannot_be_deleted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not counted; the others are deleted."""
    reports: list[str] = []
    log = open_log(tmp_path, reports)
    for number in range(2):
        log.write("s1", "turn", str(number))
    first = min((tmp_path / DAY).iterdir())
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert log.forget(Scope(session="s1")) == 1
    assert list((tmp_path / DAY).iterdir()) == [first] and len(reports) == 1
