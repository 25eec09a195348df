"""What was written of late."""

import pytest

from kvserve.cache import disk_wear
from kvserve.cache.disk_wear import DAY_SECONDS, Wear


def test_a_day_later_it_is_no_longer_of_the_last_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes leave the figure a day after they were written, to a quarter of an hour, and stay in the sum."""
    now = 10 * DAY_SECONDS
    monkeypatch.setattr(disk_wear, "seconds_since_boot", lambda: now)
    wear = Wear()
    seen = []
    for hours, num_bytes in ((0, 100), (1, 10), (22.5, 1), (0.5, 0), (0.5, 0), (0.5, 0), (30, 0)):
        now += hours * 3600
        if num_bytes:
            wear.add(num_bytes)
        seen.append(wear.last_day_bytes())
    assert seen == [100, 110, 111, 11, 11, 1, 0] and wear.num_bytes == 111


def test_however_long_a_server_runs_it_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte a minute for a week."""
    now = 0.0
    monkeypatch.setattr(disk_wear, "seconds_since_boot", lambda: now)
    wear = Wear()
    for _ in range(7 * 24 * 60):
        wear.add(1)
        now += 60
    assert wear.num_bytes == 7 * 24 * 60 and 24 * 60 - 15 <= wear.last_day_bytes() <= 24 * 60
    assert len(wear._parts) <= disk_wear.NUM_PARTS + 1
