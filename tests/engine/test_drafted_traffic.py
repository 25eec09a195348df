"""Rows that decode beside one another, some with drafts of every acceptance, whoever joins, leaves, ends or is looked
at in whatever order: each says what it says alone and plainly, and leaves what a cold row holds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvserve.core import GenerationRequest
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import ExtractedRow, drawn_token
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.rows import Row
from tests.engine.led_drafts import (
    ACCEPTED,
    PROMPT,
    Answered,
    BrokenStep,
    LedDrafter,
    answered,
    assert_kept,
    drafts_tried,
    entered,
    new_pool,
    row_of,
    said_plainly,
    ways_of_drawing,
)
from tests.engine.test_drafted_law import loaded
from tests.engine.test_kv_quantisation import WIDE, uniform
from tests.laws import sampled
from tests.models import tiny_model

NUM_ROWS, NUM_PLAYED = 6, 6
KINDS = ("qwen3", "glm4_moe_lite", "qwen3_5", "packed")


@dataclass(frozen=True, slots=True)
class Played:
    """A request, with drafts or without, and what it says alone."""

    request: GenerationRequest
    plain: Answered


def drawn_request(model: LoadedModel, chance: random.Random) -> Played:
    """Of any length, that ends by its length or by a stop token in the middle of what is drafted."""
    each = chance.choice(list(ways_of_drawing().values()))
    prompt = type(each.prompt)(each.prompt.ids[chance.randrange(70) :])
    each = replace(each, prompt=prompt, max_tokens=chance.choice([4, 11, 24, 40]))
    plain = said_plainly(model, each)
    if chance.random() < 0.4 and len(plain.tokens) > 3:
        stop = plain.tokens[chance.randrange(1, len(plain.tokens))]
        each = replace(each, stop_tokens=frozenset([stop]), turn_end=chance.choice([None, stop, 5]))
        plain = said_plainly(model, each)
    longer = said_plainly(model, replace(each, max_tokens=each.max_tokens + 8))
    if chance.random() < 0.75:
        known = [*longer.tokens, *each.stop_tokens, *PROMPT[:9]]
        drafter = LedDrafter(known, chance.choice(list(ACCEPTED.values())), chance.choice([1, 3, 6, 15]))
        each = replace(each, drafter=drafter)
    return Played(each, plain)


@dataclass(slots=True)
class Traffic:
    """The rows that decode, with what they say alone. `chance` decides what happens next."""

    model: LoadedModel
    chance: random.Random
    pool: DecodePool
    live: dict[Row, Answered]
    num_accepted_tokens: int = 0

    def run(self, waiting: Sequence[Played]) -> None:
        """Until all have come and are over."""
        to_come = list(waiting)
        with drafts_tried():
            while to_come or self.live:
                if to_come and (not self.live or self.chance.random() < 0.35):
                    played = to_come.pop()
                    row = row_of(played.request)
                    entered(self.pool, self.model, row)
                    self.live[row] = played.plain
                self._disturb()
                self._step()
        self.pool.discard()

    def _disturb(self) -> None:
        """One is cancelled now and then, and one looked at, as a turn that is kept meanwhile is."""
        self.live = {row: plain for row, plain in self.live.items() if not row.is_over}
        places = [(row, place) for row in self.live for place in self.pool._place_of(row)]
        begun = [row for row, (group, uid) in places if drawn_token(group.generator, uid) is not None]
        if not begun or (event := self.chance.random()) > 0.1:
            return
        row = self.chance.choice(begun)
        left = self.pool.remove(row) if event < 0.04 else self.pool.look_at(row)
        assert left is not None
        self._check_kept(left)
        if event < 0.04:
            assert tuple(row.generated) == self.live.pop(row).tokens[: len(row.generated)]

    def _step(self) -> None:
        step = self.pool.step() if self.chance.random() < 0.8 else self.pool.step_all()
        self.pool.settle()
        if step.failed or step.evicted:
            raise BrokenStep([row.failure or row.trouble for row in (*step.failed, *step.evicted)])
        for left in step.finished:
            if (plain := self.live.pop(left.row, None)) is None:
                continue
            found = answered(left.row, left)
            assert found.tokens == plain.tokens
            assert (found.end.reason, found.end.num_generated_tokens) == (
                plain.end.reason,
                plain.end.num_generated_tokens,
            )
            self._check_kept(left)
            self.num_accepted_tokens += found.end.drafting.num_accepted_tokens

    def _check_kept(self, left: ExtractedRow) -> None:
        """Quantised KV is not a cold row's."""
        if self.model.quantiser is None:
            assert_kept(self.model, left, may_have_moved=True)


def model_of(kind: str) -> LoadedModel:
    quantised: Any = uniform(8, 0)
    return load(tiny_model("qwen3", scale=WIDE), 131072, quantised) if kind == "packed" else loaded(kind)


@pytest.mark.parametrize("kind", sampled(KINDS, ()))
def test_whatever_happens_beside_it_a_row_says_what_it_says_alone(kind: str) -> None:
    model, num_accepted_tokens = model_of(kind), 0
    for seed in range(NUM_PLAYED):
        chance = random.Random(seed)
        traffic = Traffic(model, chance, new_pool(model), {})
        traffic.run([drawn_request(model, chance) for _ in range(NUM_ROWS)])
        num_accepted_tokens += traffic.num_accepted_tokens
    assert num_accepted_tokens
