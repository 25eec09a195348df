"""The seam between an engine and the other ranks that compute the same model: each decision that steers which pass
comes next, or what is in it, goes through it. This base is an engine that computes alone, and asks nobody. No arrays.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvserve.core.rank_place import LayerSpan, RankPlace
from kvserve.engine.ranks.decisions import Decision
from kvserve.engine.rows import Row


class RanksLost(BaseException):
    """The ranks do not compute together any more: one is gone, stuck, or does another thing than rank 0. So the group
    ends.

    No `except Exception` may take it: no row is to blame, and none can go on."""


class Ranks:
    """An engine that computes alone. Belongs to the engine thread."""

    place: RankPlace | None = None
    span: LayerSpan | None = None
    """Which layers this rank has whole; None: a part of every one."""

    @property
    def salt(self) -> Sequence[str]:
        """In the name of what is kept on disk: the part of a model has no use for another part."""
        return () if self.place is None else (f"{self.place}, {self.span or 'tensor'}",)

    @property
    def is_alone(self) -> bool:
        return self.place is None

    @property
    def is_following(self) -> bool:
        return self.place is not None and not self.place.leads

    def decided[T](self, what: Decision[T], find: Callable[[], T]) -> T:
        """What rank 0 finds; `find` is called nowhere else."""
        return find()

    def each[T](self, what: Decision[T], find: Callable[[], Iterable[T]]) -> Iterator[T]:
        """The same of one after the other; each is dealt with before the next one is found."""
        yield from find()

    def together[T](self, work: Callable[[], T]) -> T:
        """Do what must come out the same everywhere, such as a pass. Raises what it raised on rank 0; RanksLost where
        it failed somewhere else alone."""
        return work()

    def gathered(self, name: str, value: Any) -> list[Any]:
        """What each rank says, by rank; every one hears it."""
        return [value]

    def called(self, name: str, value: Any, is_meant: Callable[[str], bool]) -> list[Any]:
        """Have the followers do something with what they keep, and what each says of it. `is_meant` is asked for owners
        that they know."""
        return []

    def add(self, row: Row) -> None:
        """A row comes to all ranks."""

    def begin_tick(self) -> None:
        """The next decisions are those of one tick."""

    def tell(self, name: str) -> None:
        """Tell the followers where rank 0 is."""

    def agreed_ids(self, ids: Any) -> Any:
        """The ids (rows, 1) that a decode pass takes: rank 0's. Part of its graph."""
        return ids

    def named(self, fingerprint: str) -> None:
        """This rank has loaded what has this fingerprint, and uses its disk."""

    def told(self) -> Mapping[int, Mapping[str, int]]:
        """What each of the followers has said of itself last, by rank. From any thread."""
        return {}

    def close(self) -> None:
        """The end: whoever goes now is not missed. Idempotent."""

    def common_depth(self, own: Callable[[int], int], deepest: int) -> int:
        """The deepest place that all ranks can start a row from. `own(n)`: this rank's deepest of at most n."""
        if self.is_alone:
            return deepest
        depth: int = min(self.gathered("depth", deepest))
        while (least := min(self.gathered("depth", own(depth)))) < depth:
            depth = least
        return depth

    def all_agree(self, name: str, is_so: bool) -> bool:
        """Whether it is so on every rank."""
        return all(self.gathered(name, is_so))


ALONE = Ranks()
