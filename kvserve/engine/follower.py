"""A follower's engine between two ticks: it does what rank 0 begins, and in the pauses what concerns only what it
keeps. Belongs to the engine thread.
"""

import time
from collections.abc import Callable
from typing import Any

from kvserve.core import TokenSequence
from kvserve.engine.ranks.decisions import request_of
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.token_dispatcher import Delivery

REST_SECONDS = 0.2
"""How long a follower waits for rank 0 before it looks at what it has to do by itself."""


def follow(
    scheduler: Scheduler,
    ranks: FollowingRanks,
    until: str,
    between: Callable[[Scheduler], None] = lambda _: None,
    sweep_seconds: float = 30.0,
) -> None:
    """Do what rank 0 begins until it is at `until`. `between` is called in the pauses. Raises RanksLost."""
    swept_at = time.monotonic()
    between(scheduler)
    while True:
        if (frame := ranks.next_frame(0.0)) is None:
            between(scheduler)
            is_busy = scheduler.is_idle and scheduler.do_idle_work()
            frame = ranks.next_frame(0.0 if is_busy else REST_SECONDS)
        if time.monotonic() - swept_at > sweep_seconds:
            scheduler.sweep()
            swept_at = time.monotonic()
        match frame:
            case None:
                continue
            case (name, _) if name == until:
                return
            case ("add", wire):
                scheduler.add(_row_of(wire))
            case ("tick", _):
                scheduler.tick()
            case ("call", [name, value]):
                ranks.link.send("done", _CALLS[name](scheduler, ranks, value))
            case (name, _):
                raise RanksLost(f"{ranks.place} is out of step: {name} came between two ticks")


def _row_of(wire: Any) -> Row:
    """A row that no client of this process asked for."""
    row = Row(RequestHandle(request_of(wire), _to_nobody), lambda: None, is_forgotten=wire["is_forgotten"])
    row.serial = wire["serial"]
    return row


def _to_nobody(deliver: Delivery, *, may_wait: bool) -> None:
    """Rank 0 has the client."""


def _clear(scheduler: Scheduler, _ranks: FollowingRanks, _value: Any) -> None:
    scheduler.upkeep.clear()


def _discard(scheduler: Scheduler, ranks: FollowingRanks, ids: list[int]) -> None:
    scheduler.upkeep.discard(TokenSequence(tuple(ids)), ranks.is_meant)


def _forget(scheduler: Scheduler, ranks: FollowingRanks, _value: Any) -> list[Any]:
    """Bytes in RAM, bytes on disk, and whether all of it is gone."""
    gone = scheduler.forget(ranks.is_meant)
    others = scheduler.cache.forget_of_others(ranks.is_meant)
    is_done = gone.is_done and others.is_done
    return [gone.num_ram_bytes, gone.num_disk_bytes + others.num_bytes, is_done]


_CALLS: dict[str, Callable[[Scheduler, FollowingRanks, Any], Any]] = {
    "clear": _clear,
    "discard": _discard,
    "forget": _forget,
}
