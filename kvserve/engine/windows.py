"""Sliding windows as runs of rows: of a state only what came since another one, and both put together again.

base   |--------------- window ---------------|
state         |--------------- window ---------------|
part                                          |------|       what is written of it
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache

from kvserve.engine.snapshot import TOKEN_AXIS, StateSnapshot


class PartsApart(ValueError):
    """A part that does not begin where its base ends."""


def since(state: StateSnapshot, num_tokens: int) -> StateSnapshot | None:
    """The state with the rows of its last tokens only, in arrays of their own; None where no window has more."""
    if not any(_num_rows(leaf) > num_tokens for leaf in state.leaves):
        return None
    leaves = [_cut(leaf, num_tokens) if _num_rows(leaf) > num_tokens else leaf for leaf in state.leaves]
    return _state_of(leaves)


def joined(base: StateSnapshot, part: StateSnapshot) -> StateSnapshot:
    """The whole state of which `part` has what came since `base`. Raises PartsApart."""
    if len(base.leaves) != len(part.leaves):
        raise PartsApart("they are of other models")
    return _state_of([_completed(one, other) for one, other in zip(base.leaves, part.leaves, strict=True)])


def _completed(base: Any, part: Any) -> Any:
    num_rows = _num_rows(part)
    if not _is_window(part) or num_rows == (num_wanted := min(part.offset, part.max_size)):
        return part
    num_missing = num_wanted - num_rows
    if not _is_window(base) or base.offset + num_rows != part.offset or not 0 < num_missing <= _num_rows(base):
        raise PartsApart("a window does not go on from the one before")

    def rows(one: mx.array, other: mx.array) -> mx.array:
        return mx.concatenate([one[..., -num_missing:, :], other], axis=TOKEN_AXIS)

    return _window(part, rows(base.keys, part.keys), rows(base.values, part.values))


def _cut(leaf: Any, num_rows: int) -> Any:
    return _window(leaf, *(mx.contiguous(each[..., -num_rows:, :]) for each in (leaf.keys, leaf.values)))


def _window(like: Any, keys: mx.array, values: mx.array) -> Any:
    window: Any = RotatingKVCache(like.max_size, like.keep)  # type: ignore[no-untyped-call]
    window.offset, window.keys, window.values, window._idx = like.offset, keys, values, keys.shape[TOKEN_AXIS]
    return window


def _is_window(leaf: Any) -> bool:
    """As `snapshot` keeps them: exactly this class, its rows in the order of time."""
    return type(leaf) is RotatingKVCache and leaf.keep == 0 and leaf.keys is not None


def _num_rows(leaf: Any) -> int:
    return int(leaf.keys.shape[TOKEN_AXIS]) if _is_window(leaf) else 0


def _state_of(leaves: list[Any]) -> StateSnapshot:
    arrays = [each for leaf in leaves for _, each in tree_flatten(vars(leaf)) if isinstance(each, mx.array)]  # type: ignore[str-unpack]
    mx.eval(arrays)
    return StateSnapshot(tuple(leaves), sum(array.nbytes for array in arrays))
