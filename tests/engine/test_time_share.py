"""Seconds come in at a rate, are saved up within bounds, and are spent."""

import pytest

from kvserve.engine.warming import WINDOW_SECONDS, TimeShare


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_spent_comes_back_at_the_rate() -> None:
    """An account that is overdrawn by ten seconds at a share of a quarter is due in forty."""
    clock = Clock()
    share = TimeShare(0.25, clock)
    share.spend(0.25 * WINDOW_SECONDS + 10)
    assert share.seconds_until_due() == pytest.approx(40)
    clock.now += 39
    assert share.seconds_until_due() == pytest.approx(1)
    clock.now += 2
    assert share.seconds_until_due() == 0


def test_a_night_is_not_saved_up() -> None:
    """The account holds as much as at the start, not more."""
    clock = Clock()
    share = TimeShare(0.5, clock)
    clock.now += 100_000
    share.spend(0.5 * WINDOW_SECONDS + 1)
    assert share.seconds_until_due() > 0


@pytest.mark.parametrize(("rate", "is_open"), [(0.0, False), (0.1, True), (1.0, True)])
def test_a_share_of_nothing_is_never_due(rate: float, is_open: bool) -> None:
    """Without a share no time would ever do."""
    share = TimeShare(rate, Clock())
    assert share.is_open is is_open
    assert (share.seconds_until_due() == 0) is is_open
