"""Rank 0's side of the seam: it decides, and tells the others what. Belongs to the engine thread. No arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from kvserve.core.rank_place import RankPlace
from kvserve.engine.ranks.decisions import Decision, request_wire
from kvserve.engine.ranks.place import Ranks, RanksLost
from kvserve.engine.ranks.rank_link import Progress, RankLink
from kvserve.engine.rows import Row

_BACKENDS = ("[ring]", "[jaccl]", "[nccl]", "[mpi]", "[distributed]")
"""How MLX's errors begin where another rank does not answer."""


def raise_if_lost(error: Exception) -> None:
    """Raises RanksLost for an error that no row can be blamed for: a collective has failed."""
    text = str(error)
    if text.startswith(_BACKENDS):
        raise RanksLost(f"another rank does not compute any more ({text[:200]})") from error


def be_level(place: RankPlace | None, level: Callable[[], bool]) -> None:
    """Raises RanksLost where ranks are not level behind a failure: one that left a pass early would meet the others'
    collectives of that pass with its next ones, and every sum from there on would be wrong without an error."""
    try:
        is_level = level()
    except Exception as error:  # whatever it is, nobody knows where the others are
        raise RanksLost(f"{place}: a collective failed behind an error ({error})") from error
    if not is_level:
        raise RanksLost(f"{place} is out of step behind an error")


class LeadingRanks(Ranks):
    """The one that the others follow, by `links`, one to each."""

    def __init__(
        self,
        place: RankPlace,
        links: Sequence[RankLink],
        progress: Progress,
        agree: Callable[[Any], Any],
        level: Callable[[], bool],
    ) -> None:
        """`agree(ids)` gives the followers the ids of a decode pass, within its graph. `level()` is a collective of
        its own: whether all ranks are there, with nothing of a pass before it."""
        self.place = place
        self._links = links
        self._progress = progress
        self._agree = agree
        self._level = level
        self._serials = count(1)

    def decided[T](self, what: Decision[T], find: Callable[[], T]) -> T:
        value = find()
        self._send(what.name, what.written(value))
        return value

    def each[T](self, what: Decision[T], find: Callable[[], Iterable[T]]) -> Iterator[T]:
        for value in find():
            self._send(what.name, what.written(value))
            yield value
        self._send(what.name, None)

    def together[T](self, work: Callable[[], T]) -> T:
        self._progress.begin()
        try:
            result = work()
        except Exception as error:
            raise_if_lost(error)
            self._send("outcome", [isinstance(error, MemoryError), str(error)])
            be_level(self.place, self._level)
            raise
        finally:
            self._progress.end()
        self._send("outcome", None)
        return result

    def gathered(self, name: str, value: Any) -> list[Any]:
        values = [value, *(link.expect(name) for link in self._links)]
        self._send(name, values)
        return values

    def called(self, name: str, value: Any, is_meant: Callable[[str], bool]) -> list[Any]:
        self._send("call", [name, value])
        return [_answer_of(link, is_meant) for link in self._links]

    def add(self, row: Row) -> None:
        row.serial = next(self._serials)
        self._send("add", request_wire(row))

    def begin_tick(self) -> None:
        self._send("tick", None)

    def tell(self, name: str) -> None:
        self._send(name, None)

    def agreed_ids(self, ids: Any) -> Any:
        return self._agree(ids)

    def told(self) -> Mapping[int, Mapping[str, int]]:
        return {link.peer: link.told for link in self._links}

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _send(self, name: str, value: Any) -> None:
        for link in self._links:
            link.send(name, value)


def _answer_of(link: RankLink, is_meant: Callable[[str], bool]) -> Any:
    """What a follower answers to a call; until then it asks which of the owners that it knows are meant."""
    while (frame := link.next()) is not None:
        name, value = frame
        if name != "whose":
            break
        link.send("meant", is_meant(value))
    if frame is None or frame[0] != "done":
        raise RanksLost(f"rank {link.peer} is out of step: done was awaited, {frame and frame[0]} came")
    return frame[1]
