"""How much of the device's memory this process keeps wired (Metal only), whatever generators would have it.

mlx-lm's `BatchGenerator` sets the process's limit to the recommended maximum where it is made, and puts back what it
found where it ends. On some machines wired memory, two streams and buffers that come and go make macOS panic
(ml-explore/mlx issue 3186), so the operator decides, and no generator touches the limit. Everything here belongs to the
engine thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream

from kvserve.engine.memory import MemoryPlan

_GENERATE: Any = import_module("mlx_lm.generate")  # the package has a function of this name


def wired_bytes(wanted: int | None, weight_bytes: int, plan: MemoryPlan) -> int:
    """The limit: what the operator says or, for None, weights, all KV and the buffers that chunks compute in."""
    return wanted if wanted is not None else weight_bytes + plan.all_pool_bytes + plan.buffer_bytes


class WiredLimit:
    """The limit of the process while a model is loaded; before and afterwards it is what it was found to be."""

    def __init__(self) -> None:
        self._found: int | None = None

    def begin(self, num_bytes: int) -> None:
        """Set the limit, at most what the device recommends. Nothing where there is no such limit."""
        most = mx.device_info().get("max_recommended_working_set_size")
        if most is None:
            return
        before = mx.set_wired_limit(min(num_bytes, int(most)))
        self._found = before if self._found is None else self._found

    def end(self) -> None:
        """Put back what was found. Idempotent."""
        if self._found is not None:
            mx.synchronize(generation_stream)
            mx.set_wired_limit(self._found)
            self._found = None


def batch_generator(module: Callable[..., Any], **settings: Any) -> Any:
    """A `BatchGenerator` that leaves the wired limit alone, from its birth to its end."""
    with _untouched():
        return BatchGenerator(module, stream=generation_stream, **settings)


@contextmanager
def _untouched() -> Iterator[None]:
    """The generator remembers no limit to put back, either: it finds none to be set. To set ours after it had set its
    own would wire everything for a moment at each birth, and unwire it again."""
    real = _GENERATE.maybe_set_recommended_wired_limit
    _GENERATE.maybe_set_recommended_wired_limit = lambda: None
    try:
        yield
    finally:
        _GENERATE.maybe_set_recommended_wired_limit = real
