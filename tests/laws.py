"""How much of a law every run tries, in examples and in parameters, and what `make long` adds. It knows no law."""

import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

IS_FULL = os.environ.get("FULL_RUN") == "1"
"""Whether this is `make full`: every family and cell, and every law with more examples."""

_TIMES = 10 if IS_FULL else 1

TWO_KINDS = ("qwen3", "qwen3_5")
"""The least that shows a law of caches: one family whose layers can be cut anywhere, one with recurrent states."""

THREE_KINDS = (*TWO_KINDS, "gemma3")
"""And one with sliding windows, whose states can be cut nowhere either but hold rows of tokens."""


def num_examples(in_every_run: int) -> int:
    """For `max_examples`: that many, ten times as many in `make full`."""
    return in_every_run * _TIMES


def sampled(values: Iterable[Any], in_every_run: Container[Any]) -> list[Any]:
    """Parameters of a test: the named values run every time, the others, which show the same again, in `make long`.

    The default run is to stay below ten minutes on two cores, and a law that runs with nine families is nine times as
    dear as one. Only a repetition may be left out: every family is in the default run where text is compared with that
    of a cold server (`test_warm_and_cold_rows_share_a_batch`) and of mlx-lm (`engine/test_worker.py`), THREE_KINDS are
    where logits are compared, every situation is there with TWO_KINDS at least, and so is every planted fault.
    """
    return [pytest.param(value, marks=() if value in in_every_run else pytest.mark.long) for value in values]


def sampled_cells(is_in_every_run: Callable[..., bool]) -> pytest.MarkDecorator:
    """The same for a test of several parameters: asked with all of them by name, which combinations run every time."""
    return pytest.mark.sampled_cells(where=is_in_every_run)
