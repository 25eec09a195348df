"""How a row's caches come back from a pass of which not all tokens are its own, each leaf in its way to the same place.

    trim    its rows stand by themselves: the newest are dropped
    window  a pass of several tokens leaves a window with all rows that any of them saw, in order: it is cut at its end
    hold    its arrays are replaced by a pass, not written: those from before it are held by reference, and put back
    stay    it holds nothing of the tokens

Where one leaf is held all go back to before the pass, and the tokens that are the row's own go through the model once
more at the beginning of its next pass. Which way a leaf of an unknown class can go is found by trying
(`draft_support.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvserve.engine.kv_buffers import with_arrays
from kvserve.engine.quantised import PackedCache
from kvserve.engine.vision import RopeShift

type Way = Literal["trim", "window", "hold", "stay"]


def known_way(leaf: Any) -> Way | None:
    """By class, exact classes only; None for one that is not known here."""
    if type(leaf) in (KVCache, PackedCache):
        return "trim"
    if type(leaf) is RotatingKVCache and leaf.keep == 0:
        return "window"
    if type(leaf) is ArraysCache:
        return "hold"
    return "stay" if type(leaf) is RopeShift else None


@dataclass(frozen=True, slots=True)
class Retreat:
    """A row's leaves before a pass. `held` has what goes back by reference, None for the others."""

    leaves: Sequence[Any]
    ways: Sequence[Way]
    held: Sequence[Any]

    @classmethod
    def before(cls, leaves: Sequence[Any], ways: Sequence[Way]) -> "Retreat":
        """Note what a pass will replace. Copies nothing."""
        held = [_referred(leaf) if way == "hold" else None for leaf, way in zip(leaves, ways, strict=True)]
        return cls(leaves, ways, held)

    def back(self, num_passed: int, num_kept: int) -> int:
        """Take all but the first `num_kept` of the tokens that have passed out of the caches; returns how many of these
        they hold: all, or none where something was held."""
        num_held = 0 if "hold" in self.ways else num_kept
        for leaf, way, held in zip(self.leaves, self.ways, self.held, strict=True):
            match way:
                case "trim":
                    leaf.trim(num_passed - num_held)
                case "window":
                    _cut_window(leaf, num_passed - num_held)
                case "hold":
                    _put_back(leaf, held)
                case "stay":
                    pass
        return num_held


def _referred(leaf: Any) -> Any:
    """The same arrays in containers of their own."""
    return list(leaf.cache) if type(leaf) is ArraysCache else with_arrays(leaf, lambda array: array)


def _put_back(leaf: Any, held: Any) -> None:
    if type(leaf) is ArraysCache:
        leaf.cache = list(held)
    else:
        vars(leaf).clear()
        vars(leaf).update(vars(held))


def _cut_window(leaf: Any, num_dropped: int) -> None:
    """Drop the newest rows behind a pass of several tokens, which stand in order then, and what no token sees any more.

    The next token sees `max_size` rows, itself among them. mlx-lm takes a full window with fewer rows for one that
    still grows, so that a row which nobody sees stands in the place of the one that was dropped with the pass.
    """
    end = leaf.keys.shape[2] - num_dropped
    start = max(0, end - leaf.max_size)
    leaf.offset -= num_dropped
    missing = min(leaf.offset, leaf.max_size) - (end - start)
    leaf.keys, leaf.values = (_from(rows, start, end, missing) for rows in (leaf.keys, leaf.values))
    leaf._idx = leaf.keys.shape[2]


def _from(rows: mx.array, start: int, end: int, num_blank: int) -> mx.array:
    """The slots `[start, end)` of (1, heads, slots, width), behind so many blank ones."""
    cut = rows[..., start:end, :]
    if num_blank <= 0:
        return cut
    return mx.concatenate([mx.zeros_like(rows[..., :num_blank, :]), cut], axis=2)
