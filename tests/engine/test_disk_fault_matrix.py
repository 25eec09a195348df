"""Whatever can be wrong with KV on disk, one after the other under a real engine: the right answer, counted, told once,
and the server goes on."""

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvserve.cache import disk_store
from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_store import INDEX_NAME, FolderStore
from kvserve.core import TokenSequence
from kvserve.engine.worker import Engine
from kvserve.observe.reports import num_disk_faults
from tests.engine.engines import TAIL_TOKENS, assert_exact, cached, generate, prompt_of, running_engine, turn
from tests.engine.test_disk_cache import disk_of, on, settle, usable
from tests.laws import sampled

FAMILY = "qwen3_5"
"""Rows and states: a blob of either kind may be the one that is broken."""

BASE, OTHER = prompt_of(208), prompt_of(104, 9)
USABLE = usable(len(BASE), "qwen3_5")

type Break = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A folder that an engine has left, and what it answered."""
    folder = tmp_path_factory.mktemp("written")
    with running_engine(FAMILY, disk=on(folder)) as engine:
        [result] = generate(engine, turn(BASE, 8))
    return folder, result.tokens


@pytest.fixture
def folder(tmp_path: Path, written: tuple[Path, tuple[int, ...]]) -> Iterator[Path]:
    shutil.copytree(written[0], tmp_path / "kv")
    yield tmp_path / "kv"


def blobs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def truncated(folder: Path, _: pytest.MonkeyPatch) -> None:
    for path in blobs(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped_bit(folder: Path, _: pytest.MonkeyPatch) -> None:
    for path in blobs(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)


def wrong_version(folder: Path, _: pytest.MonkeyPatch) -> None:
    """Whole files with a right checksum, of a format that is not ours."""
    for path in blobs(folder):
        content = path.read_bytes()[:-32]
        other = content.replace(b'"format":"kvserve blob 2"', b'"format":"kvserve blob 0"')
        assert other != content
        path.write_bytes(other + hashlib.sha256(other).digest())


def missing_blobs(folder: Path, _: pytest.MonkeyPatch) -> None:
    for path in blobs(folder):
        path.unlink()


def missing_index(folder: Path, _: pytest.MonkeyPatch) -> None:
    for path in folder.glob(f"{INDEX_NAME}*"):
        path.unlink()


def damaged_index(folder: Path, patch: pytest.MonkeyPatch) -> None:
    missing_index(folder, patch)
    (folder / INDEX_NAME).write_bytes(b"rubbish" * 5000)


def old_index(folder: Path, _: pytest.MonkeyPatch) -> None:
    db = sqlite3.connect(folder / INDEX_NAME)
    db.execute("PRAGMA user_version=99")
    db.close()


def locked_index(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Somebody holds it for as long as the engine runs."""
    patch.setattr("kvserve.cache.disk_catalog.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(folder / INDEX_NAME, isolation_level=None)
    holder.execute("PRAGMA journal_mode=DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    HELD.append(holder)


HELD: list[sqlite3.Connection] = []


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    while HELD:
        HELD.pop().close()


def refusing(method: str, number: int) -> Break:
    def refuse(_: Path, patch: pytest.MonkeyPatch) -> None:
        def fail(self: FolderStore, name: BlobName, *_: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(FolderStore, method, fail)

    return refuse


def raising_at_read(_: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    patch.setattr(FolderStore, "read", fail)


def of_another_user(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk_store, "os", SimpleNamespace(**(vars(os) | {"getuid": lambda: os.getuid() + 1})))


FAULTS: dict[str, tuple[Break, str | None, int]] = {
    "truncated": (truncated, "damaged", 0),
    "flipped bit": (flipped_bit, "damaged", 0),
    "wrong version": (wrong_version, "damaged", 0),
    "missing blobs": (missing_blobs, "missing", 0),
    "missing index": (missing_index, "index", USABLE),
    "damaged index": (damaged_index, "index", USABLE),
    "index of another version": (old_index, "index", USABLE),
    "locked index": (locked_index, "index", USABLE),
    "unreadable disk": (refusing("read", errno.EIO), "unreadable", 0),
    "no memory to read": (raising_at_read, "unwritable", 0),
    "read-only disk": (refusing("write", errno.EROFS), "unwritable", USABLE),
    "full disk": (refusing("write", errno.ENOSPC), "full", USABLE),
    "folder of another user": (of_another_user, None, 0),
}
"""What is wrong, how it is counted (None: there is no disk), and how much of the prompt is found all the same."""

IN_EVERY_RUN = ("flipped bit", "missing blobs", "damaged index", "locked index", "unreadable disk", "full disk")
"""One of each way to count a fault, but for a disk that takes nothing, which a full one is too."""


@pytest.mark.parametrize("fault", sampled(FAULTS, IN_EVERY_RUN))
def test_no_fault_is_more_than_a_miss(
    fault: str, folder: Path, written: tuple[Path, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known prompt has the same answer, another one is answered, the fault is counted and stands in one line."""
    break_it, kind, num_found = FAULTS[fault]
    lines: list[str] = []
    with monkeypatch.context() as patch:
        break_it(folder, patch)
        with running_engine(FAMILY, disk=on(folder), report=lines.append) as engine:
            [again] = generate(engine, turn(BASE, 8))
            assert_exact(again, written[1])
            assert cached(again) == num_found
            [other] = generate(engine, turn(OTHER, 8))
            assert len(other.tokens) == 8 and engine.status.state == "ready"
            if kind is not None:
                settle(engine)  # what cannot be written is found out by the thread that writes
            report = engine.cache_report()
            assert num_disk_faults(report) >= 1
            if kind is None:  # neither KV nor what weights and caches are can be kept, each told once
                told = [" ".join(line.split()[:3]) for line in sorted(lines)]
                assert report.disk is None and told == ["KV is not", "What the caches", "What the weights"], lines
                assert all("another user" in line for line in lines)
            else:
                assert len(lines) == 1, lines
                assert set(disk_of(engine).stats.faults) == {kind}
            assert engine.kept_tokens(TokenSequence((*OTHER, 1)))[0] >= len(OTHER) - TAIL_TOKENS, (
                "RAM keeps it in any case"
            )


def test_without_a_fault_nothing_is_counted(folder: Path, written: tuple[Path, tuple[int, ...]]) -> None:
    """The control: the folder as it was left is read, and nobody complains."""
    lines: list[str] = []
    with running_engine(FAMILY, disk=on(folder), report=lines.append) as engine:
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, written[1])
        assert (cached(again), num_disk_faults(engine.cache_report()), lines) == (USABLE, 0, [])


def test_two_servers_on_one_folder(tmp_path: Path) -> None:
    """Both write and read; what one deletes under the other is a miss that is counted, and written again."""
    lines: list[str] = []
    with (
        running_engine(FAMILY, disk=on(tmp_path), report=lines.append) as one,
        running_engine(FAMILY, disk=on(tmp_path)) as two,
    ):
        [first] = generate(one, turn(BASE, 8))
        settle(one)
        found_by(two)
        [second] = generate(two, turn(BASE, 8))
        assert_exact(second, first.tokens)
        assert cached(second) == USABLE
        two.clear_cache()
        one._ask(lambda scheduler: scheduler.cache.clear())  # its RAM only: it still believes in the disk
        [again] = generate(one, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) == 0 and disk_of(one).stats.faults["missing"] >= 1 and len(lines) == 1
        settle(one)
        found_by(two)
        [third] = generate(two, turn(BASE, 8))
        assert_exact(third, first.tokens)
        assert cached(third) == USABLE


def found_by(engine: Engine) -> None:
    """Let this server look for what others wrote."""

    def look(scheduler: object) -> None:
        tier = scheduler.cache._disk.tier  # type: ignore[attr-defined]
        tier._order(tier._reconcile, 60.0)

    engine._ask(look)
