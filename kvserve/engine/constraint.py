"""A row under a grammar: llguidance says which tokens may follow, here they are the only ones left in the logits.

It knows llguidance's matcher and the logits' layout; where grammars come from is not its business.
"""

from typing import Any

import llguidance
import llguidance.numpy
import mlx.core as mx
import numpy as np

from kvserve.core import Grammar
from kvserve.errors import BadRequest, EngineFailure


class GrammarProcessor:
    """A logits processor (see mlx-lm) that keeps one row inside its grammar.

    `tokens` (1-d) holds prompt and answer so far, `logits` is (1, vocabulary). The state advances by the last token of
    each call, so one object serves one row, from its first answer token on. `tokenizer` is an llguidance.LLTokenizer
    with at least as many tokens as the logits.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, num_prompt_tokens: int) -> None:
        """Takes up to half a second for a large grammar and touches no array: not for the engine thread.

        Raises EngineFailure for a grammar that llguidance cannot use, and BadRequest where the prompt has begun the
        answer in a way that the grammar does not go on from.
        """
        self._grammar = grammar
        self._begun = tokenizer.tokenize_str(grammar.begun) if grammar.begun else []
        self._num_prompt_tokens = num_prompt_tokens
        self._matcher = llguidance.LLMatcher(tokenizer, grammar.lark)
        self._bitmask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
        self.reset()

    def reset(self) -> None:
        """Back to the end of the prompt: a row that enters a batch again gives its answer from the start."""
        self._matcher.reset()
        self._check_matcher()
        if self._begun and self._matcher.try_consume_tokens(self._begun) < len(self._begun):
            raise BadRequest("The last message is no beginning of an answer in the promised form.", param="messages")
        self._after = list(self._grammar.after)
        self._num_known_tokens = self._num_prompt_tokens
        self._free: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for token in tokens[self._num_known_tokens :].tolist():  # type: ignore[union-attr]
            self._advance(int(token))  # type: ignore[arg-type]
        self._num_known_tokens = len(tokens)
        if self._after:
            return logits
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bitmask)
        self._check_matcher()
        bits = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little")[: logits.shape[-1]]
        return keep_only(mx.array(bits.astype(bool)), logits)

    def _check_matcher(self) -> None:
        """A matcher that broke down allows only the end of the text: without this the answer would pass for whole."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise EngineFailure(f"The promised form cannot be kept: {reason}")

    def _advance(self, token: int) -> None:
        if not self._after:
            self._matcher.consume_token(token)
            return
        self._free.append(token)
        if self._free[-len(self._after) :] == self._after:
            self._after = []


def keep_only(allowed: mx.array, logits: mx.array) -> mx.array:
    """The logits (1, vocabulary) of the allowed tokens (a mask, 1-d), those of all others minus infinity."""
    return mx.where(allowed[None], logits, -mx.inf)
