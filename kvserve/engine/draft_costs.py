"""Whether drafts of the draft model pay: what its passes take, what a step of the target takes, and how much of what it
claims the target draws. All of it is measured. It knows seconds and counts, no tokens and no arrays.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

NUM_NEWEST = 15
"""Of so many steps or passes the median counts: one that something else delayed says nothing."""

MARGIN = 1.25
"""A drafted token must be expected to save so many times what it costs: the target's wider pass is not free either."""

PRIOR_TOKENS, PRIOR_TRUST, PRIOR_SHARE = 4.0, 0.8, 0.6
"""What a model is trusted before it was tried, which share of its tokens is drawn then, and how many tokens that
weighs."""

JUDGED_DECAY, UNUSED_DECAY = 0.98, 0.996
"""How much of what was learnt stays with every draft that was judged, and with every question that it was not used for:
a model that was left is tried again now and then, with another text."""

USUAL_ANSWER_TOKENS, ANSWER_WEIGHT = 200.0, 0.1

MAX_TRUST = 1.2
MAX_CHANCE = 0.99

LOST_STEPS = 3.0
"""Drafts that have lost the time of so many steps make the model rest."""

FIRST_REST_QUESTIONS, MAX_REST_QUESTIONS = 16, 1024


def _newest() -> deque[float]:
    return deque(maxlen=NUM_NEWEST)


@dataclass(slots=True, eq=False)
class DraftCosts:
    """What one draft model costs and brings beside one target, over all rows. Belongs to the engine thread.

    `prefill_seconds`: what a token of a prompt takes it. Rests, where drafts have cost more than they saved, get longer
    as long as that stays so.
    """

    prefill_seconds: float = 0.0
    _passes: deque[float] = field(default_factory=_newest)
    _steps: deque[float] = field(default_factory=_newest)
    _num_claimed: float = 0.0
    _num_judged: float = 0.0
    _num_accepted: float = 0.0
    _answer_tokens: float = USUAL_ANSWER_TOKENS
    _gain_seconds: float = 0.0
    _num_resting: int = 0
    _next_rest: int = FIRST_REST_QUESTIONS

    @property
    def pass_seconds(self) -> float:
        """What one token takes the draft model."""
        return median(self._passes) if self._passes else 0.0

    @property
    def step_seconds(self) -> float | None:
        """What one token takes without drafts; None before that was seen."""
        return median(self._steps) if self._steps else None

    @property
    def trust(self) -> float:
        """So much of what the model claims is accepted."""
        share = (self._num_accepted + PRIOR_TOKENS * PRIOR_TRUST) / (self._num_claimed + PRIOR_TOKENS)
        return min(MAX_TRUST, share)

    @property
    def drawn_share(self) -> float:
        """So many of its tokens that the target came to are drawn; a question that led to no draft counts as one that
        was not."""
        return (self._num_accepted + PRIOR_TOKENS * PRIOR_SHARE) / (self._num_judged + PRIOR_TOKENS)

    def chance(self, probability: float) -> float:
        """How likely the target draws a token that the draft model holds so likely."""
        return min(MAX_CHANCE, probability * self.trust)

    def pays(self, chance: float) -> bool:
        """Whether one more token is worth a pass, where it is so likely that this one is drawn."""
        step_seconds = self.step_seconds
        return step_seconds is not None and chance * step_seconds > MARGIN * self.pass_seconds

    @property
    def is_worth_it(self) -> bool:
        """Whether the model can be expected to save time at all; True before anything is known."""
        return self.step_seconds is None or self.pays(self.drawn_share)

    def earns_back(self, num_missing_tokens: int, num_left_tokens: int) -> bool:
        """Whether an answer of so many more tokens is likely to save what it costs to compute missing KV."""
        step_seconds, chance = self.step_seconds, self.drawn_share
        if step_seconds is None or not self.pays(chance):
            return False
        saved = num_left_tokens * (chance * step_seconds - self.pass_seconds)
        return num_missing_tokens * self.prefill_seconds <= saved

    def num_left_tokens(self, num_generated: int, max_tokens: int) -> int:
        """How much more of an answer is to be expected."""
        usual = max(self._answer_tokens - num_generated, self._answer_tokens / 2)
        return int(min(usual, max_tokens - num_generated))

    # --- what was measured --------------------------------------------------------------------------------------------

    def note_pass(self, seconds: float) -> None:
        """Learn from a pass of one token of the draft model."""
        self._passes.append(seconds)

    def note_step(self, seconds: float) -> None:
        """Learn from a step that gave one token, with nothing drafted."""
        self._steps.append(seconds)

    def note_answer(self, num_tokens: int) -> None:
        """Learn how long answers are."""
        self._answer_tokens += ANSWER_WEIGHT * (num_tokens - self._answer_tokens)

    def note_judged(self, num_claimed: float, num_judged: int, num_accepted: int) -> None:
        """Learn from a draft: the target came to so many of its tokens, of which `num_claimed` were to be expected, and
        drew so many."""
        self._num_judged = JUDGED_DECAY * self._num_judged + num_judged
        self._num_claimed = JUDGED_DECAY * self._num_claimed + num_claimed
        self._num_accepted = JUDGED_DECAY * self._num_accepted + num_accepted

    def note_nothing(self) -> None:
        """Learn from a pass behind which no token was likely enough."""
        self._num_judged = JUDGED_DECAY * self._num_judged + 1

    def note_outcome(self, seconds: float, num_tokens: int) -> None:
        """Learn what a draft, with what was done for it and the step that tried it, took for so many tokens. Where
        drafts take longer than plain steps, the model rests."""
        if (plain := self.step_seconds) is None:
            return
        self._gain_seconds = JUDGED_DECAY * self._gain_seconds + num_tokens * plain - seconds
        if self._gain_seconds > 0:
            self._next_rest = FIRST_REST_QUESTIONS
        elif self._gain_seconds < -LOST_STEPS * plain:
            self._gain_seconds = 0.0
            self._num_resting, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST_QUESTIONS)

    @property
    def is_resting(self) -> bool:
        """Whether the next question is one that the model is not used for."""
        return self._num_resting > 0

    def rests(self) -> bool:
        """Whether the model is not to be used for this question."""
        if self._num_resting:
            self._num_resting -= 1
            return True
        return False

    def note_unused(self) -> None:
        """Note a question for which nothing was drafted."""
        self._num_judged *= UNUSED_DECAY
        self._num_claimed *= UNUSED_DECAY
        self._num_accepted *= UNUSED_DECAY
