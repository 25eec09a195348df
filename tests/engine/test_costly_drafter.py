"""A drafter that computes is asked behind the token that was drawn, and what it computes is no part of a plain step.

The model is real; the clock is not: each pass takes so many seconds of a device that does one thing after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from kvserve.core import Draft
from kvserve.engine import drafted
from kvserve.engine.drafted import DraftedGenerator, DraftedRow
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.pass_costs import PassCosts
from kvserve.engine.retreat import known_way
from kvserve.engine.row_drafts import RowDrafts
from tests.engine.engines import prompt_of, request
from tests.engine.led_drafts import LedDrafter, drafts_tried
from tests.models import tiny_model

PROMPT = prompt_of(20)
PASS_SECONDS, DRAFT_SECONDS, DELIVERY_SECONDS = 10.0, 7.0, 0.5
NUM_STEPS = 8


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_model("qwen3"), 131072)


@dataclass(slots=True, eq=False)
class Device:
    """Computes what it is asked in order, and knows what time it is. `ends`: when each pass of the model was done."""

    now: float = 0.0
    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)
    num_waits: int = 0

    def clock(self) -> float:
        return self.now

    def begin(self, seconds: float) -> None:
        self.free_at = max(self.now, self.free_at) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def waited_for(self, token: mx.array) -> int:
        """Each token is read once; the first one is the prompt's, the next ones come from a pass each."""
        if self.num_waits:
            self.now = max(self.now, self.ends[self.num_waits - 1])
        self.num_waits += 1
        return int(token.item())  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class Computing:
    """Works for each draft, and finds none. `wants_pending`, or else it catches up with its row whatever comes next."""

    device: Device
    wants_pending: bool
    steps: list[float] = field(default_factory=list)

    def follow(self, tokens: Sequence[int]) -> None: ...

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None: ...

    def note_step(self, seconds: float) -> None:
        self.steps.append(seconds)

    def peek(self, max_num_tokens: int) -> Draft | None:
        return None

    def propose_free(self, max_num_tokens: int) -> Draft | None:
        raise AssertionError("the row decodes by itself")

    def propose(self, max_num_tokens: int) -> Draft | None:
        self.device.begin(DRAFT_SECONDS)
        self.device.wait()
        return None


def _nothing() -> None: ...


def generator_of(
    model: LoadedModel,
    drafter: Any,
    costs: PassCosts,
    module: Callable[..., Any] | None = None,
    send: Callable[[], None] = _nothing,
) -> DraftedGenerator:
    """With one row that has its prompt but for the last token."""
    caches = model.new_caches()
    model.module(mx.array([PROMPT[:-1]]), cache=caches)
    ways: list[Any] = [known_way(leaf) for leaf in flat_caches(caches)]
    found = DraftedGenerator(module or model.module, ways, costs, send)
    drafts = RowDrafts(request(PROMPT, 64), drafter)
    pending = mx.array(PROMPT[-1:], dtype=mx.uint32)
    greedy = partial(mx.argmax, axis=-1)
    found.insert(DraftedRow(caches, list(PROMPT[:-1]), pending, 64, greedy, [], drafts))
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setattr(drafted, "perf_counter", found.clock)
    monkeypatch.setattr(drafted, "_waited_for", found.waited_for)
    yield found


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is learnt of plain steps."""
    found: list[float] = []

    def note(self: PassCosts, width: int, num_tokens: int, seconds: float) -> None:
        if width == 1:
            found.append(seconds)

    monkeypatch.setattr(PassCosts, "note", note)
    return found


def step(model: LoadedModel, device: Device, drafter: Any, seconds_between: float = DELIVERY_SECONDS) -> None:
    """Some steps of a row, with so much between two of them."""
    generator = generator_of(model, drafter, PassCosts(), partial(_passed, model, device))
    for _ in range(NUM_STEPS):
        generator.next()
        device.now += seconds_between


def test_a_plain_step_takes_what_its_pass_takes(model: LoadedModel, device: Device, noted: list[float]) -> None:
    """Between two drafts that came to nothing; costs and drafter hear the same."""
    drafter = Computing(device, wants_pending=True)
    step(model, device, drafter)
    assert len(noted) >= NUM_STEPS - 3
    assert noted == drafter.steps == pytest.approx([PASS_SECONDS] * len(noted))


def test_a_step_behind_which_something_was_computed_is_not_timed(
    model: LoadedModel, device: Device, noted: list[float]
) -> None:
    """What the drafter waited for is not to be waited for again: such a step would seem to take no time."""
    step(model, device, Computing(device, wants_pending=False))
    assert noted == []


@pytest.mark.parametrize("drafter_of", [lambda device: Computing(device, wants_pending=True), lambda _: LedDrafter([])])
def test_a_pass_that_was_long_done_is_not_timed(
    model: LoadedModel, device: Device, noted: list[float], drafter_of: Callable[[Device], Any]
) -> None:
    """Another row was prefilled meanwhile."""
    step(model, device, drafter_of(device), 5 * PASS_SECONDS)
    assert noted == []


def test_without_drafts_a_step_takes_what_its_pass_takes(
    model: LoadedModel, device: Device, noted: list[float]
) -> None:
    """The device has the next pass when it is through with one, whatever is delivered meanwhile."""
    step(model, device, LedDrafter([]))
    assert len(noted) >= NUM_STEPS - 3
    assert noted == pytest.approx([PASS_SECONDS] * len(noted))


def _passed(model: LoadedModel, device: Device, tokens: mx.array, cache: Any) -> Any:
    device.begin(PASS_SECONDS * tokens.shape[1])
    device.ends.append(device.free_at)
    return model.module(tokens, cache=cache)


@dataclass(slots=True, eq=False)
class Wrong(Computing):
    """Drafts two tokens that are wrong, then nothing."""

    is_asked_again: bool = False

    def propose(self, max_num_tokens: int) -> Draft | None:
        Computing.propose(self, max_num_tokens)
        self.is_asked_again = not self.is_asked_again
        return Draft((1, 1), (0.9, 0.9), "draft model") if self.is_asked_again else None


def test_a_pass_in_which_tokens_go_again_is_no_plain_step(device: Device, noted: list[float]) -> None:
    """States come back to before a draft, and what was right of it passes once more with the next token."""
    model = load(tiny_model("qwen3_5"), 131072)
    generator = generator_of(model, Wrong(device, True), PassCosts(), partial(_passed, model, device))
    with drafts_tried():
        for _ in range(3 * NUM_STEPS):
            generator.next()
            device.now += DELIVERY_SECONDS
            device.num_waits = len(device.ends)
    assert set(noted) <= {PASS_SECONDS}


@dataclass(slots=True, eq=False)
class Costly(LedDrafter):
    """Drafts what the model will say. `asked_at`: how many tokens it knew when it had to compute."""

    wants_pending: bool = True
    free: Draft | None = None
    asked_at: list[int] = field(default_factory=list)

    def note_step(self, seconds: float) -> None: ...

    def peek(self, max_num_tokens: int) -> Draft | None:
        return self.free

    def propose_free(self, max_num_tokens: int) -> Draft | None:
        raise AssertionError("the row decodes by itself")

    def propose(self, max_num_tokens: int) -> Draft | None:
        self.asked_at.append(self.num_followed)
        return LedDrafter.propose(self, max_num_tokens)


def said(model: LoadedModel, drafter: Any, num_tokens: int) -> list[int]:
    generator, found = generator_of(model, drafter, PassCosts()), list[int]()
    with drafts_tried():
        while len(found) < num_tokens:
            found += [response.token for response in generator.next()[1]]
    return found[:num_tokens]


def test_what_computes_begins_behind_the_token_that_was_drawn(model: LoadedModel) -> None:
    """It knows that one whenever it computes, so that none of its tokens is one that was drawn already."""
    answer = said(model, LedDrafter([]), 24)
    drafter = Costly(answer, width=3)
    assert said(model, drafter, 20) == answer[:20]
    assert drafter.judged and all(pair == (3, 3) for pair in drafter.judged)
    assert drafter.asked_at == [1, 5, 9, 13, 17], "a pass brings three drafted tokens and one behind them"


def test_what_was_read_is_sent_before_anything_is_waited_for(model: LoadedModel) -> None:
    """The token behind it comes a pass and a draft later."""
    sent: list[int] = []
    drafter = Costly([], width=0)
    generator = generator_of(model, drafter, PassCosts(), send=lambda: sent.append(drafter.num_followed))
    for _ in range(4):
        generator.next()
    assert sent == [0, 1, 2] and drafter.asked_at == [1, 2, 3]


def test_what_is_likely_enough_is_tried_before_anything_is_computed(model: LoadedModel) -> None:
    answer = said(model, LedDrafter([]), 12)
    drafter = Costly(answer, free=Draft((answer[0] ^ 1, 7), (0.9, 0.9), "conversation"))
    generator = generator_of(model, drafter, PassCosts())
    with drafts_tried():
        generator.next()
        generator.next()
    assert drafter.judged[0] == (1, 0), "the token that was drawn is another one"
    assert drafter.asked_at == [1]
