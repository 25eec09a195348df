"""Forgetting what is kept, here and on the other ranks that compute the model: each keeps its own part. Between two
ticks, on rank 0.
"""

from collections.abc import Callable
from dataclasses import replace

from kvserve.core import TokenSequence
from kvserve.engine.cache_records import ForgottenKv
from kvserve.engine.ranks.place import Ranks
from kvserve.engine.scheduler import Scheduler


def clear(scheduler: Scheduler, ranks: Ranks) -> None:
    """Forget everything that is kept; running rows continue."""
    ranks.called("clear", None, lambda _: True)
    scheduler.upkeep.clear()


def discard(scheduler: Scheduler, ranks: Ranks, tokens: TokenSequence, is_owner: Callable[[str], bool]) -> None:
    """Forget what serves only this conversation and these owners."""
    ranks.called("discard", list(tokens.ids), is_owner)
    scheduler.upkeep.discard(tokens, is_owner)


def forget(scheduler: Scheduler, ranks: Ranks, is_forgotten: Callable[[str], bool]) -> ForgottenKv:
    """Forget what only the requests of these owners used. Bytes are those of all ranks, tokens those of this one."""
    others = ranks.called("forget", None, is_forgotten)
    gone = scheduler.forget(is_forgotten)
    for ram_bytes, disk_bytes, is_done in others:
        gone = replace(
            gone,
            num_ram_bytes=gone.num_ram_bytes + ram_bytes,
            num_disk_bytes=gone.num_disk_bytes + disk_bytes,
            is_done=gone.is_done and is_done,
        )
    return gone
