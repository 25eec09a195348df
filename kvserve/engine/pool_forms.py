"""Pools inside a row's caches, found out at load on the model itself: arrays with a row for each full group of tokens,
which later passes leave as it is.

A leaf with such arrays cannot be cut anywhere: what it holds of a group that is not full, and of a window beside it, it
holds at one place only. But its pool is kept with the tokens, once for all places, and the rest, which does not grow,
for each. That is proved by a leaf that is put together from both and must go on like the row itself. It knows no class.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import isroutine
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import KvArrays, flat_caches, with_arrays
from kvserve.engine.tried_rows import TriedRow, are_alike, are_stable, run_pass

ROW_AXIS = -2
"""Kept rows are (..., groups, width)."""

SECOND_PASS = 11
"""Tokens of the second pass at least."""

GROUPS = 48
MAX_UNIT = 1024
"""A group has a part of so many tokens, or what a leaf names has, if that is no more than the other."""

MAX_DEPTH = 4
"""Objects that refer to each other end somewhere."""

type Place = tuple[str | int, ...]
"""Where an array stands in an object: attributes, and positions in lists."""


@dataclass(frozen=True, slots=True)
class PoolForm:
    """A leaf's pool: the arrays at `places`, with a row for each group of `size` tokens on the axis of `axes`."""

    size: int
    places: tuple[Place, ...]
    axes: tuple[int, ...]

    def rows(self, leaf: Any) -> KvArrays:
        """The pool; nothing while no group is full. Raises ValueError where its arrays have different numbers of rows:
        they are not as they were at load."""
        arrays = [_at(leaf, place) for place in self.places]
        counts = {0 if array is None else array.shape[axis] for array, axis in zip(arrays, self.axes, strict=True)}
        if len(counts) > 1:
            raise ValueError(f"A pool of {type(leaf).__name__} has {sorted(counts)} rows, not as it was at load.")
        if counts == {0}:
            return ()
        return tuple(mx.moveaxis(array, axis, ROW_AXIS) for array, axis in zip(arrays, self.axes, strict=True))

    def rest(self, leaf: Any) -> Any:
        """A copy of what a leaf holds beside its pool."""
        pool = {id(_at(leaf, place)) for place in self.places} if self.rows(leaf) else set()
        return with_arrays(leaf, lambda array: None if id(array) in pool else mx.contiguous(array))

    def fill(self, leaf: Any, rows: KvArrays) -> None:
        """Give such a copy its pool, which becomes its own; nothing where no group is full."""
        if not rows or not rows[0].shape[ROW_AXIS]:
            return
        for place, axis, array in zip(self.places, self.axes, rows, strict=True):
            _put(leaf, place, mx.contiguous(mx.moveaxis(array, ROW_AXIS, axis)))

    def give_away(self, leaf: Any) -> None:
        """Let go of the pool."""
        for place in self.places:
            _put(leaf, place, None)


def find_pools(
    module: Callable[..., Any],
    new_caches: Callable[[], list[Any]],
    first_pass: int,
    named: Sequence[set[int]],
    is_odd: Sequence[bool],
) -> list[PoolForm | None]:
    """The pools of the leaves that are odd, which name these lengths. The first pass is longer than any of them; the
    last one is a single token that makes groups full. None where the model cannot be tried so far."""
    none: list[PoolForm | None] = [None] * len(is_odd)
    if not any(is_odd):
        return none
    row = finding(lambda: TriedRow.computed(module, new_caches, _passes(first_pass, named)))
    if isinstance(row, Exception):
        return none
    forms = [
        _pool_form(seen, row.lengths, sizes) if odd else None
        for seen, sizes, odd in zip(row.of_leaf, named, is_odd, strict=True)
    ]
    if any(forms) and finding(lambda: _prove(module, new_caches, row, forms)) is not None:
        return none
    return forms


def _passes(first: int, named: Sequence[set[int]]) -> tuple[int, int, int]:
    """Three passes, whose tokens together are a multiple of what groups may have."""
    longest = max((size for sizes in named for size in sizes if 0 < size < first), default=1)
    unit = math.lcm(GROUPS, longest)
    unit = unit if unit <= MAX_UNIT else GROUPS
    num_tokens = -(-(first + SECOND_PASS + 1) // unit) * unit
    return first, num_tokens - 1 - first, 1


def _pool_form(seen: Sequence[Any], lengths: Sequence[int], named: set[int]) -> PoolForm | None:
    """The pool of a leaf of which these are copies: of the size that most bytes are of, if there are several."""
    early, late, last = (dict(_arrays(leaf)) for leaf in seen)
    found: dict[int, list[tuple[Place, int]]] = {}
    for place, array in last.items():
        values = [early.get(place), late.get(place), array]
        if any(value is None or value.ndim != array.ndim or array.ndim < 2 for value in values):
            continue
        for axis in range(array.ndim):
            if (size := _group_size(values, axis, lengths, named)) is not None:
                found.setdefault(size, []).append((place, axis - array.ndim))
                break
    if not found:
        return None
    size = max(found, key=lambda each: sum(last[place].nbytes for place, _ in found[each]))
    places, axes = zip(*found[size], strict=True)
    return PoolForm(size, places, axes)


def _group_size(values: Sequence[Any], axis: int, lengths: Sequence[int], named: set[int]) -> int | None:
    """For how many tokens these arrays have a row on this axis, if they have: the only number that their lengths allow,
    or the only one of these that the leaf names. The last token must have made a group full."""
    counts = [value.shape[axis] for value in values]
    allowed = [size for size in range(1, lengths[0] + 1) if counts == [length // size for length in lengths]]
    if len(allowed) > 1:
        allowed = [size for size in allowed if size in named]
    return allowed[0] if len(allowed) == 1 and not lengths[-1] % allowed[0] and are_stable(values, axis) else None


def _prove(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], row: TriedRow, forms: Sequence[PoolForm | None]
) -> None:
    """Put leaves together from what they held after the first pass and the first rows of the last pool, let them go on
    and compare them with the row. Raises ValueError for a difference."""
    first = row.lengths[0]
    caches = new_caches()
    for leaf, form, seen in zip(flat_caches(caches), forms, row.of_leaf, strict=True):
        copied = with_arrays(seen[0], mx.contiguous) if form is None else form.rest(seen[0])
        if form is not None:
            form.fill(copied, tuple(array[..., : first // form.size, :] for array in form.rows(seen[-1])))
        vars(leaf).clear()
        vars(leaf).update(vars(copied))
    for start, end in pairwise(row.lengths):
        run_pass(module, caches, row.tokens[start:end])
    for leaf, form, seen in zip(flat_caches(caches), forms, row.of_leaf, strict=True):
        ours, theirs = ([array for _, array in _arrays(each)] for each in (leaf, seen[-1]))
        if form is not None and not (are_alike(ours, theirs) and are_alike(leaf.state, seen[-1].state)):
            raise ValueError("what is put together from a pool and the rest does not go on like the row")


# --- arrays in an object ----------------------------------------------------------------------------------------------


def _arrays(value: Any, place: Place = ()) -> Iterator[tuple[Place, mx.array]]:
    """The arrays that can be taken out of an object and put back: attributes, and what stands in lists."""
    if isinstance(value, mx.array):
        yield place, value
    elif type(value) is list:
        for index, each in enumerate(value):
            yield from _arrays(each, (*place, index))
    elif hasattr(value, "__dict__") and len(place) < MAX_DEPTH and not isinstance(value, type | Module):
        attributes = {} if isroutine(value) else vars(value)
        for name, each in attributes.items():
            yield from _arrays(each, (*place, name))


def _at(value: Any, place: Place) -> Any:
    for step in place:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def _put(value: Any, place: Place, array: mx.array | None) -> None:
    holder, last = _at(value, place[:-1]), place[-1]
    if isinstance(last, int):
        holder[last] = array
    else:
        setattr(holder, last, array)
