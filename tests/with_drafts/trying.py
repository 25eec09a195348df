"""Servers that try drafts at every step, whatever a pass costs and however little is known, and a look at every answer
that they end: what they said is what the model says without drafts, and what they keep is what a cold row holds.

It knows the engine and what drafts; it knows no request and no protocol.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from kvserve.core import Draft, StopReason
from kvserve.drafting.text_drafter import TextDrafter
from kvserve.engine import decode, decode_group
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import DecodeResult, ExtractedRow, Group
from kvserve.engine.drafted import DraftedGenerator, DraftedRow
from kvserve.engine.model import LoadedModel
from kvserve.engine.rows import Row
from tests import serving
from tests.engine.led_drafts import TOLERANCE, assert_kept, drafts_tried

SPOILT_EVERY = 6
"""At so many places of an answer one is drafted wrongly, also where the drafter is sure."""

WIDEST = 8
ENOUGH_TOKENS = 8
"""Of an answer of so many something is drafted, where its row was by itself for long enough."""


@dataclass(slots=True)
class Tried:
    """What became of the passes, by how much of their drafts was right ("none", "some", "all"); how many answers ended
    of which something was drafted, and how many long ones without; how many were compared, and what was wrong."""

    num_passes: Counter[str] = field(default_factory=Counter)
    num_drafted: int = 0
    num_plain: int = 0
    num_compared: int = 0
    num_greedy: int = 0
    wrong: list[str] = field(default_factory=list)

    def take_wrong(self) -> list[str]:
        """What was wrong since it was asked last."""
        wrong, self.wrong = self.wrong, []
        return wrong


@contextmanager
def drafts_at_every_step() -> Iterator[Tried]:
    """Meanwhile servers that are told nothing else draft, and all that they draft goes through the model."""
    tried = Tried()
    with drafts_tried(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "SPECULATION", "auto")
        patch.setattr(TextDrafter, "propose", _guessing(TextDrafter.propose))
        patch.setattr(DraftedGenerator, "_verify", _counting(DraftedGenerator._verify, tried))
        _look_at_ends(patch, tried)
        yield tried


def _guessing(real: Callable[[TextDrafter, int], Draft | None]) -> Callable[[TextDrafter, int], Draft | None]:
    """What a drafter knows and, up to a width that changes from step to step, what followed its tokens before; wrong
    here and there."""

    def propose(self: TextDrafter, max_num_tokens: int) -> Draft | None:
        draft, known = real(self, max_num_tokens), list(self._answer.tokens)
        place, tokens = len(known), list(draft.tokens) if draft is not None else []
        width = min(max_num_tokens, max(len(tokens), 1 + place % WIDEST))
        followed = dict(pairwise(known))
        while len(tokens) < width:
            last = tokens[-1] if tokens else known[-1]
            tokens.append(followed.get(last, known[0]))
        tokens = [known[0] if (place + i) % SPOILT_EVERY == 0 else token for i, token in enumerate(tokens)]
        return Draft(tuple(tokens), (1.0,) * width, draft.source if draft is not None else "conversation")

    return propose


def _counting(real: Callable[..., list[int]], tried: Tried) -> Callable[..., list[int]]:
    def verify(self: DraftedGenerator, row: DraftedRow, draft: Draft, tokens: Sequence[int], given: int) -> list[int]:
        handed_out = real(self, row, draft, tokens, given)
        right = len(handed_out) - 1
        tried.num_passes["all" if right == len(tokens) else "some" if right else "none"] += 1
        return handed_out

    return verify


class _Here(threading.local):
    """What an engine's thread is just stepping: the model, and the rows that have left their generators."""

    def __init__(self) -> None:
        self.model: LoadedModel | None = None
        self.left: dict[Row, ExtractedRow] = {}


def _look_at_ends(patch: pytest.MonkeyPatch, tried: Tried) -> None:
    """Look at answers before their clients hear of the end: nothing that a test has replaced is back in place then."""
    here = _Here()
    real_step, real_left_row, real_finish = DecodePool._step_group, decode.left_row, Row.finish

    def step(pool: DecodePool, group: Group) -> DecodeResult:
        here.model = pool._model
        here.left.clear()
        return real_step(pool, group)

    def left_row(row: Row, *arguments: Any) -> ExtractedRow:
        here.left[row] = left = real_left_row(row, *arguments)
        return left

    def finish(row: Row, reason: StopReason, **more: int) -> None:
        row.is_over = True
        if row.drafts is not None and row.drafts.totals:
            tried.num_drafted += 1
            # One that is handed its last token on its way to another generator has left nothing yet.
            if (left := here.left.pop(row, None)) is not None and here.model is not None:
                _look_at(here.model, left, tried)
        elif len(row.generated) >= ENOUGH_TOKENS:
            tried.num_plain += 1
        real_finish(row, reason, **more)

    patch.setattr(DecodePool, "_step_group", step)
    patch.setattr(decode, "left_row", left_row)
    patch.setattr(Row, "finish", finish)


def _look_at(model: LoadedModel, left: ExtractedRow, tried: Tried) -> None:
    """Compare an answer that is over with the model's own. Pictures are not read here, so rows with some are left out,
    and so is quantised KV."""
    if left.row.request.prompt.images or model.quantiser is not None:
        return
    tried.num_compared += 1
    try:
        with mx.stream(generation_stream):
            assert_kept(model, replace(left, caches=deepcopy(left.caches)))
            if left.row.generated and _is_free(left.row):
                tried.num_greedy += 1
                assert_likeliest(model, left.row)
    except AssertionError as error:
        tried.wrong.append(f"{len(left.row.request.prompt)} + {len(left.row.generated)} tokens: {error}")


def _is_free(row: Row) -> bool:
    """Whether its tokens are the model's likeliest ones."""
    sampling = row.request.sampling
    is_bound = row.constraints or decode_group.processors_for(sampling, len(row.request.prompt))
    return sampling.temperature == 0 and not is_bound


def assert_likeliest(model: LoadedModel, row: Row) -> None:
    """Each token of an answer is the likeliest one behind those before it, by one plain pass."""
    tokens, start = row.tokens(), len(row.request.prompt)
    logits: Any = model.module(mx.array([tokens[:-1]]), cache=model.new_caches())[0, start - 1 :]
    drawn = mx.take_along_axis(logits, mx.array(tokens[start:])[:, None], axis=1)[:, 0]
    behind = mx.max(logits, axis=1) - drawn
    assert behind.max().item() <= TOLERANCE * 10, f"not the likeliest tokens: {behind.tolist()}"
