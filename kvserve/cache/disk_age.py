"""The age of KV on disk: the time that passed, whatever the machine's clock was set to meanwhile. No file."""

import time
from dataclasses import dataclass

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts while the machine sleeps: Linux has a clock of its own for that, macOS includes it in the usual one."""


def seconds_since_boot() -> float:
    """Seconds since the machine was started; unlike the machine's clock it cannot be set."""
    return time.clock_gettime(_BOOT_CLOCK)


@dataclass(frozen=True, slots=True)
class Tick:
    """A moment as a server saw it: its `age` (the machine's clock when the catalog was created, plus all seconds that
    passed since), the machine's clock, and the seconds since the machine's start."""

    age: float
    wall: float
    boot: float

    def seconds_to(self, wall: float, boot: float, max_unknown_seconds: float) -> float:
        """How much time passed until then, as far as is known.

        Within one run of the machine both clocks count, and the smaller figure is right: the other clock was set, or
        the machine was restarted. After a certain restart only the machine's clock is left, which may have been set: at
        most `max_unknown_seconds` of it count.
        """
        seconds = max(0.0, wall - self.wall)
        return min(seconds, boot - self.boot if boot >= self.boot else max_unknown_seconds)


class AgeClock:
    """The time by which everything on disk is dated. It never goes back while a server runs."""

    def __init__(self, max_unknown_seconds: float) -> None:
        self._max_unknown_seconds = max_unknown_seconds
        self._tick = Tick(time.time(), time.time(), seconds_since_boot())
        self._has_catalog = False

    def now(self) -> float:
        """The age now; it grows with the time since the machine's start."""
        return self._tick.age + max(0.0, seconds_since_boot() - self._tick.boot)

    def tick(self, kept: Tick | None) -> Tick:
        """The moment to write into the catalog now, which has `kept`: a new server continues from it, and of several
        servers each follows the one with the highest age."""
        wall, boot = time.time(), seconds_since_boot()
        age = self.now()
        if kept is not None:
            at_least = kept.age + kept.seconds_to(wall, boot, self._max_unknown_seconds)
            age = max(age, kept.age) if self._has_catalog else at_least
        self._has_catalog = True
        self._tick = Tick(age, wall, boot)
        return self._tick

    def of_file(self, written_at: float) -> float:
        """When a file without a row was written. Its own time may be of another setting of the clock, so at most half
        of the age limit is believed."""
        age = self.now()
        return age - min(max(0.0, time.time() - written_at), self._max_unknown_seconds)
