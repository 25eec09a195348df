"""A drafter that is led: it knows the answer beforehand and spoils it, so that a model which copies nothing accepts as
much as one that edits a file. It knows tokens only, and no engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core.drafting import Draft, DraftSource

NUM_DRAFTED = 8
"""Tokens of a draft at most, as in the trials that OF_EDITS is from."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What drafts are to be like: tokens a step, and the share of drafted tokens that the model draws itself."""

    tokens_a_step: float
    acceptance: float


OF_EDITS = Wanted(1.8, 0.5)
"""What plain prompt lookup gave where the demo's model was to rename a function; drafts were there in a fifth of the
steps."""


@dataclass(frozen=True, slots=True)
class Lead:
    """How much a led drafter knows: at `known` of the places it has a draft, whose tokens are wrong at `spoiled`."""

    known: float
    spoiled: float


def lead_for(wanted: Wanted) -> Lead:
    """The lead that makes drafts so, where the model tries them whole.

    Mostly the engine has drawn the first token of a draft already, without having read it: then the draft is of no use
    where that is wrong, and one token shorter where it is right.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        spoiled = (low + high) / 2
        low, high = (spoiled, high) if _num_accepted(spoiled) > wanted.acceptance * NUM_DRAFTED else (low, spoiled)
    num_gained = _num_accepted(low) * (1 - low) * (NUM_DRAFTED - 1) / NUM_DRAFTED
    return Lead(min(1.0, (wanted.tokens_a_step - 1) / max(num_gained, 1e-9)), low)


def _num_accepted(spoiled: float) -> float:
    """Tokens of a whole draft that are right, and all before them."""
    return sum((1 - spoiled) ** place for place in range(1, NUM_DRAFTED + 1))


class LedDrafter:
    """Drafts one answer, of which it knows all tokens. Nothing is drafted any more once another token was drawn."""

    def __init__(self, answer: Sequence[int], lead: Lead, seed: int, source: DraftSource = "conversation") -> None:
        rng = random.Random(seed)
        self._answer = tuple(answer)
        self._is_known = [rng.random() < lead.known for _ in answer]
        # the id beside it is another token, and one of the vocabulary, whose size is even
        self._drafts = tuple(token ^ 1 if rng.random() < lead.spoiled else token for token in answer)
        self._chance = 1 - lead.spoiled
        self._source = source
        self._place = 0
        self._is_lost = False

    def follow(self, tokens: Sequence[int]) -> None:
        """Take these in as the answer's next tokens."""
        end = self._place + len(tokens)
        self._is_lost = self._is_lost or tuple(tokens) != self._answer[self._place : end]
        self._place = end

    def propose(self, max_num_tokens: int) -> Draft | None:
        """What may follow, at most so many tokens."""
        start = self._place
        tokens = self._drafts[start : start + min(max_num_tokens, NUM_DRAFTED)]
        if self._is_lost or not tokens or not self._is_known[start]:
            return None
        return Draft(tokens, (self._chance,) * len(tokens), self._source)

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """A led drafter learns nothing."""
