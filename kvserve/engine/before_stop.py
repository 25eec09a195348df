"""Recurrent states as they were before a step: where an answer ends whose stop token the next prompt may not repeat.

A step hands a token out after the model has gone through it, and a recurrent state cannot be taken back. The step
replaces these arrays and changes none, so those from before it exist for as long as they are held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from kvserve.engine.flat_caches import flat_caches
from kvserve.engine.quantised import PackedCache


def is_recurrent(leaf: Any) -> bool:
    """Whether a cache, of one row or of a batch, is a recurrent state."""
    return type(leaf) is ArraysCache


@dataclass(frozen=True, slots=True)
class StatesBefore:
    """The states of a batch's rows, by reference. `rows` are the places of uids in it; `states` has one entry per leaf,
    None for one that can be cut."""

    rows: Mapping[int, int]
    states: Sequence[Sequence[mx.array] | None]

    @classmethod
    def of(cls, generator: Any) -> "StatesBefore | None":
        """The states in a `BatchGenerator` before its next step; None where no row has begun to decode."""
        batch = generator._generation_batch
        if not batch.uids:
            return None
        flat = flat_caches(batch.prompt_cache)
        states = [tuple(leaf.cache) if is_recurrent(leaf) else None for leaf in flat]
        return cls({uid: row for row, uid in enumerate(batch.uids)}, states)

    def put_back(self, uid: int, caches: Sequence[Any]) -> bool:
        """Give a row's own caches the states from before the step. Returns False, and changes nothing, where they have
        other layers that cannot be taken back, or no state yet."""
        row, flat = self.rows.get(uid), flat_caches(caches)
        can_go_back = all(type(leaf) in (KVCache, PackedCache, ArraysCache) for leaf in flat)
        has_states = all(array is not None for state in self.states for array in state or ())
        if row is None or not can_go_back or not has_states:
            return False
        for leaf, state in zip(flat, self.states, strict=True):
            if state is not None:
                leaf.cache = [array[row : row + 1] for array in state]
        return True
