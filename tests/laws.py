"""How much of a law every run tries, in examples and in parameters, and what `make full` adds. It knows no law."""

import math
import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

IS_FULL = os.environ.get("FULL_RUN") == "1"
"""Whether this is `make full`: every family and cell, and every law with more examples."""

_TIMES = 25 if IS_FULL else 0.3

TWO_KINDS = ("qwen3", "qwen3_5")
"""The least that shows a law of caches: one family whose layers can be cut anywhere, one with recurrent states."""

THREE_KINDS = (*TWO_KINDS, "gemma3")
"""And one with sliding windows, whose states can be cut nowhere either but hold rows of tokens."""


def num_examples(in_every_run: int) -> int:
    """For `max_examples`: three tenths of that many in the default run, but three, as the first one is the least that
    there is; twenty-five times as many in `make full`."""
    return max(math.ceil(in_every_run * _TIMES), min(in_every_run, 3))


def sampled(values: Iterable[Any], in_every_run: Container[Any]) -> list[Any]:
    """Parameters of a test: the named values run every time, the others, which show the same again, in `make full`.

    A law that runs with nine families costs nine times as much as with one. Only a repetition may be left out: every
    family is in the default run where its text is compared with mlx-lm's (`engine/test_worker.py`), one family of each
    kind of caches where warm and cold rows share a batch, THREE_KINDS where logits are compared, every situation with
    the kind that makes it hardest, and every planted fault.
    """
    return [pytest.param(value, marks=() if value in in_every_run else pytest.mark.long) for value in values]


def sampled_cells(is_in_every_run: Callable[..., bool]) -> pytest.MarkDecorator:
    """The same for a test of several parameters: asked with all of them by name, which combinations run every time."""
    return pytest.mark.sampled_cells(where=is_in_every_run)
