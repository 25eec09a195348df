"""What each leaf of a row's caches holds, found out at load on the model itself: which leaves can be cut at any token,
and how a class that is not known here is read and filled.

A row goes through the model in three passes. What has one more row for each token, and the same rows as before, can be
cut; a leaf of an unknown class is then put together from its rows, goes on, and must hold what the row itself holds.
What has a row for so many tokens is a pool (`pool_forms`).
The same tokens in one pass must lead to what these hold, else it depends on where a prefill is cut.
It knows classes of mlx-lm, and of any other class its `state`; no model's name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import KvArrays, flat_caches, held_arrays, with_arrays
from kvserve.engine.pool_forms import PoolForm, find_pools
from kvserve.engine.tried_rows import TriedRow, are_alike, are_stable, entries_of, mapped, run_pass
from kvserve.engine.vision import RopeShift

type LeafKind = Literal["cut", "window", "pool", "whole", "memo", "none"]
"""cut      keys and values per token, any run of tokens can be read and put together again
window   the last `max_size` rows of keys and values: a checkpoint, exact at its offset only
pool     rows of groups of tokens, which are kept with the tokens, and the rest of the object: a checkpoint, likewise
whole    anything else (recurrent states, classes that are not known here): a copy of the object, likewise
memo     what a model has worked out from what else it holds, and works out again where it is missing: it is not kept
none     what follows from the prompt (`RopeShift`), or nothing: it is not kept; a restored row gets it anew
"""

TOKEN_AXIS = -2
"""Kept rows are (..., tokens, width)."""

PASSES = (19, 11, 1)
"""Tokens of the three passes: MLX has another kernel for up to eight of them, and models may have a path of their own
for one. The first is no multiple of anything: a class may hold rows in groups, and what is cut inside one is the hard
case."""

OTHER_CUT_TOKENS = 6
"""The row is cut once more so many tokens earlier, if its first cut showed: a tie in a mixture of experts does not fall
twice. So near that buffers have the same slots: arrays of other shapes are not compared."""

MAX_PROBED_TOKENS = 1024
"""An unknown class may behave in another way behind a length that it names (a window, a chunk, a buffer's step), so the
first pass is made longer than that. Above this limit a start would take too long, and such a leaf is kept whole."""

MAX_CUT_ERROR = 0.15
"""The same of other pieces, in the first layer of its kind: rounding in bfloat16 is 0.01, a row that lacks what was
before the cut 0.5 to 1."""

MEMO_CONTRAST = 10.0
"""Without what a model works out again a row is so many times nearer to itself than with other content in its place:
else a layer that says little beside large logits, or keys, would pass for one that is not needed."""

SMALLEST = 1e-30
"""In the place of nothing where it is divided by."""


def leaf_kind(leaf: Any) -> LeafKind:
    """By class alone. Exact classes only: a subclass may keep more than its parent says."""
    if type(leaf) is KVCache:
        return "cut"
    if type(leaf) is RotatingKVCache and leaf.keep == 0:
        return "window"
    return "none" if type(leaf) is RopeShift else "whole"


def is_known(leaf: Any) -> bool:
    """Whether it is of a class whose ways are known here."""
    return type(leaf) is ArraysCache or leaf_kind(leaf) != "whole"


def lengths_named(leaf: Any) -> set[int]:
    """All whole numbers that an object or its class hold: some of them may be lengths."""
    held = [item for holder in (*type(leaf).__mro__, leaf) for item in getattr(holder, "__dict__", {}).items()]
    return {value for name, value in held if isinstance(value, int) and not name.startswith("__")}


@dataclass(frozen=True, slots=True)
class StateForm:
    """How a leaf of an unknown class is read and filled, by the entries of its `state`: `axes` has the axis of tokens
    for each that has a row per token, None for others. `template` is a state without rows: numbers that count tokens
    stand in it as `_COUNT`, what follows from the rows as None.
    """

    template: Any
    axes: tuple[int | None, ...]

    def rows(self, leaf: Any) -> KvArrays:
        """What it holds of all tokens, token by token; nothing where it is empty."""
        entries = list(entries_of(leaf.state))
        if len(entries) != len(self.axes):
            return ()
        picked = [(entry, axis) for entry, axis in zip(entries, self.axes, strict=True) if axis is not None]
        if any(entry is None for entry, _ in picked):
            return ()
        rows = tuple(mx.moveaxis(entry, axis, TOKEN_AXIS) for entry, axis in picked)
        counts = {array.shape[TOKEN_AXIS] for array in rows}
        counts |= {entry for entry, kept in zip(entries, entries_of(self.template), strict=True) if kept is _COUNT}
        if len(counts) > 1:
            raise ValueError(f"A cache of {type(leaf).__name__} has {sorted(counts)} rows, not as it was at load.")
        return rows

    def fill(self, leaf: Any, rows: KvArrays) -> None:
        """Give an empty leaf these rows."""
        axes = [axis for axis in self.axes if axis is not None]
        arrays = (mx.moveaxis(array, TOKEN_AXIS, axis) for array, axis in zip(rows, axes, strict=True))
        flags = iter(self.axes)
        num_tokens = rows[0].shape[TOKEN_AXIS]

        def entry(kept: Any) -> Any:
            if next(flags) is not None:
                return next(arrays)
            return num_tokens if kept is _COUNT else kept

        leaf.state = mapped(self.template, entry)


@dataclass(frozen=True, slots=True)
class LeafForm:
    """One leaf: its kind, with `state_form` where it is cut by its state, and `pool_form` where it has a pool.
    `per_token` and `fixed` are the bytes that a leaf of an unknown class takes, `cut_error` is how far what it holds
    moves with the place where a row is cut."""

    kind: LeafKind
    state_form: StateForm | None = None
    per_token: float = 0.0
    fixed: int = 0
    cut_error: float = 0.0
    pool_form: PoolForm | None = None

    @property
    def depends_on_cuts(self) -> bool:
        return not self.cut_error <= MAX_CUT_ERROR  # also for what is not a number

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint holds it, or a part of it."""
        return self.kind in ("window", "pool", "whole")

    @property
    def has_rows(self) -> bool:
        """Whether rows of it are kept with the tokens."""
        return self.kind in ("cut", "pool")

    @property
    def row_tokens(self) -> int:
        """How many tokens one of its rows is for."""
        return self.pool_form.size if self.pool_form is not None else 1


def forms_by_class(new_caches: Callable[[], list[Any]]) -> tuple[LeafForm, ...]:
    """What classes say, where no model is at hand."""
    return tuple(LeafForm(leaf_kind(leaf)) for leaf in flat_caches(new_caches()))


def find_forms(module: Callable[..., Any], new_caches: Callable[[], list[Any]]) -> tuple[LeafForm, ...]:
    """The forms of a row's leaves. Raises what the model raises."""
    fresh = flat_caches(new_caches())
    named = [set[int]() if is_known(leaf) else lengths_named(leaf) for leaf in fresh]
    extra = max((length for each in named for length in each if length <= MAX_PROBED_TOKENS), default=0)
    row = TriedRow.computed(module, new_caches, (PASSES[0] + extra, *PASSES[1:]))
    kinds = _without_memos(module, new_caches, [_kind(seen, row.lengths) for seen in row.of_leaf], fresh)
    forms: list[StateForm | None] = [
        None if is_known(leaf) or max(lengths, default=0) > MAX_PROBED_TOKENS else _state_form(seen, row.lengths)
        for leaf, lengths, seen in zip(fresh, named, row.of_leaf, strict=True)
    ]
    if any(forms) and finding(lambda: _prove(module, new_caches, row, forms)) is not None:
        forms = [None] * len(forms)
    errors = _cut_errors(module, new_caches, row, fresh)
    is_exact = all(error <= MAX_CUT_ERROR for error in errors)
    is_odd = [
        is_exact and not is_known(leaf) and form is None and max(lengths, default=0) <= MAX_PROBED_TOKENS
        for leaf, form, lengths in zip(fresh, forms, named, strict=True)
    ]
    pools = find_pools(module, new_caches, PASSES[0] + extra, named, is_odd)
    return tuple(
        LeafForm(
            "cut" if form else "pool" if pool else kind,
            form,
            *_sizes(seen[0].state, seen[1].state, row.lengths),
            error,
            pool,
        )
        for form, pool, kind, seen, error in zip(forms, pools, kinds, row.of_leaf, errors, strict=True)
    )


# --- a row that is looked at -----------------------------------------------------------------------------------------


def _kind(seen: Sequence[Any], lengths: Sequence[int]) -> LeafKind:
    """A cache that a model does not write at every pass cannot be cut, whatever its class; one that it never writes, a
    layer without attention, holds nothing to be kept."""
    kind = leaf_kind(seen[0])
    if kind != "cut" or [leaf.offset for leaf in seen] == list(lengths):
        return kind
    return "whole" if any(leaf.offset for leaf in seen) else "none"


def _without_memos(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], kinds: list[LeafKind], fresh: Sequence[Any]
) -> list[LeafKind]:
    """The kinds of leaves, once plain caches that not every pass writes are left out of a row, where it goes on as it
    does with them, and not as with others. They name no length, so the row is as long as any that is tried."""
    is_behind = [kind == "whole" and leaf_kind(leaf) == "cut" for kind, leaf in zip(kinds, fresh, strict=True)]
    if not any(is_behind):
        return kinds

    def is_the_same() -> bool:
        row, none = TriedRow.computed(module, new_caches, (PASSES[0] + MAX_PROBED_TOKENS,)), [False] * len(fresh)
        expected = _continued(module, new_caches, row, none, is_behind)
        without = _continued(module, new_caches, row, is_behind)
        least = MEMO_CONTRAST * _distance(without, expected)
        return are_alike(without, expected) and all(
            _distance(_continued(module, new_caches, _emptied(row, position), none, is_behind), expected) > least
            for position in range(len(fresh))
            if is_behind[position]
        )

    if finding(is_the_same) is not True:  # also where the model cannot be tried so far
        return kinds
    return ["memo" if behind else kind for behind, kind in zip(is_behind, kinds, strict=True)]


def _emptied(row: TriedRow, position: int) -> TriedRow:
    """The row with nothing but zeros in one leaf."""
    leaves = list(row.of_leaf)
    leaves[position] = tuple(with_arrays(each, mx.zeros_like) for each in leaves[position])
    return replace(row, of_leaf=leaves)


def _continued(
    module: Callable[..., Any],
    new_caches: Callable[[], list[Any]],
    row: TriedRow,
    is_missing: Sequence[bool],
    is_unseen: Sequence[bool] | None = None,
) -> list[Any]:
    """The last logits of each later pass of a row that goes on without some leaves, and what the others hold then, but
    for those that are not looked at."""
    caches, found = new_caches(), []
    leaves = flat_caches(caches)
    for leaf, seen, missing in zip(leaves, row.of_leaf, is_missing, strict=True):
        if not missing:
            vars(leaf).update(vars(with_arrays(seen[0], mx.contiguous)))
    for length in PASSES[1:]:
        logits = module(mx.array([[1 + 37 * place % 89 for place in range(length)]]), cache=caches)[0, -1]
        mx.eval(logits, held_arrays(caches))
        found.append(logits)
    unseen = is_unseen or is_missing
    return [*found, *(leaf.state for leaf, hidden in zip(leaves, unseen, strict=True) if not hidden)]


def _state_form(seen: Sequence[Any], lengths: Sequence[int]) -> StateForm | None:
    """How a leaf of which these are copies can be cut; None where it cannot, or its state is of no build known here."""
    found = finding(lambda: _form_of_states(seen, lengths))
    return None if isinstance(found, Exception) else found


def _form_of_states(seen: Sequence[Any], lengths: Sequence[int]) -> StateForm | None:
    states = [list(entries_of(leaf.state)) for leaf in seen]
    if len({len(entries) for entries in states}) != 1:
        return None
    found = [_entry_form(entries, lengths) for entries in zip(*states, strict=True)]
    axes = tuple(axis for axis, _ in found)
    if all(axis is None for axis in axes):
        return None
    kept = iter(found)
    return StateForm(mapped(seen[0].state, lambda _: next(kept)[1]), axes)


def _entry_form(values: Sequence[Any], lengths: Sequence[int]) -> tuple[int | None, Any]:
    """The axis of tokens of one entry of a state, if it has a row for each; else what stands in its place."""
    if all(isinstance(value, mx.array) for value in values):
        for axis in range(values[0].ndim if values[0].ndim > 1 else 0):
            if [value.shape[axis] for value in values] == list(lengths) and are_stable(values, axis):
                return axis - values[0].ndim, None
        return None, None
    if list(values) == list(lengths):
        return None, _COUNT
    is_constant = not any(isinstance(value, mx.array) for value in values) and all(each == values[0] for each in values)
    return None, values[0] if is_constant else None


def _prove(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], row: TriedRow, forms: Sequence[StateForm | None]
) -> None:
    """Cut leaves out of a longer row, let them go on and compare them with it. Raises ValueError for a difference."""
    first, second = row.lengths[:2]
    caches = new_caches()
    for leaf, form, seen in zip(flat_caches(caches), forms, row.of_leaf, strict=True):
        if form is None:
            vars(leaf).update(vars(with_arrays(seen[0], mx.contiguous)))
        else:
            form.fill(leaf, tuple(mx.contiguous(array[..., :first, :]) for array in form.rows(seen[1])))
    run_pass(module, caches, row.tokens[first:second])
    for leaf, form, seen in zip(flat_caches(caches), forms, row.of_leaf, strict=True):
        if form is not None and not are_alike(leaf.state, seen[1].state):
            raise ValueError("what is cut out of a row does not go on like it")


# --- where a row is cut ----------------------------------------------------------------------------------------------


def _cut_errors(
    module: Callable[..., Any], new_caches: Callable[[], list[Any]], row: TriedRow, fresh: Sequence[Any]
) -> list[float]:
    """How far what each leaf holds after two passes is from what it holds after one over the same tokens. Classes that
    are known hold what they are given; of the others the first layer of each kind tells, as noise grows with depth."""
    first: dict[tuple[type, frozenset[int]], int] = {}
    for position, leaf in enumerate(fresh):
        if not is_known(leaf):
            first.setdefault((type(leaf), frozenset(lengths_named(leaf))), position)
    errors = [0.0] * len(fresh)
    if not first:
        return errors
    num_tokens = row.lengths[1]
    whole = TriedRow.computed(module, new_caches, (num_tokens,))
    for position in first.values():
        errors[position] = _distance(whole.of_leaf[position][0].state, row.of_leaf[position][1].state)
    if any(not error <= MAX_CUT_ERROR for error in errors):
        start = row.lengths[0] - OTHER_CUT_TOKENS
        other = TriedRow.computed(module, new_caches, (start, num_tokens - start))
        for position in first.values():
            again = _distance(whole.of_leaf[position][0].state, other.of_leaf[position][1].state)
            errors[position] = min(errors[position], again)
    return errors


def _distance(ours: Any, theirs: Any) -> float:
    """The largest difference between arrays of the same shapes, as a share of the largest value."""
    pairs = zip(entries_of(ours), entries_of(theirs), strict=False)  # one may hold less of a group that is not full
    return max((_largest_difference(*pair) for pair in pairs), default=0.0)


def _largest_difference(ours: Any, theirs: Any) -> float:
    if not isinstance(ours, mx.array) or not isinstance(theirs, mx.array) or ours.shape != theirs.shape:
        return 0.0
    if not ours.size or not mx.issubdtype(ours.dtype, mx.floating):
        return 0.0
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    differences = mx.where(ours == theirs, 0, mx.abs(ours - theirs))  # of two infinities there is none
    largest = mx.maximum(mx.where(mx.isfinite(theirs), mx.abs(theirs), 0).max(), SMALLEST)
    ratio = float((differences.max() / largest).item())  # type: ignore[arg-type]
    return ratio if ratio == ratio else math.inf


# --- states ----------------------------------------------------------------------------------------------------------

_COUNT = object()


def _sizes(early: Any, late: Any, lengths: Sequence[int]) -> tuple[float, int]:
    """Bytes per token, and bytes that do not grow, of a state after the first and the second pass."""
    before, after = list(entries_of(early)), list(entries_of(late))
    if len(before) != len(after):
        before = [None] * len(after)
    per_token, fixed = 0.0, 0
    for was, array in zip(before, after, strict=True):
        if not isinstance(array, mx.array):
            continue
        if not isinstance(was, mx.array) or was.shape != array.shape:
            num_new = array.nbytes - (was.nbytes if isinstance(was, mx.array) else 0)
            per_token += max(0, num_new) / (lengths[1] - lengths[0])
        elif array.ndim > 2 and _has_slots(was, array, *lengths[:2]):
            per_token += array.nbytes / array.shape[TOKEN_AXIS]
        else:
            fixed += array.nbytes
    return per_token, fixed


def _has_slots(was: mx.array, array: mx.array, first: int, end: int) -> bool:
    """Whether an array that kept its shape has places ahead: the earlier rows are still there."""
    has_room = array.size > 0 and array.shape[TOKEN_AXIS] >= end
    return has_room and bool(mx.array_equal(was[..., :first, :], array[..., :first, :]))
