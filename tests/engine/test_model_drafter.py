"""A row of the draft model goes on like one that never drafted, whatever came true; of several drafters what costs
nothing is asked first."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import Draft
from kvserve.engine.draft_row import DraftRow
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.model_drafter import ComposedDrafter
from kvserve.engine.prefill import Prefill
from kvserve.engine.return_point import ReturnPoint
from kvserve.engine.row_drafts import RowDrafts
from kvserve.engine.rows import RequestHandle, Row
from tests.engine.engines import prompt_of, request
from tests.laws import num_examples, sampled
from tests.models import tiny_model

KINDS = ("llama", "qwen3_5", "gemma3")
PROMPT = prompt_of(30)


@cache
def model_of(family: str) -> LoadedModel:
    return load(tiny_model(family), 131072)


def row_of(model: LoadedModel, tokens: Sequence[int]) -> DraftRow:
    lease: Any = None  # no chunk is computed
    row = Row(RequestHandle(request(tokens, 64)), lambda: None)
    return DraftRow(model, Prefill(row, lease, model.new_caches(), 0), model.vocab_size)


def always(_: float) -> bool:
    return True


def goes_on_as_it_was(model: LoadedModel, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a row that drafted, of which so many came true and then another token, says what a new row says."""
    row, tokens = row_of(model, PROMPT), list(PROMPT)
    for num_drafted, num_true, other in steps:
        row.settle()
        guesses = [token for token, _ in row.guesses(num_drafted, always)]
        new = [*guesses[:num_true], other]
        row.follow(new)
        tokens += new
    row.settle()
    [(found, probability)], [(expected, other_probability)] = (
        row.guesses(1, always),
        row_of(model, tokens).guesses(1, always),
    )
    return found == expected and abs(probability - other_probability) < 1e-3


STEPS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(300, 320)), min_size=1, max_size=5)


@pytest.mark.parametrize("family", sampled(KINDS, KINDS))
def test_a_row_goes_on_as_one_that_never_drafted(family: str) -> None:
    model = model_of(family)

    @settings(max_examples=num_examples(8), deadline=None)
    @given(STEPS)
    def holds(steps: list[tuple[int, int, int]]) -> None:
        assert goes_on_as_it_was(model, steps)

    holds()


@pytest.mark.parametrize("family", sampled(KINDS, ("qwen3_5",)))
def test_a_row_that_goes_back_one_token_too_few_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., None] = ReturnPoint.go_back

    def stale(point: ReturnPoint, caches: Sequence[Any], num_ahead: int) -> None:
        if point.goes_anywhere:
            real(point, caches, num_ahead - 1)

    monkeypatch.setattr(ReturnPoint, "go_back", stale)
    assert not goes_on_as_it_was(model_of(family), [(5, 0, 301), (5, 0, 302)])


class Given:
    """A drafter that says what it was given, and notes what it hears."""

    def __init__(self, draft: Draft | None) -> None:
        self.draft = draft
        self.heard: list[str] = []

    def follow(self, tokens: Sequence[int]) -> None:
        self.heard.append("follow")

    def propose(self, max_num_tokens: int) -> Draft | None:
        self.heard.append("propose")
        return self.draft

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        self.heard.append("judge")

    def pass_over(self) -> None:
        self.heard.append("pass over")

    def leave_to_others(self) -> None:
        self.heard.append("leave to others")


LIKELY = Draft((1, 2), (0.9, 0.1), "conversation")
UNLIKELY = Draft((1, 2), (0.2, 0.9), "records")
BY_MODEL = Draft((3, 4), (0.4, 0.4), "draft model")


@pytest.mark.parametrize(
    ("free", "by_model", "best", "heard"),
    [
        (LIKELY, BY_MODEL, LIKELY, ["pass over"]),
        (UNLIKELY, BY_MODEL, BY_MODEL, ["propose"]),
        (UNLIKELY, None, UNLIKELY, ["propose", "pass over"]),
        (None, BY_MODEL, BY_MODEL, ["propose"]),
        (None, None, None, ["propose"]),
    ],
)
def test_what_costs_nothing_is_asked_first(
    free: Draft | None, by_model: Draft | None, best: Draft | None, heard: list[str]
) -> None:
    model: Any = Given(by_model)
    composed = ComposedDrafter(Given(free))
    assert composed.propose(8) is free, "before its row has come there is no model"
    composed.model = model
    assert composed.propose(8) is best
    assert model.heard == heard


def test_beside_others_only_what_costs_nothing_is_asked() -> None:
    """The draft model hears that a step is none of its own: what the batch takes says nothing of it."""
    free, model = Given(LIKELY), Given(BY_MODEL)
    composed, untyped = ComposedDrafter(free), model
    drafts = RowDrafts(request(PROMPT, 8), composed)
    assert drafts.propose(None, 8, is_shared=True) == LIKELY
    composed.model = untyped  # type: ignore[assignment]
    assert drafts.propose(None, 8, is_shared=True) == LIKELY
    assert (free.heard, model.heard) == (["propose", "propose"], ["leave to others"])


@pytest.mark.parametrize(("free", "found", "heard"), [(LIKELY, LIKELY, ["pass over"]), (UNLIKELY, None, [])])
def test_before_the_pending_token_is_read_only_what_is_likely_is_drafted(
    free: Draft, found: Draft | None, heard: list[str]
) -> None:
    """Else it is read, and the draft model is asked behind it."""
    model: Any = Given(BY_MODEL)
    model.wants_pending, composed = True, ComposedDrafter(Given(free))
    composed.model = model
    drafts = RowDrafts(request(PROMPT, 8), composed)
    assert drafts.propose(None, 8) == found
    assert model.heard == heard and drafts.wants_pending


def test_each_drafter_hears_of_its_own() -> None:
    free, model = Given(LIKELY), Given(BY_MODEL)
    composed, untyped = ComposedDrafter(free), model
    composed.model = untyped  # type: ignore[assignment]
    composed.follow([1])
    composed.judge(LIKELY, 2, 1)
    assert (free.heard, model.heard) == (["follow", "judge"], ["follow"])
    composed.judge(BY_MODEL, 2, 1)
    assert model.heard == ["follow", "judge"]
