"""The disk tier on a real folder: what was written comes back, and whatever a disk can do costs a miss at most."""

import errno
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.cache import disk_account, disk_store, disk_tier
from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_store import FolderStore
from tests.cache.disks import MODEL, OTHER, ROOMY, WAIT_SECONDS, Disk, named, names_of
from tests.laws import num_examples

LONG = list(range(100, 140))
BRANCH = [*LONG[:25], *range(200, 220)]
LATER = [*LONG, *range(300, 310)]


def write_all(folder: Path) -> None:
    """Three prompts that share beginnings, with states, as one server leaves them."""
    with Disk(folder) as disk:
        disk.say(LONG, states=(20, 40))
        disk.say(BRANCH, states=(45,))
        disk.say(LATER, states=(50,))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_all(folder)
    return folder


@pytest.fixture
def full(tmp_path: Path, written: Path) -> Path:
    """A folder that `write_all` has written."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def wait_until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- what a tier is for ---------------------------------------------------------------------------------------------


def test_a_restart_has_everything(full: Path) -> None:
    """Another tier on the same folder gives back every prompt and every state, and no token of a stranger."""
    with Disk(full) as disk:
        assert disk.recall(LONG) == (LONG, [20, 40])
        assert disk.recall(BRANCH) == (BRANCH, [20, 45])
        assert disk.recall([*LATER, 7]) == (LATER, [20, 40, 50])
        assert disk.recall([1, 2, 3]) == ([], [])
        assert disk.faults == {} and disk.lines == []


def test_siblings_share_bytes(tmp_path: Path) -> None:
    """Two prompts with a common beginning: it is on disk once, and neither loses anything."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        before, files = disk.tier.stats().num_written_bytes, disk.files()
        disk.say(BRANCH)
        run, _ = named(BRANCH)
        [file] = set(disk.files()) - set(files)
        second = file.read_bytes()
        assert run.packed(25, 45) in second and run.packed(0, 25) not in second
        assert disk.tier.stats().num_written_bytes > before
        assert disk.recall(LONG)[0] == LONG and disk.recall(BRANCH)[0] == BRANCH


def test_what_is_there_is_not_written_again(full: Path) -> None:
    """Saying the same once more writes nothing, before and after a restart."""
    with Disk(full) as disk:
        disk.say(LONG, states=(20, 40))
        disk.say(BRANCH[:30])
        assert disk.tier.stats().num_written == 0


def test_only_the_owner_may_look(full: Path) -> None:
    """A folder of KV is 0700, also if it was open to others, and files are 0600; the root is left as it is."""
    full.chmod(0o755)
    (full / MODEL).chmod(0o755)
    with Disk(full):
        assert stat.S_IMODE((full / MODEL).stat().st_mode) == 0o700
        assert stat.S_IMODE(full.stat().st_mode) == 0o755
        assert {stat.S_IMODE(path.stat().st_mode) for path in full.rglob("*") if path.is_file()} <= {0o600}


def test_models_do_not_meet(full: Path) -> None:
    """Another model on the same root finds nothing, and may not use a file that was put into its folder."""
    with Disk(full, model=OTHER) as disk:
        assert disk.recall(LONG) == ([], [])
    for path in (full / MODEL).glob("*.safetensors"):
        (full / OTHER / path.name).write_bytes(path.read_bytes())
    with Disk(full, model=OTHER) as disk:
        assert disk.recall(LONG) == ([], [])
        assert disk.faults["damaged"] == 7 and len(disk.lines) == 1


def test_clearing_leaves_nothing_of_this_model(full: Path) -> None:
    """Files, rows and index are gone, also after a restart; another model's stay."""
    with Disk(full, model=OTHER) as disk:
        disk.say(LONG)
    with Disk(full) as disk:
        assert disk.tier.clear()
        assert disk.recall(LONG) == ([], []) and len(disk.files()) == 1
        disk.say(BRANCH)
        assert disk.recall(BRANCH)[0] == BRANCH
    with Disk(full) as disk:
        assert disk.recall(LONG)[0] == LONG[:25]
    with Disk(full, model=OTHER) as disk:
        assert disk.recall(LONG)[0] == LONG


def test_a_blob_appears_only_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written under another name, synchronised, then renamed; after that the folder is synchronised too."""
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_sync(descriptor)

    def replace_file(source: Path, target: Path) -> None:
        assert not target.exists() and source.suffix == ".part"
        calls.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace_file)
    with Disk(tmp_path) as disk:
        disk.say(LONG)
    assert calls == ["file", "rename", "folder"]


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_new_index_is_made_of_the_blobs(full: Path) -> None:
    """Without the index file everything is found again, with every state."""
    for path in full.glob("index.sqlite*"):
        path.unlink()
    with Disk(full) as disk:
        assert disk.recall(LATER) == (LATER, [20, 40, 50]) and disk.recall(BRANCH) == (BRANCH, [20, 45])
        assert disk.tier.flush(WAIT_SECONDS)
        assert disk.faults == {"index": 1} and len(disk.lines) == 1
    rows = sqlite3.connect(full / "index.sqlite").execute("SELECT count(*) FROM blobs").fetchone()
    assert rows == (len(list(full.rglob("*.safetensors"))),)


@pytest.mark.parametrize("content", [b"", b"rubbish" * 1000, b"SQLite format 3\0" + bytes(4000)])
def test_an_index_that_is_none_is_made_anew(full: Path, content: bytes) -> None:
    """A file that is no database costs a look at the blobs."""
    for path in full.glob("index.sqlite-*"):
        path.unlink()
    (full / "index.sqlite").write_bytes(content)
    with Disk(full) as disk:
        assert disk.recall(LATER) == (LATER, [20, 40, 50])
        assert disk.faults == {"index": 1} and len(disk.lines) == 1


def test_an_index_of_another_version_is_made_anew(full: Path) -> None:
    """What an older or newer program wrote is not read, and that is told."""
    db = sqlite3.connect(full / "index.sqlite")
    db.execute("PRAGMA user_version=99")
    db.execute("UPDATE blobs SET tokens = x'00'")
    db.commit()
    db.close()
    with Disk(full) as disk:
        assert disk.recall(LATER) == (LATER, [20, 40, 50])
        assert disk.faults == {"index": 1} and "99" in disk.lines[0]


def test_a_new_folder_is_no_fault(tmp_path: Path) -> None:
    """Where there is no KV nobody misses an index."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        assert disk.faults == {} and disk.lines == []


def test_a_row_that_lies_is_not_believed(full: Path) -> None:
    """A row with other tokens contradicts its name: the blob says what is true."""
    db = sqlite3.connect(full / "index.sqlite")
    db.execute("UPDATE blobs SET tokens = ? WHERE start = 0", (named([1] * 40)[0].ids,))
    db.commit()
    db.close()
    with Disk(full) as disk:
        assert disk.recall([1] * 40) == ([], [])
        assert disk.recall(LATER) == (LATER, [20, 40, 50])
        assert disk.faults["index"] == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE blobs SET tokens = 1000000000000 WHERE start = 0",
        "UPDATE blobs SET num_bytes = 'many', used_at = 0",
        "UPDATE blobs SET used_at = 'today'",
        "INSERT INTO rates VALUES ('read bytes', 'fast')",
        "INSERT INTO rates VALUES ('read bytes', 9e999)",
    ],
)
def test_values_of_another_type_are_not_believed(full: Path, change: str) -> None:
    """A flipped bit can make a number of a text: the folder is used all the same, and its bounds hold."""
    db = sqlite3.connect(full / "index.sqlite")
    db.execute("DELETE FROM rates")
    db.execute(change)
    db.commit()
    db.close()
    with Disk(full, replace(ROOMY, max_bytes=6000)) as disk:
        assert disk.tier.read_rate is None
        for ids in (LONG, LATER, BRANCH):
            rows, _ = disk.recall(ids)
            assert rows == ids[: len(rows)]
        for number in range(8):
            disk.say([number, *range(50)])
        assert disk.recall([7, *range(50)])[0] == [7, *range(50)]
        assert sum(path.stat().st_size for path in disk.files()) <= 6000
        assert set(disk.faults) <= {"index"}


def test_a_locked_index_costs_nothing_but_order(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody holds the index, blobs are found by their heads and written; afterwards they are listed."""
    monkeypatch.setattr("kvserve.cache.disk_catalog.BUSY_SECONDS", 0.05)
    monkeypatch.setattr(disk_tier, "FULL_CHECK_SECONDS", 0.05)
    holder = sqlite3.connect(full / "index.sqlite", isolation_level=None)
    holder.execute("PRAGMA journal_mode=DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    more = [*LATER, 1, 2, 3]
    with Disk(full) as disk:
        assert disk.recall(LATER) == (LATER, [20, 40, 50])
        disk.say(more)
        assert disk.recall(more)[0] == more
        assert disk.faults["index"] >= 1 and len(disk.lines) == 1
        holder.execute("ROLLBACK")
        holder.close()
        assert disk.tier.flush(WAIT_SECONDS)
    rows = sqlite3.connect(full / "index.sqlite").execute("SELECT count(*) FROM blobs").fetchone()
    assert rows == (len(list(full.rglob("*.safetensors"))),)


def test_a_missing_blob_is_a_miss(full: Path) -> None:
    """A file that is taken away under the running tier: counted, told once, what stood on it is gone too."""
    with Disk(full) as disk:
        for path in disk.files():
            path.unlink()
        assert disk.recall(LONG)[0] == [] and disk.recall(BRANCH)[0] == []
        assert disk.faults["missing"] >= 1 and len(disk.lines) == 1
        disk.say(LONG)
        assert disk.recall(LONG)[0] == LONG
    write_all(full)
    victim = max(full.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    victim.unlink()
    with Disk(full) as disk:
        rows, _ = disk.recall(LATER)
        assert rows == LATER[: len(rows)] and disk.faults["missing"] == 1


def test_what_left_by_our_own_hand_is_no_fault(tmp_path: Path) -> None:
    """A blob that leaves for the cap between being found and being read: a miss, and nothing to complain of."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        cap = disk.tier.stats().total_bytes + 100
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap)) as disk:
        [step] = disk.tier.index.find(*named(LONG)).steps
        disk.say([1, *LONG[1:]])
        assert disk.tier.stats().num_evicted == 1
        assert disk.read(step.segment) is None and disk.faults == {}


@settings(max_examples=num_examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_byte_of_any_file_leads_to_other_kv(
    tmp_path_factory: pytest.TempPathFactory, written: Path, data: st.DataObject
) -> None:
    """Flip or cut any byte of any file: everything that still comes back is right, and new KV can be written."""
    folder = tmp_path_factory.mktemp("kv")
    shutil.copytree(written, folder, dirs_exist_ok=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if data.draw(st.booleans()) and content:
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    with Disk(folder) as disk:
        for ids in (LONG, BRANCH, LATER):
            rows, _ = disk.recall(ids)
            assert rows == ids[: len(rows)]
        for ids in (LONG, BRANCH, LATER):
            disk.say(ids)
            assert disk.recall(ids)[0] == ids


def test_a_folder_of_another_user_is_left_alone(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used, and nothing in it is changed."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(disk_store.ForeignFolder, match="another user"):
        FolderStore(full, MODEL)


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(self: FolderStore, name: BlobName, parts: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FolderStore, "write", fail)


def test_a_read_only_disk_still_gives(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is no hit later and costs one line; what is there is read."""
    with Disk(full) as disk, monkeypatch.context() as patch:
        fail_writes(patch, errno.EROFS)
        disk.say([1, 2, 3])
        disk.say([4, 5, 6])
        assert disk.recall([1, 2, 3]) == ([], []) and disk.recall(LONG)[0] == LONG
        assert disk.faults == {"unwritable": 2} and len(disk.lines) == 1
        assert not disk.tier.take_lost(), "a disk that just failed is left alone for a while"
        disk.tier._retry_at = 0.0
        assert disk.tier.take_lost()


def test_a_volume_that_is_read_only_is_read(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start too: without an index that can be opened blobs are found by their heads, and nothing is written."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("chmod", "unlink", "replace", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    fail_writes(monkeypatch, errno.EROFS)
    with Disk(full) as disk:
        assert disk.recall(LATER) == (LATER, [20, 40, 50])
        disk.say([1, 2, 3])
        assert set(disk.faults) == {"index", "unwritable"} and len(disk.lines) == 2
    monkeypatch.undo()


def test_a_full_disk_stops_writing_and_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room: said once, nothing is taken; there is room: it goes on, says so, and asks for what was lost."""
    monkeypatch.setattr(disk_tier, "FULL_CHECK_SECONDS", 0.05)
    with Disk(tmp_path) as disk:
        with monkeypatch.context() as patch:
            fail_writes(patch, errno.ENOSPC)
            patch.setattr(disk_tier, "FULL_CHECK_SECONDS", 3600.0)
            disk.say(LONG)
            assert disk.tier.stats().is_full and not disk.say(BRANCH) and not disk.tier.take_lost()
            assert disk.faults == {"full": 1} and len(disk.lines) == 1
        disk.tier._full_check_at = 0.0
        disk.tier.flush(WAIT_SECONDS)
        wait_until(disk.tier.take_lost)
        assert disk.say(BRANCH) and disk.recall(BRANCH)[0] == BRANCH
        assert len(disk.lines) == 2 and "room again" in disk.lines[1]


def test_what_must_stay_free_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that is nearly full is full for us."""
    monkeypatch.setattr(FolderStore, "free_bytes", lambda self: 1000)
    with Disk(tmp_path, replace(ROOMY, min_free_bytes=900)) as disk:
        disk.say(LONG)
        assert disk.files() == [] and disk.faults == {"full": 1}


def look(disk: Disk) -> None:
    """Reconcile the folder now, after the look that may be under way since the start."""
    disk.tier.flush(WAIT_SECONDS)
    disk.tier._reconcile_at = 0.0
    disk.tier.flush(WAIT_SECONDS)
    wait_until(lambda: disk.tier._reconcile_at > 0)
    disk.tier.flush(WAIT_SECONDS)


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    """Each writes, each finds what the other wrote after the next look, and what one deletes is a miss of the other."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        one.say(LONG)
        look(other)
        assert other.recall(LONG)[0] == LONG
        other.say(BRANCH)
        look(one)
        assert one.recall(BRANCH)[0] == BRANCH
        one.say([*LATER, 1])
        other.say([*LATER, 2])
        for each in (one, other):
            look(each)
            for ids in (LONG, BRANCH, [*LATER, 1], [*LATER, 2]):
                rows, _ = each.recall(ids)
                assert rows == ids[: len(rows)] and len(rows) >= 40
        other.tier.clear()
        assert one.recall(BRANCH)[0] == [] and one.faults["missing"] >= 1
        one.say(BRANCH)
        assert one.recall(BRANCH)[0] == BRANCH
    with Disk(tmp_path) as third:
        assert third.recall(BRANCH)[0] == BRANCH


def test_what_another_server_writes_again_is_found_again(tmp_path: Path) -> None:
    """A blob that was known, was deleted and has come back under its name, whether a look fell in between or not."""
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        for has_looked in (False, True):
            one.say(LONG)
            look(other)
            assert other.recall(LONG)[0] == LONG
            other.tier.clear()
            if has_looked:
                look(one)
            assert one.recall(LONG)[0] == []
            one.say(LONG)
            look(other)
            assert other.recall(LONG)[0] == LONG


def test_what_is_not_ours_is_never_touched(full: Path) -> None:
    """A folder of model weights, of records or of anything else below the root: not read, not counted, not deleted."""
    names = [
        "my-model/model.safetensors",
        "run/x.part",
        "0" * 32 + "/notes.safetensors",
        "a" * 31 + "/" + "b" * 40 + ".safetensors",
    ]
    for name in names:
        (full / name).parent.mkdir(exist_ok=True)
        (full / name).write_bytes(b"precious")
        os.utime(full / name, (1, 1))
    (full / "empty").mkdir()
    with Disk(full, replace(ROOMY, max_bytes=1, ttl_seconds=0.001)) as disk:
        assert disk.tier.flush(WAIT_SECONDS) and disk.faults == {}
    assert all((full / name).read_bytes() == b"precious" for name in names) and (full / "empty").is_dir()
    assert not [path for path in (full / MODEL).glob("*.safetensors") if path.name != "notes.safetensors"]


def test_a_writer_that_died_leaves_no_rubbish(full: Path) -> None:
    """Half-written files that nobody writes on are removed, young ones and complete ones stay."""
    old, young = full / MODEL / "a.1.1.part", full / MODEL / "b.1.1.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    with Disk(full) as disk:
        assert not old.exists() and young.exists() and len(disk.files()) == 7
        os.utime(young, (1, 1))
        look(disk)
        assert not young.exists(), "one that was young at the start is looked at again"


def test_a_disk_that_raises_anything_leaves_the_thread_alive(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect is counted; the next order is carried out."""
    with Disk(full) as disk:
        assert disk.tier.flush(WAIT_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(disk_account.DiskAccount, "make_room", lambda *_: 1 / 0)
            disk.say([1, 2, 3])
        assert disk.faults == {"unwritable": 1}
        disk.say([1, 2, 4])
        assert disk.recall([1, 2, 4])[0][:2] == [1, 2] and disk.recall(LONG)[0] == LONG


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaves_over_all_models(tmp_path: Path) -> None:
    """One cap: the oldest of all models goes first, leaves before what they stand on, and the cap always holds."""
    with Disk(tmp_path, model=OTHER) as disk:
        disk.say(LONG)
        cap = 4 * disk.tier.stats().total_bytes
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap)) as disk:
        for number in range(12):
            disk.say([number, *range(50)])
            assert sum(path.stat().st_size for path in disk.files()) <= cap
        assert not list((tmp_path / OTHER).glob("*")) and disk.tier.stats().num_evicted >= 9
        assert disk.recall([11, *range(50)])[0] == [11, *range(50)]
        assert disk.recall([0, *range(50)])[0] == []


def test_what_is_used_stays(tmp_path: Path) -> None:
    """A chain that rows stand on is younger than one that nobody asks for."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        cap = 4 * disk.tier.stats().total_bytes
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap)) as disk:
        for number in range(12):
            disk.tier.note_restored([step.segment for step in disk.found(LONG).steps], len(LONG))
            disk.say([number, *range(50)])
        assert disk.recall(LONG)[0] == LONG


def test_the_end_of_a_chain_leaves_before_its_beginning(tmp_path: Path) -> None:
    """A conversation that grew over minutes loses its newest rows first, which nothing stands on, not all at once."""
    with Disk(tmp_path) as disk:
        for end in (20, 30, 40):
            disk.say(LONG[:end])
        cap = disk.tier.stats().total_bytes
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap)) as disk:
        disk.say([7, 8])
        assert disk.recall(LONG)[0] == LONG[:30] and disk.recall([7, 8])[0] == [7, 8]


def test_the_path_that_is_written_on_stays(tmp_path: Path) -> None:
    """A cap below one conversation: what is being written does not push out what it stands on."""
    with Disk(tmp_path) as disk:
        disk.say(LONG)
        cap = int(2.5 * disk.tier.stats().total_bytes)
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap)) as disk:
        for end in range(50, 120, 10):
            disk.say([*LONG, *range(1000, 1000 + end)])
            rows, _ = disk.recall([*LONG, *range(1000, 1200)])
            assert rows[:40] == LONG
        assert disk.tier.stats().num_refused > 0


def test_what_nobody_used_for_too_long_leaves(full: Path) -> None:
    """The time limit holds for all models, at the next start already."""
    db = sqlite3.connect(full / "index.sqlite")
    db.execute("UPDATE blobs SET used_at = used_at - 7200")
    db.commit()
    db.close()
    with Disk(full, model=OTHER) as disk:
        assert disk.tier.flush(WAIT_SECONDS)
        assert disk.files() == [] and disk.tier.stats().total_bytes == 0


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Whether a file is being written, and what each one waits for."""
    is_writing, may_write, real = threading.Event(), threading.Event(), FolderStore.write

    def write(self: FolderStore, name: BlobName, parts: object) -> int:
        is_writing.set()
        assert may_write.wait(WAIT_SECONDS)
        return real(self, name, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(FolderStore, "write", write)
    return is_writing, may_write


def test_a_queue_that_is_full_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts bytes; what is refused is asked for again once the queue is empty."""
    is_writing, may_write = hold_writes(monkeypatch)
    with Disk(tmp_path, replace(ROOMY, max_queued_bytes=400)) as disk:
        assert disk.say([7, 8, 9], flush=False)
        wait_until(is_writing.is_set)  # what the thread has taken out of the queue does not stand in it
        assert disk.say(LONG, flush=False) and disk.say(LONG[1:], flush=False)
        assert not disk.say(list(range(1, 40)), flush=False)
        assert disk.tier.stats().num_refused == 1 and not disk.tier.take_lost()
        may_write.set()
        assert disk.tier.flush(WAIT_SECONDS) and disk.tier.take_lost() and not disk.tier.take_lost()


def test_a_load_that_nobody_takes_keeps_no_write_waiting(tmp_path: Path) -> None:
    """Read as far ahead as may be, then written; and once somebody takes, the rest is read."""
    with Disk(tmp_path) as disk:
        for end in (10, 20, 30, 40):
            disk.say(LONG[:end])
    with Disk(tmp_path, replace(ROOMY, max_read_ahead_bytes=1)) as disk:
        entries = [step.segment for step in disk.tier.index.find(*named(LONG)).steps]
        load = disk.tier.load(entries)
        wait_until(lambda: len(load.ready) == 1)
        disk.say([1, 2, 3])
        assert disk.recall([1, 2, 3])[0] == [1, 2, 3] and len(load.ready) == 1
        taken: list[object] = []
        while not disk.tier.is_over(load):
            disk.tier.wait(0.05)
            taken += disk.tier.take(load)
        assert len(taken) == len(entries) == 4 and None not in taken


def test_what_is_put_again_after_it_was_discarded_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of what was discarded go behind what waits to be written: not those that were written meanwhile."""
    may_write, real = threading.Event(), FolderStore.write

    def write(self: FolderStore, name: BlobName, parts: object) -> int:
        assert may_write.wait(WAIT_SECONDS)
        return real(self, name, parts)  # type: ignore[arg-type]

    with Disk(tmp_path) as disk:
        disk.say(LONG)
        monkeypatch.setattr(FolderStore, "write", write)
        disk.say([1, 2, 3], flush=False)
        disk.tier.discard(names_of(disk.tier.index.find(*named(LONG))))
        assert disk.say(LONG, flush=False)
        may_write.set()
        assert disk.tier.flush(WAIT_SECONDS)
        assert disk.recall(LONG)[0] == LONG


def test_what_is_discarded_while_the_folder_is_looked_through_goes(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start, when the disk thread compares files and index: a file that is to go is not taken in again."""
    is_looking, may_look, real = threading.Event(), threading.Event(), FolderStore.sweep

    def sweep(self: FolderStore) -> None:
        if threading.current_thread().name == "kvserve-disk":
            is_looking.set()
            assert may_look.wait(WAIT_SECONDS)
        real(self)

    monkeypatch.setattr(FolderStore, "sweep", sweep)
    with Disk(full) as disk:
        assert is_looking.wait(WAIT_SECONDS)
        disk.tier.discard(disk.tier.index.exclusive(*named(LATER)))
        may_look.set()
        assert disk.tier.flush(WAIT_SECONDS)
        assert disk.recall(LATER)[0] == LONG and disk.faults == {}
    with Disk(full) as disk:
        assert disk.recall(LATER)[0] == LONG and disk.recall(BRANCH)[0] == BRANCH


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    """Everything that was put is there for the next run."""
    with Disk(tmp_path) as disk:
        for number in range(20):
            disk.say([number, *LONG], flush=False)
    with Disk(tmp_path) as disk:
        assert all(disk.recall([number, *LONG])[0] == [number, *LONG] for number in range(20))


RECORDS = "records-1/records.sqlite"


def test_other_files_that_count_take_room_from_the_blobs(tmp_path: Path) -> None:
    """One cap over all of it: what they take is no room for blobs, also when they grow."""
    (tmp_path / RECORDS).parent.mkdir()
    (tmp_path / RECORDS).write_bytes(bytes(3000))
    (tmp_path / "weights").write_bytes(bytes(10**6))
    with Disk(tmp_path) as disk:
        disk.say([0, *range(50)])
        size = disk.tier.stats().total_bytes
    limits = replace(ROOMY, max_bytes=3000 + 3 * size + size // 2)
    with Disk(tmp_path, limits, beside=("records-*/records.sqlite*",)) as disk:
        for number in range(6):
            disk.say([number, *range(50)])
            assert len(disk.files()) <= 3
        assert len(disk.files()) == 3 and disk.tier.stats().num_evicted == 3
        (tmp_path / RECORDS).write_bytes(bytes(3000 + 2 * size))
        look(disk)
        assert len(disk.files()) == 1 and disk.recall([5, *range(50)])[0] == [5, *range(50)]


# --- the scratch file -----------------------------------------------------------------------------------------------


def test_a_scratch_file_has_no_name_and_leaves_nothing(tmp_path: Path) -> None:
    """The same contract; nothing of it can be seen in the folder, during and after."""
    with Disk(tmp_path, is_scratch=True) as disk:
        disk.say(LONG, states=(20,))
        disk.say(BRANCH)
        assert disk.recall(LONG) == (LONG, [20]) and disk.recall(BRANCH)[0] == BRANCH
        assert list(tmp_path.iterdir()) == []
        assert disk.tier.clear() and disk.recall(LONG) == ([], [])
    with Disk(tmp_path, is_scratch=True) as disk:
        assert disk.recall(LONG) == ([], [])


def test_a_scratch_file_keeps_its_cap(tmp_path: Path) -> None:
    """The oldest leaves, its room is used again, and the file does not grow."""
    with Disk(tmp_path, is_scratch=True) as disk:
        disk.say(LONG)
        cap = 3 * disk.tier.stats().total_bytes
    with Disk(tmp_path, replace(ROOMY, max_bytes=cap), is_scratch=True) as disk:
        for number in range(12):
            disk.say([number, *LONG[1:]])
            assert disk.store._end <= cap  # type: ignore[attr-defined]
        assert disk.recall([11, *LONG[1:]])[0] == [11, *LONG[1:]]


def test_what_could_not_be_written_in_time_is_not_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends with the write it is at: another model is loaded by then, and what its users ask to be forgotten
    may wait in the queue of this one."""
    is_writing, may_write = hold_writes(monkeypatch)
    with Disk(tmp_path) as disk:
        disk.say(LONG, flush=False)
        wait_until(is_writing.is_set)
        disk.say([1, 2, 3], flush=False)
        assert not disk.tier.close(0.0)
        assert disk.tier.stats().num_queued_bytes == len(LONG) * 4
        may_write.set()
        wait_until(lambda: not disk.tier._thread.is_alive())
    with Disk(tmp_path) as disk:
        assert disk.recall(LONG)[0] == LONG and disk.recall([1, 2, 3])[0] == []
