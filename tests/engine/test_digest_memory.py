"""What is remembered of files: digests by what shows a change, no names; whatever happens to it, never a wrong one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.engine import file_digest
from kvserve.engine.file_digest import REFRESH_SECONDS, UNUSED_SECONDS, DigestMemory
from kvserve.engine.model_files import MEMORY_FILE, FileStamp
from tests.laws import num_examples

STAMP = FileStamp(1, 2, 3, 1_795_518_236_420_521_416, 1_795_518_236_451_315_595)
DIGEST = bytes(range(32))


def memory(folder: Path, now: float = 1e9) -> DigestMemory:
    return DigestMemory(folder, pytest.fail, pytest.fail, lambda: now)


def test_what_was_read_is_found_again(tmp_path: Path) -> None:
    """By all five of its numbers, also by another process; what was not remembered is not found."""
    memory(tmp_path / "new").remember({STAMP: DIGEST})
    others = [replace(STAMP, **{name: 9}) for name in ("device", "inode", "num_bytes", "mtime_ns", "ctime_ns")]
    assert memory(tmp_path / "new").find([STAMP, *others]) == {STAMP: DIGEST}
    assert memory(tmp_path / "none").find([STAMP]) == {}


def test_it_holds_numbers_and_digests_only(tmp_path: Path) -> None:
    """For its owner's eyes; no name of a file or a model."""
    memory(tmp_path).remember({STAMP: DIGEST})
    path = tmp_path / MEMORY_FILE
    held = json.loads(path.read_text())
    assert held["files"] == [[1, 2, 3, STAMP.mtime_ns, STAMP.ctime_ns, DIGEST.hex(), 1e9]]
    assert set(held) == {"format", "check", "files"} and path.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == [MEMORY_FILE]


@settings(max_examples=num_examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_no_damage_makes_it_say_something_else(tmp_path: Path, place: float, flip: int, cut: bool) -> None:
    """Any byte changed, or the end cut off: what was remembered, or nothing; and then it is written anew."""
    memory(tmp_path).remember({STAMP: DIGEST, replace(STAMP, inode=7): bytes(32)})
    path = tmp_path / MEMORY_FILE
    held = bytearray(path.read_bytes())
    at = int(place * len(held))
    held[at] ^= flip
    path.write_bytes(held[:at] if cut else held)
    assert memory(tmp_path).find([STAMP]) in ({}, {STAMP: DIGEST})
    memory(tmp_path).remember({STAMP: DIGEST})
    assert memory(tmp_path).find([STAMP]) == {STAMP: DIGEST}


def test_what_is_not_used_for_long_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is found now and then stays; of too many the least recently used go."""
    used, unused = STAMP, replace(STAMP, inode=7)
    memory(tmp_path, 0).remember({used: DIGEST, unused: DIGEST})
    assert memory(tmp_path, 2 * REFRESH_SECONDS).find([used]) == {used: DIGEST}
    late = UNUSED_SECONDS + REFRESH_SECONDS
    memory(tmp_path, late).remember({replace(STAMP, inode=8): DIGEST})
    assert memory(tmp_path, late).find([used, unused]) == {used: DIGEST}
    monkeypatch.setattr(file_digest, "MAX_ENTRIES", 1)
    memory(tmp_path, late + 1).remember({unused: DIGEST})
    assert memory(tmp_path, late + 1).find([used, unused]) == {unused: DIGEST}


def test_a_place_that_cannot_be_written_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered, and nobody is kept from anything."""

    def full(_descriptor: int) -> None:
        raise OSError("no space left")

    lines: list[str] = []
    monkeypatch.setattr(file_digest.os, "fsync", full)
    DigestMemory(tmp_path, lines.append, pytest.fail).remember({STAMP: DIGEST})
    assert len(lines) == 1 and "no space left" in lines[0] and list(tmp_path.iterdir()) == []


def test_what_earlier_releases_left_is_told_of_once(tmp_path: Path) -> None:
    """Blobs and records under names of before are set aside; an empty folder has nothing to tell of."""
    lines: list[str] = []
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / ("0" * 32)).mkdir()
    for _ in range(2):
        DigestMemory(tmp_path / "new", pytest.fail, pytest.fail).remember({STAMP: DIGEST})
        DigestMemory(tmp_path / "old", pytest.fail, lines.append).remember({STAMP: DIGEST})
    assert len(lines) == 1 and str(tmp_path / "old") in lines[0]
