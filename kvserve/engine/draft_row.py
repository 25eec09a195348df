"""One row of the draft model: its caches hold the KV of the row's own first tokens, and of what it has drafted behind
them until that is taken back. It knows tokens and arrays; whether a draft pays is for others to say.

A draft is greedy: the model's likeliest token, one pass each. Of a draft whose tokens all came true nothing is computed
twice; else the caches go back, to the last token that came true or, where a layer cannot be cut, to before the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvserve.engine.model import LoadedModel
from kvserve.engine.prefill import ChunkLength, Prefill, reserve
from kvserve.engine.return_point import ReturnPoint
from kvserve.engine.rows import admitted_tokens

type Guess = tuple[int, float]
"""A token, and how likely the draft model holds it."""


@dataclass(slots=True, eq=False)
class DraftRow:
    """`prefill` has the row's own tokens and the caches; `num_vocab_tokens` is the target's: a token beyond them is
    never drawn. `_ahead` are drafted tokens that the caches hold behind the first `prefill.num_done` of the row's own,
    `_point` is where these end, and `_next` what the model holds likeliest there."""

    model: LoadedModel
    prefill: Prefill
    num_vocab_tokens: int
    _ahead: list[int] = field(default_factory=list)
    _point: ReturnPoint | None = None
    _next: Guess | None = None

    @property
    def num_missing(self) -> int:
        """Tokens that lack their KV, but for the last one, which is computed with the next draft."""
        return self.prefill.num_left

    def follow(self, tokens: list[int]) -> None:
        """Take these in as the row's next tokens; nothing is computed."""
        self.prefill.tokens.extend(tokens)

    def settle(self) -> None:
        """Keep of what was drafted what came true, and take back the rest."""
        ahead, prefill = self._ahead, self.prefill
        if not ahead or self._point is None:
            return
        self._ahead = []
        new = prefill.tokens[prefill.num_done : prefill.num_done + len(ahead) + 1]
        num_true = next((place for place, pair in enumerate(zip(ahead, new, strict=False)) if pair[0] != pair[1]), None)
        num_true = min(len(ahead), len(new)) if num_true is None else num_true
        if num_true == len(ahead) < len(new):
            prefill.num_done += num_true
            self._next = None
            return
        num_true = max(0, min(num_true, len(new) - 1)) if self._point.goes_anywhere else 0
        self._point.go_back(prefill.caches, len(ahead) - num_true)
        prefill.num_done += num_true
        self._next = self._next if num_true == 0 else None

    def compute_chunk(self, chunk_length: ChunkLength, max_seconds: float) -> int:
        """Compute some of the KV that is missing, in about so many seconds; how many tokens."""
        self._next = None
        return self.prefill.step(self.model, chunk_length, max_seconds)

    def cut(self, num_tokens: int) -> bool:
        """Hold no more than so many tokens, once it is settled; False where the caches hold more and cannot be cut."""
        num_over = self.prefill.num_done - num_tokens
        if num_over > 0:
            point = ReturnPoint.of(self.prefill.caches)
            if not point.goes_anywhere:
                return False
            point.go_back(self.prefill.caches, num_over)
            self.prefill.num_done, self._next = num_tokens, None
        return True

    def guesses(self, num_tokens: int, goes_on: Callable[[float], bool]) -> list[Guess]:
        """Up to so many tokens that the model holds likeliest next, as long as `goes_on`, which hears how likely each
        one is. Settled before; computes the row's last tokens first."""
        prefill = self.prefill
        if pending := prefill.tokens[prefill.num_done :]:
            reserve(prefill.caches, admitted_tokens(prefill.row))
            self._next = self._passed(pending)
            prefill.num_done += len(pending)
            self._point = ReturnPoint.of(prefill.caches)
        found: list[Guess] = []
        guess = self._next
        while guess is not None and len(found) < num_tokens and self._may_be(guess) and goes_on(guess[1]):
            found.append(guess)
            if len(found) < num_tokens:
                self._ahead.append(guess[0])
                guess = self._passed([guess[0]])
        return found

    def _may_be(self, guess: Guess) -> bool:
        return guess[0] < self.num_vocab_tokens

    def _passed(self, tokens: list[int]) -> Guess:
        """Put tokens through the model; what it holds likeliest behind them."""
        module: Callable[..., Any] = self.model.module
        logits = module(mx.array(tokens)[None], cache=self.prefill.caches)[0, -1].astype(mx.float32)
        token = mx.argmax(logits)
        probability = mx.exp(logits[token] - mx.logsumexp(logits))
        mx.eval(token, probability)
        return int(token.item()), float(probability.item())  # type: ignore[arg-type]
