"""A place that a row's caches come back to after tokens of which some were not its own, whatever their layers hold:
what can be cut is cut, all else is put back from before, by reference. It knows arrays and caches, no tokens' meaning.

A model that drafts goes on token by token, so its windows are written in place and its states are replaced. A second
handle on the same array makes MLX write elsewhere: the first of these passes copies a window, and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvserve.engine.borders import described, finding
from kvserve.engine.kv_buffers import flat_caches, held_arrays, with_arrays
from kvserve.engine.logits_error import logits_error
from kvserve.engine.model import LoadedModel

MAX_ERROR = 0.05
"""As in `self_check`: rounding stays far below it, a row that has one wrong token far above."""

_BEFORE, _AHEAD, _BEHIND = range(3, 22), range(40, 43), range(60, 62)
"""Tokens of the trial: the row's own, those that are taken back, and those that come in their place."""


def is_cut(leaf: Any) -> bool:
    """Whether a cache gives its newest tokens up by itself."""
    return type(leaf) is KVCache


@dataclass(frozen=True, slots=True)
class ReturnPoint:
    """Where a row stood. `before` has each leaf as it was, None for those that are cut."""

    before: tuple[Any, ...]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> "ReturnPoint":
        """Note where caches stand. Computes nothing."""
        return cls(tuple(None if is_cut(leaf) else _again(leaf) for leaf in flat_caches(caches)))

    @property
    def goes_anywhere(self) -> bool:
        """Whether the caches may stop on their way back: every leaf can be cut."""
        return all(each is None for each in self.before)

    def go_back(self, caches: Sequence[Any], num_ahead: int) -> None:
        """Take so many tokens out of the caches again: all that came since, or fewer where it goes anywhere."""
        for leaf, before in zip(flat_caches(caches), self.before, strict=True):
            if before is None:
                leaf.trim(num_ahead)
            else:
                vars(leaf).clear()
                vars(leaf).update(vars(_again(before)))


def _again(leaf: Any) -> Any:
    """The same arrays under handles of their own."""
    return with_arrays(leaf, lambda array: array.reshape(array.shape))


def why_no_return(model: LoadedModel) -> str | None:
    """Why a model's caches cannot come back, found out by a trial: a row that went ahead and came back must go on as
    one that never did. None where they can."""
    error = finding(lambda: _error_behind_return(model))
    if isinstance(error, Exception):
        return described(error)
    return None if error <= MAX_ERROR else f"behind tokens that were taken back its logits are off by {error:.0%}"


def _error_behind_return(model: LoadedModel) -> float:
    def run(caches: list[Any], tokens: Sequence[int]) -> mx.array:
        module: Callable[..., mx.array] = model.module
        logits = module(mx.array([[token % model.vocab_size for token in tokens]]), cache=caches)[0, -1]
        mx.eval(logits, held_arrays(caches))
        return logits

    straight, ahead = model.new_caches(), model.new_caches()
    run(straight, _BEFORE)
    run(ahead, _BEFORE)
    point = ReturnPoint.of(ahead)
    for token in _AHEAD:
        run(ahead, [token])
    point.go_back(ahead, len(_AHEAD))
    return max(logits_error(run(ahead, [token]), run(straight, [token])) for token in _BEHIND)
