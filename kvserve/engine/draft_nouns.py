"""The nouns of drafts in the engine: what the operator decides, what a model's caches allow, and what of that is
remembered for the next start of the same model. No arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from kvserve.engine.batch_costs import MAX_BATCH_TOKENS, BatchCosts
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, MEASURED_WIDTHS, UNPAID_WIDTHS, PassCosts, pays
from kvserve.engine.retreat import Way
from kvserve.engine.width_noise import WIDTHS, WidthNoise


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the operator decides about drafts. `is_on`: what they need is tried while the model is loaded, else when the
    first row comes that has a drafter. At most `max_num_tokens` are drafted at a time; `is_exact`: no pass is so wide
    that its logits are others than those of single steps.
    """

    is_on: bool = False
    max_num_tokens: int = MAX_PASS_TOKENS - 1
    is_exact: bool = False


DEFAULT_DRAFTS = DraftSettings()


@dataclass(frozen=True, slots=True)
class DraftsSeen:
    """What passes of one start have shown: that rows come back in these `ways`, a leaf each, how far wide passes are
    from single steps, and how many plain steps they take by their width (`ratios`). These have the widest pass of rows
    beside one another (`MAX_BATCH_TOKENS`) where such rows came back, each from its own number of wrong tokens.

    Where the ratios say that no draft pays, nothing is drafted: no ways were tried, and no noise was looked at (empty).

    None of it leads to a word, should it be wrong: ways, and whether rows can be cut one by one, are read off the
    classes at every start and count as tried only where they are these, the rest says how fast an answer comes; who
    wants passes exact looks again (0079).
    """

    ways: tuple[Way, ...]
    noises: tuple[WidthNoise, ...]
    ratios: Mapping[int, float]

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "ways": list(self.ways),
            "noises": [list(astuple(noise)) for noise in self.noises],
            "ratios": [[width, ratio] for width, ratio in self.ratios.items()],
        }

    @classmethod
    def from_row(cls, row: Any) -> "DraftsSeen":
        """Raises LookupError, TypeError, ValueError or OverflowError for what is no row."""
        noises = tuple(
            WidthNoise(int(width), float(difference), int(num_other), int(num_tokens))
            for width, difference, num_other, num_tokens in row["noises"]
        )
        ratios = {int(width): float(ratio) for width, ratio in row["ratios"]}
        widths = (WIDTHS, MEASURED_WIDTHS) if pays(ratios) else ((), UNPAID_WIDTHS)
        narrow = tuple(width for width in ratios if width != MAX_BATCH_TOKENS or not noises)
        if (tuple(noise.width for noise in noises), narrow) != widths:
            raise ValueError("passes of other widths")
        if not all(1 <= ratio < math.inf for ratio in ratios.values()):
            raise ValueError("a pass that costs less than nothing")
        return cls(tuple(row["ways"]), noises, ratios)


@dataclass(frozen=True, slots=True)
class DraftSupport:
    """`ways`: how each leaf comes back from a pass, None where rows decode plainly (`why_not`). `row_bytes`: what a row
    holds besides its KV while a draft is tried. `costs` are this model's on this machine, `together` those of rows
    beside one another, None where these decode plainly (`why_not_together`). `notes` tell a person. `seen` is to be
    remembered, None where there is nothing, or something went wrong."""

    ways: tuple[Way, ...] | None
    why_not: str
    row_bytes: int
    costs: PassCosts
    notes: tuple[str, ...] = ()
    seen: DraftsSeen | None = None
    together: BatchCosts | None = None
    why_not_together: str = ""
