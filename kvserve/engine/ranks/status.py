"""How the ranks of one model are, as `/health` tells it: what each follower keeps, and why they are lost. No arrays."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvserve.engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """What a follower has said of itself last: bytes of KV that it keeps in RAM and on disk, and everything that went
    wrong with its disk. None before it has loaded its part."""

    rank: int
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    num_disk_faults: int | None = None


@dataclass(frozen=True, slots=True)
class RanksStatus:
    """`lost`: why they do not compute together any more, None while they do."""

    num_ranks: int
    followers: tuple[FollowerStatus, ...]
    lost: str | None


def told_of(cache: PrefixCache | None) -> Mapping[str, int]:
    """What a follower says of itself, as it goes over the wire; from any thread."""
    if cache is None:
        return {}
    ram_bytes, disk_bytes = cache.held_bytes()
    return {"ram_bytes": ram_bytes, "disk_bytes": disk_bytes, "num_disk_faults": cache.num_disk_faults()}
