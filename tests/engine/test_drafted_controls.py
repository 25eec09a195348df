"""Negative controls of drafts: faults planted in how a row comes back from what it did not draw, each of which the law
of `test_drafted_law.py` must notice."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kvserve.engine import retreat
from kvserve.engine.drafted import DraftedGenerator, DraftedRow
from kvserve.engine.retreat import Retreat
from tests.engine.led_drafts import check_law, ways_of_drawing
from tests.engine.test_drafted_law import loaded
from tests.laws import sampled

type Plant = Callable[[pytest.MonkeyPatch], None]


def _kv_is_not_trimmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "trim", lambda _, num_tokens: num_tokens)


def _kv_is_trimmed_too_far(patch: pytest.MonkeyPatch) -> None:
    real: Any = KVCache.trim
    patch.setattr(KVCache, "trim", lambda self, num_tokens: real(self, num_tokens + 1))


def _states_stay(patch: pytest.MonkeyPatch) -> None:
    """They are behind tokens that are not the row's."""
    patch.setattr(retreat, "_put_back", lambda *_: None)


def _a_state_is_stale(patch: pytest.MonkeyPatch) -> None:
    """It went back, and the tokens since do not go through the model again."""
    real = Retreat.back

    def back(self: Retreat, num_passed: int, num_kept: int) -> int:
        real(self, num_passed, num_kept)
        return num_kept

    patch.setattr(Retreat, "back", back)


def _one_token_is_not_replayed(patch: pytest.MonkeyPatch) -> None:
    """All of them do but the first."""
    real = Retreat.back

    def back(self: Retreat, num_passed: int, num_kept: int) -> int:
        return min(num_kept, 1 + real(self, num_passed, num_kept))

    patch.setattr(Retreat, "back", back)


def _window_cut(num_more: int) -> Plant:
    """So many rows too many, under the right offset."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = retreat._cut_window

        def cut(leaf: Any, num_dropped: int) -> None:
            real(leaf, num_dropped + num_more)
            leaf.offset += num_more

        patch.setattr(retreat, "_cut_window", cut)

    return plant


def _drawn_with(change: Callable[[DraftedRow, mx.array, Any, list[int]], list[int]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = DraftedGenerator._drawn

        def drawn(self: Any, row: DraftedRow, logits: mx.array, draft: Any, *timing: Any) -> list[int]:
            return change(row, logits, draft, real(self, row, logits, draft, *timing))

        patch.setattr(DraftedGenerator, "_drawn", drawn)

    return plant


def _sampler_goes_on(row: DraftedRow, logits: mx.array, draft: Any, drawn: list[int]) -> list[int]:
    for _ in range(len(draft) + 1 - len(drawn)):
        row.sampler(logits[:1])
    return drawn


def _processors_see_it(row: DraftedRow, _logits: mx.array, draft: Any, drawn: list[int]) -> list[int]:
    if len(drawn) <= len(draft):
        row.context.update_and_fetch(mx.array([draft[len(drawn) - 1]]))
    return drawn


def _rejected_is_kept(_row: DraftedRow, _logits: mx.array, draft: Any, drawn: list[int]) -> list[int]:
    return [*draft[: len(drawn)], drawn[-1]] if len(drawn) <= len(draft) else drawn


def _one_more_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The caches of a row that is over hold the token behind its answer, which nobody was told."""
    real = DraftedGenerator._responses

    def responses(self: Any, row: DraftedRow, tokens: Any) -> Any:
        found = real(self, row, tokens)
        if found[-1].finish_reason is not None:
            self._module(row.pending[None], cache=row.caches)
        return found

    patch.setattr(DraftedGenerator, "_responses", responses)


def _answers_are_too_long(patch: pytest.MonkeyPatch) -> None:
    """A draft goes one token beyond the limit, and what is drawn there is kept."""
    real = DraftedGenerator._most_tokens

    def most_tokens(self: Any, row: DraftedRow) -> int:
        row.num_left += 1
        most = real(self, row)
        row.num_left -= 1
        return most

    patch.setattr(DraftedGenerator, "_most_tokens", most_tokens)


@dataclass(frozen=True, slots=True)
class Fault:
    plant: Plant
    family: str = "qwen3"
    drawing: str = "greedy"
    accepted: str = "half"


FAULTS = {
    "KV is not trimmed": Fault(_kv_is_not_trimmed),
    "KV is trimmed too far": Fault(_kv_is_trimmed_too_far),
    "states stay where they are": Fault(_states_stay, "qwen3_5"),
    "a state is stale": Fault(_a_state_is_stale, "qwen3_5"),
    "one token is not replayed": Fault(_one_token_is_not_replayed, "qwen3_5"),
    "a window keeps a wrong row": Fault(_window_cut(-1), "gemma3"),
    "a window loses a right row": Fault(_window_cut(1), "gemma3"),
    "the sampler draws for rejected tokens": Fault(_drawn_with(_sampler_goes_on), drawing="seeded"),
    "processors see a rejected token": Fault(_drawn_with(_processors_see_it), drawing="penalties"),
    "a rejected token is kept": Fault(_drawn_with(_rejected_is_kept)),
    "one row more is kept": Fault(_one_more_is_kept),
    "an answer is too long": Fault(_answers_are_too_long, accepted="all"),
}


@cache
def check_without_drafts(family: str, drawing: str) -> None:
    """Nothing of it happens there, whichever fault is planted: once is enough."""
    check_law(loaded(family), ways_of_drawing()[drawing], ())


@pytest.mark.parametrize("name", sampled(FAULTS, FAULTS))
def test_a_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law holds without the fault, which the law's own tests show, and not with it."""
    fault = FAULTS[name]
    model = loaded(fault.family)
    check_without_drafts(fault.family, fault.drawing)
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_law(model, ways_of_drawing()[fault.drawing], (fault.accepted,))
