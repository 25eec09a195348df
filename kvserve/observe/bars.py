"""Progress of things that take long: live bars on a terminal, now and then a line elsewhere. It knows counts and times,
not what is being counted.

A line is due when a tenth more is done and five seconds passed, or half a minute without a line. The one thread that a
live bar has is rich's own and lasts as long as a bar is on the screen.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Unit = Literal["tokens", "bytes"]

LINE_FRACTION = 0.1
LINE_SECONDS = 5.0
SILENT_SECONDS = 30.0
MAX_BARS = 256  # beyond it the oldest is forgotten: a caller that never finishes its bars costs no memory


@dataclass(slots=True)
class _Bar:
    title: str
    unit: Unit
    started_seconds: float
    num_first: int
    line_seconds: float | None = None
    line_num_done: int = 0
    task: TaskID | None = None


class Bars:
    """The bars on the screen, by key. Safe from any thread; `update` of a live bar writes nothing itself.

    `monotonic` gives seconds, `write_line` takes a plain line.
    """

    def __init__(self, console: Console, monotonic: Callable[[], float], write_line: Callable[[str], None]) -> None:
        self._monotonic = monotonic
        self._write_line = write_line
        self._is_live = console.is_interactive and not console.is_dumb_terminal
        self._lock = threading.Lock()
        self._bars: dict[str, _Bar] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self, key: str, title: str, unit: Unit, num_done: int = 0) -> None:
        """Note that something began, with `num_done` of it there already. Nothing is shown yet."""
        with self._lock:
            if len(self._bars) >= MAX_BARS:
                self._remove(next(iter(self._bars)))
            self._bars.setdefault(key, _Bar(title, unit, self._monotonic(), num_done))

    def started_seconds_ago(self, key: str) -> float | None:
        """How long ago `start` was called; None for a key that is not there."""
        with self._lock:
            bar = self._bars.get(key)
            return None if bar is None else self._monotonic() - bar.started_seconds

    def is_shown(self, key: str) -> bool:
        """True once `update` was called for this key."""
        with self._lock:
            bar = self._bars.get(key)
            return bar is not None and (bar.task is not None or bar.line_seconds is not None)

    def update(self, key: str, num_done: int, num_total: int | None, seconds_left: float | None = None) -> None:
        """Show how far it is; `num_total` None: nobody knows. `seconds_left`: what is known besides of when it ends.
        Does nothing for a key that was not started."""
        with self._lock:
            bar = self._bars.get(key)
            if bar is None:
                return
            counts = self._counts(bar, num_done, num_total, seconds_left)
            if self._is_live:
                self._draw(bar, counts, num_done, num_total)
                return
            if not self._is_line_due(bar, num_done, num_total):
                return
        self._write_line(f"{bar.title}: {counts}" if counts else bar.title)

    def finish(self, key: str) -> float | None:
        """Take the bar away; returns the seconds since its start if it was shown, else None."""
        with self._lock:
            return self._remove(key)

    def _draw(self, bar: _Bar, counts: str, num_done: int, num_total: int | None) -> None:
        if bar.task is None:
            bar.task = self._progress.add_task(bar.title, total=num_total, completed=num_done, counts=counts)
            self._progress.start()
        else:
            self._progress.update(bar.task, total=num_total, completed=num_done, counts=counts)

    def _remove(self, key: str) -> float | None:
        bar = self._bars.pop(key, None)
        if bar is None:
            return None
        if bar.task is not None:
            self._progress.remove_task(bar.task)
            if not self._progress.tasks:
                self._progress.stop()
        is_shown = bar.task is not None or bar.line_seconds is not None
        return self._monotonic() - bar.started_seconds if is_shown else None

    def _is_line_due(self, bar: _Bar, num_done: int, num_total: int | None) -> bool:
        now = self._monotonic()
        if bar.line_seconds is not None:
            waited = now - bar.line_seconds
            has_moved = num_total is not None and num_done - bar.line_num_done >= LINE_FRACTION * num_total
            if waited < (LINE_SECONDS if has_moved else SILENT_SECONDS):
                return False
        bar.line_seconds, bar.line_num_done = now, num_done
        return True

    def _counts(self, bar: _Bar, num_done: int, num_total: int | None, seconds_left: float | None) -> str:
        if num_total is None:
            return ""
        percent = f"{100 * num_done // num_total if num_total else 100} %"
        if bar.unit == "bytes":
            scale, unit = (1e9, "GB") if num_total >= 1e9 else (1e6, "MB")
            digits = 0 if 10e6 <= num_total < 1e9 else 1
            return f"{num_done / scale:.{digits}f} of {num_total / scale:.{digits}f} {unit} ({percent})"
        seconds = self._monotonic() - bar.started_seconds
        num_computed = num_done - bar.num_first
        rate = num_computed / seconds if seconds > 0 and num_computed > 0 else None
        if seconds_left is None and rate is not None:
            seconds_left = (num_total - num_done) / rate
        speed = f", {rate:,.0f} tok/s" if rate is not None else ""
        left = f", about {seconds_left:,.0f} s left" if seconds_left is not None else ""
        return f"{num_done:,} of {num_total:,} tokens ({percent}){speed}{left}"
