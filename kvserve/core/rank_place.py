"""Which of several processes that compute one model together this one is, and which of its layers it may have."""

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


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers `[start, end)` of so many, which a rank of a pipeline has whole; the others have the rest."""

    start: int
    end: int
    num_layers: int

    def __str__(self) -> str:
        return f"layers {self.start} to {self.end} of {self.num_layers}"
