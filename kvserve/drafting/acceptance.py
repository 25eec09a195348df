"""How likely a drafted token is: from the match that it follows, and from how drafts fared before. One state per
reader: what became of somebody's drafts says something of what was read."""

import math
from typing import Final, Literal

from kvserve.core import DraftSource

_BIAS: Final = -2.8
_LENGTH: Final = 0.6
_SHARE: Final = 2.0
_PLACES: Final = 0.55
_AGAINST: Final = -0.55
"""A logistic regression over one half of the recorded sessions (`benchmarks/draft_fit.py`), made flatter until the
drafts that are tried hold there what they promise: those are chosen among many for their chances."""

_LED_BIAS: Final = -1.55
_LED_LENGTH: Final = 0.8
_LED_ALONG: Final = 0.25
_LED_REPLACED: Final = -1.2
_LED_MOVED: Final = -0.25
"""The same for a text that the answer went along with before it said something else (`benchmarks/draft_fit.py`)."""

_PREDICTED: Final = 1.0
"""A client knows more of what comes than a text that happens to match."""

MAX_COUNTED: Final = 64
_LOGS: Final = tuple(math.log2(number + 1) for number in range(MAX_COUNTED + 1))

READER_RATE: Final = 0.02
ANSWER_RATE: Final = 0.05
_MAX_SHIFT: Final = 3.0


type Kind = DraftSource | tuple[DraftSource, Literal["led"]]
"""What fares alike: drafts behind a match in texts of a source, or behind what was said in place of a token of one that
the answer went along with."""


class Acceptance:
    """How the drafts of each kind fared, as what that adds to the logit of their chance: learned by gradient steps, a
    token each. It belongs to the engine's thread."""

    def __init__(self, rate: float = READER_RATE) -> None:
        self._rate = rate
        self._shifts: dict[Kind, float] = {}

    def learn(self, kind: Kind, chance: float, is_right: bool) -> None:
        """A token that had this chance was right or not."""
        shift = self.shift(kind) + self._rate * (is_right - chance)
        self._shifts[kind] = max(-_MAX_SHIFT, min(_MAX_SHIFT, shift))

    def shift(self, kind: Kind) -> float:
        """What is added to the logit, 0 where nothing was learned."""
        return self._shifts.get(kind, 0.0)


def base_logit(source: DraftSource, *fared: Acceptance) -> float:
    """What all tokens of a draft have in common."""
    known = _BIAS + _PREDICTED if source == "prediction" else _BIAS
    return known + sum(each.shift(source) for each in fared)


def chance(base: float, num_matched: int, share: float, num_places: int, num_against: int) -> float:
    """How likely a token is that follows a match of so many tokens; `share` of the places that match, by their weight,
    go on with it, these are `num_places`; the longest match that goes on with another has `num_against` tokens."""
    logit = (
        base
        + _LENGTH * _LOGS[min(num_matched, MAX_COUNTED)]
        + _SHARE * share
        + _PLACES * _LOGS[min(num_places - 1, MAX_COUNTED)]
        + _AGAINST * _LOGS[min(num_against, MAX_COUNTED)]
    )
    return 1.0 / (1.0 + math.exp(-logit))


def led_logit(source: DraftSource, *fared: Acceptance) -> float:
    """The same for drafts behind what was said in place of a text's tokens."""
    return _LED_BIAS + sum(each.shift((source, "led")) for each in fared)


def led_chance(base: float, num_matched: int, num_along: int, *, is_moved: bool) -> float:
    """How likely a text goes on with its token of which so many before it were the answer's last ones, after it went
    along for `num_along`; `is_moved`: and then said more or fewer tokens than it left out."""
    logit = (
        base
        + _LED_LENGTH * _LOGS[min(num_matched, MAX_COUNTED)]
        + _LED_ALONG * _LOGS[min(num_along, MAX_COUNTED)]
        + _LED_REPLACED * (num_matched == 0)
        + _LED_MOVED * is_moved
    )
    return 1.0 / (1.0 + math.exp(-logit))
