"""What MLX compiles once for all lengths (`shapeless`) although its code counts a place from the end. It knows MLX, no
model's name.

`mx.argpartition(scores, kth=-n)` becomes a place from the front where a function is compiled: that of the first length.
At any other length its last n are not the n largest. On Metal a partition is a whole sort, so nothing shows; on a CPU
mlx-vlm's Hy V4 (`hy_v4/indexer.py`) read other tokens than its scores say, and which followed from the length that the
process had computed first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

PARTITIONS = frozenset({"argpartition", "partition"})
"""By their names in `mlx.core`."""

TRIED_LENGTHS = (3, 64)
NUM_TRIED_ROWS = 16
"""One row could come out right by chance."""

as_mlx_compiles: Any = mx.compile


def compile_for_true_lengths() -> None:
    """From now on nothing whose own code partitions is compiled for all lengths, where that would come out wrong.

    In the whole process, as libraries compile while a model runs too. It comes before a model is loaded: what was
    compiled earlier stays as it is. Idempotent."""
    if mx.compile is as_mlx_compiles and keeps_the_first_length():
        mx.compile = _compile


def keeps_the_first_length() -> bool:
    """Whether a compiled partition has the first length's place at another one too: on this device, as MLX is set."""
    partitioned = partial(as_mlx_compiles, shapeless=True)(_partitioned)
    for length in TRIED_LENGTHS:
        rows = mx.random.normal((NUM_TRIED_ROWS, length), key=mx.random.key(length))
        if not mx.array_equal(partitioned(rows)[:, -1], mx.argmax(rows, axis=-1)):
            return True
    return False


def _partitioned(rows: mx.array) -> mx.array:
    return mx.argpartition(rows, kth=-1, axis=-1)


def _compile(fun: Callable[..., Any], inputs: Any = None, outputs: Any = None, shapeless: bool = False) -> Any:
    """`mx.compile`; a function that partitions is returned as it is where it is to be compiled for all lengths."""
    names = getattr(getattr(fun, "__code__", None), "co_names", ())
    if shapeless and not PARTITIONS.isdisjoint(names):
        return fun
    return as_mlx_compiles(fun, inputs, outputs, shapeless)
