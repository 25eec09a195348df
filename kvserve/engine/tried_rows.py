"""A row that goes through a model in a few passes to be looked at: what its leaves hold after each, and whether two of
them hold the same. It knows arrays, caches of any class and what their `state` holds; nothing of how they are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from kvserve.engine.kv_buffers import flat_caches, held_arrays, with_arrays

MAX_ERROR = 1e-2
"""How far arrays may be apart that were computed in the same pieces, as a share of the largest value."""


@dataclass(frozen=True, slots=True)
class TriedRow:
    """`of_leaf`: for each leaf its copies, as it was after each pass, when the row had so many tokens (`lengths`)."""

    tokens: list[int]
    lengths: list[int]
    of_leaf: list[tuple[Any, ...]]

    @classmethod
    def computed(
        cls, module: Callable[..., Any], new_caches: Callable[[], list[Any]], passes: Sequence[int]
    ) -> "TriedRow":
        tokens = [1 + (37 * place + place * place) % 89 for place in range(sum(passes))]
        caches, lengths, seen = new_caches(), list(accumulate(passes)), []
        for start, end in pairwise((0, *lengths)):
            run_pass(module, caches, tokens[start:end])
            seen.append([with_arrays(leaf, mx.contiguous) for leaf in flat_caches(caches)])
            mx.eval(held_arrays(seen[-1]))
        return cls(tokens, lengths, list(zip(*seen, strict=True)))


def run_pass(module: Callable[..., Any], caches: list[Any], tokens: Sequence[int]) -> None:
    """One pass. Logits are not computed: those of a thousand tokens take hundreds of megabytes."""
    module(mx.array([list(tokens)]), cache=caches)
    mx.eval(held_arrays(caches))


def are_stable(values: Sequence[mx.array], axis: int) -> bool:
    """Whether later arrays begin with the earlier ones."""
    return all(
        mx.array_equal(mx.take(later, mx.arange(earlier.shape[axis]), axis=axis), earlier)
        for earlier, later in pairwise(values)
    )


def are_alike(ours: Any, theirs: Any) -> bool:
    pairs = list(entries_of(ours)), list(entries_of(theirs))
    return len(pairs[0]) == len(pairs[1]) and all(_is_alike(*pair) for pair in zip(*pairs, strict=True))


def _is_alike(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, mx.array) or not isinstance(theirs, mx.array):
        return bool(type(ours) is type(theirs) and ours == theirs)
    if ours.shape != theirs.shape:
        return False
    if not ours.size or not mx.issubdtype(ours.dtype, mx.floating):
        return bool(mx.array_equal(ours, theirs))
    largest = float(mx.abs(theirs).max().item())  # type: ignore[arg-type]
    return bool(mx.allclose(ours, theirs, rtol=0, atol=MAX_ERROR * largest))


def entries_of(state: Any) -> Iterator[Any]:
    """What stands in a state, in order: lists, tuples and dicts taken apart."""
    if isinstance(state, list | tuple):
        for each in state:
            yield from entries_of(each)
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from entries_of(state[key])
    else:
        yield state


def mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """A state of the same build with each entry changed, in order."""
    if isinstance(state, list | tuple):
        return type(state)([mapped(each, change) for each in state])
    if isinstance(state, dict):
        return {key: mapped(state[key], change) for key in sorted(state, key=str)}
    return change(state)
