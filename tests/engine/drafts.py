"""What tests of the draft model share: an engine whose model is drafted for by another one, costs that are given
instead of measured, and a drafter that knows nothing, so that the draft model is asked every time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import Draft, GenerationRequest
from kvserve.engine import draft_model
from kvserve.engine.draft_costs import DraftCosts
from kvserve.engine.pass_costs import PassCosts
from kvserve.engine.worker import Engine
from tests.engine.engines import request, running_engine
from tests.models import tiny_model


class Silent:
    """A drafter that never has anything to say."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Nothing is looked up."""

    def propose(self, max_num_tokens: int) -> Draft | None:
        return None

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """No draft is its own."""


def drafted(prompt: Sequence[int], max_tokens: int = 16, **changes: Any) -> GenerationRequest:
    """A request for which the draft model is asked at every step."""
    return replace(request(prompt, max_tokens, **changes), drafter=Silent())


class GivenCosts(DraftCosts):
    """The costs of a small model beside a large one: a step takes ten passes, and what a busy machine takes is not
    looked at."""

    @property
    def pass_seconds(self) -> float:
        return 0.1

    @property
    def step_seconds(self) -> float | None:
        return 1.0

    @property
    def prefill_seconds(self) -> float:
        return 0.001

    @prefill_seconds.setter
    def prefill_seconds(self, seconds: float) -> None:
        """Seconds are given."""

    def note_outcome(self, seconds: float, num_tokens: int) -> None:
        """Seconds are given."""


def _all_worth_it(
    costs: PassCosts, chances: Sequence[float], num_tokens: int, num_again: int, *, goes_back: bool
) -> int:
    """Every draft is tried, as wide as a pass may be, whatever a busy machine takes for it."""
    return min(len(chances), costs.max_width - 1 - num_again)


@contextmanager
def drafted_engine(family: str = "llama", draft: str | Path | None = None, **settings: Any) -> Iterator[Engine]:
    """An engine on a tiny model that another one drafts for; None: the same weights."""
    folder = draft if isinstance(draft, Path) else tiny_model(draft or family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "DraftCosts", GivenCosts)
        patch.setattr(PassCosts, "num_worth", _all_worth_it)
        patch.setattr(PassCosts, "is_worth_reading", lambda *_: True)
        with running_engine(family, draft_folder=folder, **settings) as engine:
            yield engine
