"""The child's output on disk and in memory."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.proxy.litellm import ChildLog


def test_the_file_stays_bounded(tmp_path: Path) -> None:
    """The current file and the one before never exceed the limit by more than a chunk, and the newest line is there."""
    path = tmp_path / "log"
    log = ChildLog(path, 1000)
    for number in range(500):
        log.write(f"line {number}\n".encode())
    assert path.stat().st_size <= 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    assert path.read_text().endswith("line 499\n")
    assert path.stat().st_mode & 0o077 == 0


def test_a_former_runs_file_counts(tmp_path: Path) -> None:
    """A file that is full already is set aside first."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    ChildLog(path, 1000).write(b"new\n")
    assert path.read_bytes() == b"new\n"


@given(cuts=st.lists(st.integers(0, 30)))
def test_the_tail_does_not_depend_on_the_cuts(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """Lines are whole however the output was cut; blank ones do not count."""
    text = b"one\n\ntwo\n   \nthree\nunfinished"
    log = ChildLog(tmp_path_factory.mktemp("tail") / "log", 10_000)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        log.write(text[start:end])
    assert log.tail(3) == ["two", "three", "unfinished"]
    log.forget()
    assert log.tail(3) == []


def test_a_file_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    """The tail says so and goes on."""
    log = ChildLog(tmp_path / "gone" / "log", 1000)
    log.write(b"last words\n")
    assert log.tail(5)[0] == "last words"
    assert "cannot be written" in log.tail(5)[1]
