"""Arrays <-> records: reads KV and states out of live caches, and builds live caches from what was kept.

Every leaf cache of a row is of one of three kinds, chosen by its class:

    cut      keys and values per token, any run of tokens can be read and put together again
    window   the last `max_size` rows of keys and values: a checkpoint, exact at its offset only
    whole    anything else (recurrent states, classes that nobody knows here): a copy of the object, likewise

What is kept never shares an array object with a live cache, because MLX's item assignment changes the object, and
never keeps a larger buffer alive than it needs.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

LeafKind = Literal["cut", "window", "whole"]

TOKEN_AXIS = -2
"""Keys and values are (1, heads, tokens, width), quantised ones three such arrays."""

ROOM_TOKENS = 256
"""Slots a restored row gets beyond its prefill, so that the next write does not copy the whole buffer again."""


@dataclass(frozen=True, slots=True)
class KvSlice:
    """Keys and values of a run of tokens: per cut leaf the arrays of keys, then of values."""

    leaves: tuple[tuple[mx.array, ...], ...]
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The leaves that cannot be cut, at exactly one offset: one detached cache object per leaf."""

    leaves: tuple[Any, ...]
    num_bytes: int


class CacheLayout:
    """Which leaves a model's caches have. Frozen; `read_*` never change the caches that they read."""

    def __init__(self, new_caches: Callable[[], list[Any]]) -> None:
        self._new_caches = new_caches
        self._kinds = tuple(_kind(leaf) for leaf in _leaves(new_caches()))

    @property
    def is_cuttable(self) -> bool:
        """True when any prefix of a row can be restored from its segments alone."""
        return all(kind == "cut" for kind in self._kinds)

    def read_kv(self, caches: Sequence[Any], start: int, end: int) -> KvSlice:
        """Copy the KV of the tokens `[start, end)` out of a row's caches."""
        leaves = tuple(
            tuple(mx.contiguous(array[..., start:end, :]) for array in _kv_arrays(leaf))
            for leaf, kind in self._with_kinds(caches)
            if kind == "cut"
        )
        return _evaluated_slice(leaves, end - start)

    def read_state(self, caches: Sequence[Any]) -> StateSnapshot | None:
        """Copy the leaves that cannot be cut, at the caches' present offset; None where there are none."""
        leaves = tuple(
            _detached_window(leaf) if kind == "window" else _detached(leaf)
            for leaf, kind in self._with_kinds(caches)
            if kind != "cut"
        )
        if not leaves:
            return None
        arrays = _arrays([_everything(leaf) for leaf in leaves])
        mx.eval(arrays)
        return StateSnapshot(leaves, sum(array.nbytes for array in arrays))

    def restore(
        self, pieces: Sequence[tuple[KvSlice, int, int]], state: StateSnapshot | None, num_next_tokens: int
    ) -> list[Any]:
        """Live caches from consecutive pieces (slice, first row, end row) and the state at their end.

        There is room for `num_next_tokens` more before a buffer has to grow.
        """
        caches = self._new_caches()
        if not pieces and state is None:
            return caches
        room = num_next_tokens + ROOM_TOKENS
        kept = iter(state.leaves if state is not None else ())
        cut_index = 0
        for position, (leaf, kind) in enumerate(self._with_kinds(caches)):
            if kind == "cut":
                _fill(leaf, [_rows(piece, cut_index) for piece in pieces], room)
                cut_index += 1
            else:
                self._replace(caches, position, copy.deepcopy(next(kept)))
        mx.eval([_everything(leaf) for leaf, _ in self._with_kinds(caches)])
        return caches

    def _with_kinds(self, caches: Sequence[Any]) -> list[tuple[Any, LeafKind]]:
        return list(zip(_leaves(caches), self._kinds, strict=True))

    def _replace(self, caches: list[Any], position: int, new: Any) -> None:
        """Put a leaf in the place of the fresh one, also inside a CacheList."""
        fresh = _leaves(caches)[position]
        for index, cache in enumerate(caches):
            if cache is fresh:
                caches[index] = new
            elif isinstance(cache, CacheList):
                cache.caches = tuple(new if each is fresh else each for each in cache.caches)


def merged(slices: Sequence[tuple[KvSlice, int, int]]) -> KvSlice:
    """One slice of consecutive pieces (slice, first row, end row): what coalescing small segments makes."""
    num_leaves = len(slices[0][0].leaves)
    leaves = tuple(
        tuple(  # contiguous: of a single piece the concatenation is a view that keeps its whole buffer alive
            mx.contiguous(mx.concatenate(list(parts), axis=TOKEN_AXIS))
            for parts in zip(*(_rows(piece, i) for piece in slices), strict=True)
        )
        for i in range(num_leaves)
    )
    return _evaluated_slice(leaves, sum(end - start for _, start, end in slices))


def _evaluated_slice(leaves: tuple[tuple[mx.array, ...], ...], num_tokens: int) -> KvSlice:
    mx.eval(leaves)
    return KvSlice(leaves, num_tokens, sum(array.nbytes for leaf in leaves for array in leaf))


def _kind(leaf: Any) -> LeafKind:
    """Exact classes only: a subclass may keep more than its parent says, and is then copied whole."""
    if type(leaf) in (KVCache, QuantizedKVCache):
        return "cut"
    if type(leaf) is RotatingKVCache and leaf.keep == 0:
        return "window"
    return "whole"


def _leaves(caches: Sequence[Any]) -> list[Any]:
    return [leaf for cache in caches for leaf in (cache.caches if isinstance(cache, CacheList) else [cache])]


def _kv_arrays(leaf: Any) -> list[mx.array]:
    return _arrays([leaf.keys, leaf.values])


def _rows(piece: tuple[KvSlice, int, int], leaf_index: int) -> list[mx.array]:
    kv, start, end = piece
    arrays = kv.leaves[leaf_index]
    return [array if (start, end) == (0, kv.num_tokens) else array[..., start:end, :] for array in arrays]


def _fill(leaf: Any, pieces: Sequence[Sequence[mx.array]], room: int) -> None:
    """Give an empty cut leaf the rows of all pieces, in one copy, with room behind them."""
    if not pieces:
        return
    arrays = []
    for parts in zip(*pieces, strict=True):
        shape = (*parts[0].shape[:TOKEN_AXIS], room, parts[0].shape[-1])
        arrays.append(mx.concatenate([*parts, mx.zeros(shape, parts[0].dtype)], axis=TOKEN_AXIS))
    half = len(arrays) // 2
    leaf.keys, leaf.values = (arrays[0], arrays[1]) if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))
    leaf.offset = sum(piece[0].shape[TOKEN_AXIS] for piece in pieces)


def _detached_window(leaf: Any) -> Any:
    """The last `max_size` rows in temporal order: after a prefill chunk a window holds up to a chunk more."""
    window: Any = RotatingKVCache(leaf.max_size, leaf.keep)  # type: ignore[no-untyped-call]
    window.offset = leaf.offset
    if leaf.keys is not None:
        for name in ("keys", "values"):
            ordered = leaf._temporal_order(getattr(leaf, name))
            setattr(window, name, mx.contiguous(ordered[..., -leaf.max_size :, :]))
        window._idx = window.keys.shape[TOKEN_AXIS]
    return window


def _detached(leaf: Any) -> Any:
    """A copy of a cache object whose arrays are copies of their own, so that no batch buffer stays alive."""
    twin = copy.copy(leaf)
    for name, value in vars(leaf).items():
        setattr(twin, name, tree_map(lambda each: mx.contiguous(each) if isinstance(each, mx.array) else each, value))
    return twin


def _everything(leaf: Any) -> dict[str, Any]:
    return dict(vars(leaf))


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]  # type: ignore[str-unpack]
