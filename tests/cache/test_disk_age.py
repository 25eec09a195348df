"""How old KV on disk is does not depend on what the machine's clock is set to."""

import contextlib
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cache.disks import OTHER, ROOMY, WAIT_SECONDS, Disk

LONG = list(range(100, 140))
HOUR = 3600.0
DAY = replace(ROOMY, ttl_seconds=24 * HOUR)


class Clocks:
    """The machine's clock and the time since it was started, as they are set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.boot = 1.8e9, 50_000.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr("kvserve.cache.disk_age.seconds_since_boot", lambda: self.boot, raising=False)

    def leap(self, hours: float) -> None:
        """Somebody sets the clock."""
        self.wall += hours * HOUR

    def pass_(self, hours: float) -> None:
        """Time goes by."""
        self.wall += hours * HOUR
        self.boot += hours * HOUR

    def reboot(self, hours: float) -> None:
        """The machine is off for so long."""
        self.wall += hours * HOUR
        self.boot = 10.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def look(disk: Disk) -> None:
    """The folder is reconciled twice: the second time shows what the first has left."""
    for _ in range(2):
        assert disk.tier._order(disk.tier.worker.account.reconcile, WAIT_SECONDS)


@pytest.mark.parametrize("hours", [48, -48])
def test_a_clock_that_leaps_deletes_nothing(tmp_path: Path, clocks: Clocks, hours: float) -> None:
    """There and back, with a look at each place, in one run and over a restart at each of them."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG, states=(20,))
        for leap in (hours, -hours):
            clocks.leap(leap)
            look(disk)
            assert disk.recall(LONG) == (LONG, [20])
    for leap in (hours, -hours):
        clocks.leap(leap)
        with Disk(tmp_path, DAY) as disk:
            look(disk)
            assert disk.recall(LONG) == (LONG, [20])
            disk.say([leap > 0, *LONG])  # what is written under a wrong clock is as young as the rest
    with Disk(tmp_path, DAY) as disk:
        look(disk)
        assert all(disk.recall([each, *LONG])[0] == [each, *LONG] for each in (0, 1))


def test_a_neighbour_that_starts_under_another_clock_deletes_nothing(tmp_path: Path, clocks: Clocks) -> None:
    """It finds in the catalog when somebody was last there."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
        look(disk)
        clocks.leap(48)
        with Disk(tmp_path, DAY, model=OTHER) as other:
            look(other)
            clocks.leap(-48)
            look(other)
        look(disk)
        assert disk.recall(LONG)[0] == LONG


def test_without_a_row_a_file_is_not_old_at_once(tmp_path: Path, clocks: Clocks) -> None:
    """After a leap a file's own time says nothing: what no row names, as after a crash, begins to age anew."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    clocks.wall = time_of_files(tmp_path) + 48 * HOUR
    with Disk(tmp_path, DAY) as disk:
        look(disk)
        assert disk.recall(LONG)[0] == LONG


def time_of_files(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.rglob("*.safetensors"))


def test_what_nobody_used_for_a_day_leaves(tmp_path: Path, clocks: Clocks) -> None:
    """Time that went by counts: in one run, over a restart, and where the clock leapt beside it."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
        clocks.pass_(23)
        look(disk)
        assert disk.recall(LONG)[0] == LONG
        clocks.leap(-48)
        clocks.pass_(1.5)
        look(disk)
        assert disk.files() == []
        disk.say(LONG)
    clocks.pass_(25)
    with Disk(tmp_path, DAY) as disk:
        look(disk)
        assert disk.files() == []


def test_a_machine_that_was_off_counts_half_of_the_limit_at_most(tmp_path: Path, clocks: Clocks) -> None:
    """Nobody knows whether it was off for a week or has another clock now: a second look settles it."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
    clocks.reboot(168)
    with Disk(tmp_path, DAY) as disk:
        look(disk)
        assert disk.recall(LONG)[0] == LONG
        clocks.pass_(13)
        look(disk)
        assert disk.files() == []


def test_what_is_used_stays_as_young_as_it_is_used(tmp_path: Path, clocks: Clocks) -> None:
    """After a leap too the order is that of use."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
        disk.say([1, 2, 3])
        clocks.leap(-48)
        for _ in range(3):
            clocks.pass_(10)
            disk.tier.note_restored([step.segment for step in disk.found(LONG).steps], len(LONG))
            assert disk.tier.flush(WAIT_SECONDS)
            look(disk)
        assert disk.recall(LONG)[0] == LONG and disk.recall([1, 2, 3])[0] == []


def test_books_of_before_are_no_older_for_a_clock_that_leapt(tmp_path: Path, clocks: Clocks) -> None:
    """Nothing says of when they are but the uses in them: the machine's clock is believed for half of the limit."""
    with Disk(tmp_path, DAY) as disk:
        disk.say(LONG)
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
        db.execute("DROP TABLE clock")
    clocks.leap(48)
    with Disk(tmp_path, DAY) as disk:
        look(disk)
        assert disk.recall(LONG)[0] == LONG
        clocks.pass_(13)
        look(disk)
        assert disk.recall(LONG)[0] == [], "twelve hours were believed, and thirteen went by"
