"""Which weights make the chances of drafts right, on the half of the recorded sessions that chooses them.

    python -m benchmarks.draft_fit

A logistic regression over every drafted token whose predecessors were right, by Newton's method, tried or not. Those of
`acceptance.py` are flatter: its table says what the drafts that are tried promise there and hold. It knows what the
drafter asks of `chance`, no model.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log2
from unittest.mock import patch

import numpy as np

from benchmarks.draft_replay import replay, table
from benchmarks.draft_sessions import halves, read_sessions
from benchmarks.recordings import shared_folder
from kvserve.core import Draft
from kvserve.drafting.acceptance import MAX_COUNTED, chance, led_chance
from kvserve.drafting.text_drafter import TextDrafter

NAMES = ("bias", "length", "share", "places", "against")
LED_NAMES = ("bias", "length", "along", "replaced", "moved")
MIN_REACH = 0.02
"""Drafts go on a little longer than usual: what is unlikely is to be known as such."""

NUM_STEPS = 30


@contextmanager
def _watched() -> Iterator[dict[bool, list[tuple[float, ...]]]]:
    """What spoke for each drafted token that was compared within the block, and whether it was right: of drafts behind
    what was said in place of a text's tokens (True), and of all others."""
    rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    spoke: list[tuple[float, ...]] = []
    propose, compare = TextDrafter.propose, TextDrafter._compare

    def proposed(self: TextDrafter, max_num_tokens: int) -> Draft | None:
        spoke.clear()  # drafters take turns: what the next comparisons are about
        return propose(self, max_num_tokens)

    def weighed(base: float, num_matched: int, share: float, num_places: int, num_against: int) -> float:
        longest, against = min(num_matched, MAX_COUNTED), min(num_against, MAX_COUNTED)
        spoke.append((1.0, log2(longest + 1), share, log2(num_places), log2(against + 1)))
        return chance(base, num_matched, share, num_places, num_against)

    def led(base: float, num_matched: int, num_along: int, *, is_moved: bool) -> float:
        lengths = (log2(min(number, MAX_COUNTED) + 1) for number in (num_matched, num_along))
        spoke.append((1.0, *lengths, num_matched == 0, is_moved))
        return led_chance(base, num_matched, num_along, is_moved=is_moved)

    def compared(self: TextDrafter, token: int) -> None:
        draft, place = self._open, self._num_followed
        if draft is not None and place < len(draft.tokens):
            rows[isinstance(self._open_kind, tuple)].append((*spoke[place], draft.tokens[place] == token))
        compare(self, token)

    with (
        patch("kvserve.drafting.text_drafter.chance", weighed),
        patch("kvserve.drafting.text_drafter.led_chance", led),
        patch("kvserve.drafting.text_drafter.MIN_REACH", MIN_REACH),
        patch.object(TextDrafter, "propose", proposed),
        patch.object(TextDrafter, "_compare", compared),
    ):
        yield rows


def fitted(rows: Sequence[tuple[float, ...]]) -> tuple[list[float], float]:
    """The weights under which the outcomes (each row's last value) are likeliest, and the mean log loss."""
    table = np.array(rows, np.float64)
    seen, outcomes = table[:, :-1], table[:, -1]
    weights = np.zeros(seen.shape[1])
    for _ in range(NUM_STEPS):
        chances = 1 / (1 + np.exp(-seen @ weights))
        slope = seen.T @ (outcomes - chances) - weights
        curve = (seen * (chances * (1 - chances))[:, None]).T @ seen + np.eye(len(weights))
        weights += np.linalg.solve(curve, slope)
    loss = -np.where(outcomes > 0, np.log(chances), np.log1p(-chances)).mean()
    return weights.tolist(), float(loss)


def main() -> int:
    """Print the weights that fit."""
    shared = shared_folder()
    if shared is None:
        print("The recordings and tokenizers (shared, in or beside the repository) are not here.", file=sys.stderr)
        return 2
    choosing, _ = halves(list(read_sessions(shared)))
    with _watched() as rows:
        tallies = replay(choosing)
    print("\n".join(table(tallies.values())))
    for is_led, names in ((False, NAMES), (True, LED_NAMES)):
        weights, loss = fitted(rows[is_led])
        print(", ".join(f"{name} {weight:.2f}" for name, weight in zip(names, weights, strict=True)))
        print(f"{len(rows[is_led]):,} tokens compared, log loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
