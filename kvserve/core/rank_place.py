"""Which of several processes that compute one model together this one is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `size`, two or more. Rank 0 leads: it alone has clients, and listens on `link_host`."""

    rank: int
    size: int
    link_host: str

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
