"""Which rank of several this process is, and what it says of it. It knows no model."""

from collections.abc import Mapping

from kvserve.core.rank_place import RankPlace
from kvserve.errors import StartupError
from kvserve.settings.rank_variables import OFF_OVER_RANKS, RANK, rank_found


def off_over_ranks(place: RankPlace) -> str:
    """What a start says of it."""
    keys = ", ".join(name.upper() for name in OFF_OVER_RANKS)
    return (
        f"{place}: over several ranks nothing is drafted, computed ahead or shared with other servers, and no other "
        f"model is loaded, whatever these say: {keys}."
    )


def refuse_demo_of_ranks(demo: str | None, place: RankPlace) -> None:
    """Raises StartupError: the demo is small, and each rank would fetch or make its own."""
    if demo is not None:
        raise StartupError(f"The demo runs on one rank, and this is {place}. Start it without {RANK}.")


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """This process's place among the ranks; None where it computes alone. Raises SettingError for half of one."""
    found = rank_found(environment)
    return RankPlace(*found) if found is not None else None
