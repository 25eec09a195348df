"""What tests of the engine may ask for."""

import pytest

from kvserve.engine import decode as decode_module


class OneTick:
    """A clock for which every step takes the same time, whatever the machine is busy with."""

    def __init__(self) -> None:
        self._ticks = 0

    def perf_counter(self) -> float:
        self._ticks += 1
        return self._ticks / 1000


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of any group costs a millisecond."""
    monkeypatch.setattr(decode_module, "time", OneTick())
