"""A follower's side of the seam: it asks nobody, it reads what rank 0 has decided. Belongs to the engine thread. No
arrays.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvserve.core.rank_place import RankPlace
from kvserve.engine.ranks.decisions import Decision
from kvserve.engine.ranks.leading import be_level, raise_if_lost
from kvserve.engine.ranks.place import Ranks, RanksLost
from kvserve.engine.ranks.rank_link import Frame, Progress, RankLink
from kvserve.engine.rows import Row


class _LeaderFailed(RanksLost):
    """Rank 0's work raised before it came to the decision that this rank awaits. Ends in `together`; anywhere else
    this rank does another thing than rank 0."""

    def __init__(self, outcome: Any) -> None:
        super().__init__("rank 0 failed in work that this rank was not in")
        self.outcome = outcome


class FollowingRanks(Ranks):
    """One of those that follow rank 0, by `link`."""

    def __init__(
        self,
        place: RankPlace,
        link: RankLink,
        progress: Progress,
        agree: Callable[[Any], Any],
        level: Callable[[], bool],
    ) -> None:
        """`agree(ids)` gives rank 0's ids of a decode pass, within its graph. `level`: as `LeadingRanks` has it."""
        self.place = place
        self.link = link
        self._progress = progress
        self._agree = agree
        self._level = level
        self._rows: dict[int, Row] = {}

    def decided[T](self, what: Decision[T], find: Callable[[], T]) -> T:
        return what.read(self._next(what.name), self._row)

    def each[T](self, what: Decision[T], find: Callable[[], Iterable[T]]) -> Iterator[T]:
        while (wire := self._next(what.name)) is not None:
            yield what.read(wire, self._row)

    def together[T](self, work: Callable[[], T]) -> T:
        self._progress.begin()
        try:
            result, outcome = self._followed(work)
            if outcome is not None:
                be_level(self.place, self._level)
        finally:
            self._progress.end()
        if outcome is not None:
            raise _as_error(outcome)
        return result  # type: ignore[return-value]  # work has succeeded where rank 0's has

    def _followed[T](self, work: Callable[[], T]) -> tuple[T | None, Any]:
        """What it gives here, and what failed on rank 0, if anything. Raises RanksLost."""
        try:
            return work(), self.link.expect("outcome")
        except _LeaderFailed as failed:
            return None, failed.outcome
        except Exception as error:
            raise_if_lost(error)
            if (outcome := self.link.expect("outcome")) is None:
                raise RanksLost(f"{self.place} failed alone: {type(error).__name__}: {error}") from error
            return None, outcome

    def gathered(self, name: str, value: Any) -> list[Any]:
        self.link.send(name, value)
        values: list[Any] = self._next(name)
        return values

    def add(self, row: Row) -> None:
        self._rows = {serial: each for serial, each in self._rows.items() if not each.is_over}
        self._rows[row.serial] = row

    def agreed_ids(self, ids: Any) -> Any:
        return self._agree(ids)

    def named(self, fingerprint: str) -> None:
        self.link.send("named", fingerprint)

    def close(self) -> None:
        self.link.close()

    def next_frame(self, timeout_seconds: float) -> Frame | None:
        """What rank 0 begins, between two ticks; None where it begins nothing."""
        return self.link.next(timeout_seconds)

    def is_meant(self, owner: str) -> bool:
        """Whether rank 0 means this owner; within a call."""
        self.link.send("whose", owner)
        return bool(self.link.expect("meant"))

    def _next(self, name: str) -> Any:
        frame = self.link.next()
        if frame is not None and frame[0] == "outcome":
            raise _LeaderFailed(frame[1])
        if frame is None or frame[0] != name:
            raise RanksLost(f"{self.place} is out of step: {name} was awaited, {frame and frame[0]} came")
        return frame[1]

    def _row(self, serial: int) -> Row:
        if (row := self._rows.get(serial)) is None:
            raise RanksLost(f"{self.place} is out of step: it has no row {serial}")
        return row


def _as_error(outcome: Any) -> Exception:
    is_memory, text = outcome
    return MemoryError(text) if is_memory else RuntimeError(text)
