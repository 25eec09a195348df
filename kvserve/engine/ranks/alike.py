"""What every rank must have found, or done, before any goes on. No arrays."""

from collections.abc import Callable
from typing import Any

from kvserve.engine.borders import described, finding
from kvserve.engine.ranks.place import Ranks
from kvserve.errors import ModelLoadError

ABSENT = "absent"


def refuse_unlike(ranks: Ranks, name: str, values: dict[str, Any]) -> None:
    """Raises ModelLoadError where the ranks have other values; `name` says what these are."""
    for rank, others in enumerate(ranks.gathered(name, values)):
        for key in {**values, **others}:
            own, other = values.get(key, ABSENT), others.get(key, ABSENT)
            if own != other:
                raise ModelLoadError(
                    f"The ranks of one model need the same {name}: {key} is {own!r} here ({ranks.place}) and "
                    f"{other!r} on rank {rank}."
                )


def on_all[T](ranks: Ranks, work: Callable[[], T]) -> T:
    """Do what must succeed on every rank before any goes on. Raises what it raises here, ModelLoadError where another
    rank could not."""
    result = finding(work)
    reason = "" if not isinstance(result, Exception) else str(result) or described(result)
    reasons = ranks.gathered("loaded", reason)
    if isinstance(result, Exception):
        raise result
    for rank, other in enumerate(reasons):
        if other:
            raise ModelLoadError(f"Rank {rank} cannot load its part: {other}")
    return result
