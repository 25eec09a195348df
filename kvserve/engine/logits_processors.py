"""The logits processors (see mlx-lm) of one row's own: a grammar keeps it in its form, a limit ends its thinking in
time, a reader takes the log-probabilities of its tokens.

They know llguidance's matcher, tags as text and the layout of logits; where grammars come from, what else a tag means,
and how tokens are spelt or sent is not their business.
"""

from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import mlx.core as mx
import numpy as np

from kvserve.core import Grammar, ThinkingLimit, TokenLogprobs
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

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these the grammar allows behind what it was shown last; all before it begins to hold."""
        return len(tokens) if self._after else int(self._matcher.validate_tokens(list(tokens)))

    def forced(self, begun: Sequence[int], max_num_tokens: int) -> list[int]:
        """The tokens that have to come behind what it was shown last and these: at each place no other is allowed. Most
        letters that are forced can be cut into tokens in several ways; such ones are not forced."""
        matcher, found, num_read = self._matcher, list[int](), 0
        if self._after or matcher.is_stopped():
            return found
        try:
            num_read = matcher.try_consume_tokens(list(begun))
            likely = matcher.compute_ff_tokens() if num_read == len(begun) else []
            for token in likely[:max_num_tokens]:
                llguidance.numpy.fill_next_token_bitmask(matcher, self._bitmask)
                if int(np.bitwise_count(self._bitmask.view(np.uint32)).sum()) != 1:
                    break
                num_read += matcher.try_consume_tokens([token])
                found.append(token)
        finally:  # the row's own tokens come next, whatever failed here
            matcher.rollback(num_read)
        return found

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


LOOK_EVERY_TOKENS = 64
"""Reading tokens waits for the step that computes them, so they are read when the limit may be near, else in rows."""


class ThinkingLimiter:
    """A logits processor (see mlx-lm) that ends one row's thinking in time. `tokens` (1-d) holds prompt and answer so
    far, `logits` is (1, vocabulary). A token that a processor before it has ruled out is not forced: it is waited for.
    """

    def __init__(self, limit: ThinkingLimit, num_prompt_tokens: int) -> None:
        self._limit = limit
        self._num_prompt_tokens = num_prompt_tokens
        self.reset()

    def reset(self) -> None:
        """Back to the end of the prompt: a row that enters a batch again gives its answer from the start."""
        self._is_open = self._limit.is_open
        self._num_thought = 0
        self._num_known_tokens = self._next_look = self._num_prompt_tokens
        self._text = ""
        self._last: tuple[int, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) < self._next_look:
            return logits
        for token in tokens[self._num_known_tokens :].tolist():  # type: ignore[union-attr]
            self._read(int(token))  # type: ignore[arg-type]
        self._num_known_tokens = len(tokens)
        num_left = self._limit.max_num_tokens - self._num_thought
        if self._is_open and num_left <= 0:
            return self._closing(logits)
        self._next_look = len(tokens) + max(1, min(num_left, LOOK_EVERY_TOKENS))
        return logits

    def _closing(self, logits: mx.array) -> mx.array:
        closing, last = self._limit.closing_ids, self._last
        num_written = max(count for count in range(len(closing)) if last[len(last) - count :] == closing[:count])
        token = closing[num_written]
        if logits[0, token].item() == -mx.inf:
            return logits
        return keep_only(mx.arange(logits.shape[-1]) == token, logits)

    def _read(self, token: int) -> None:
        """See whether a token ends or begins thinking, and count it if the model thinks then, as the usage does."""
        self._follow(token)
        self._num_thought += self._is_open

    def _follow(self, token: int) -> None:
        limit = self._limit
        self._last = (*self._last, token)[-len(limit.closing_ids) :]
        self._text += limit.decode((token,))
        if self._is_open:
            _, tag, behind = self._text.partition(limit.closing)
            self._is_open = not tag and self._last != limit.closing_ids
            self._text = self._text[-len(limit.closing) :] if self._is_open else behind
            return
        before, tag, behind = self._text.partition(limit.opening)
        line = before.rpartition("\n")[2]
        if tag:
            self._is_open = limit.anywhere or not line.strip()
            self._text = behind if self._is_open else f"~{behind}"
        elif _without_beginning(line, limit.opening).strip():  # of a line with text only the end can still begin a tag
            self._text = f"~{line[-len(limit.opening) :]}"
        else:
            self._text = line


def _without_beginning(line: str, tag: str) -> str:
    """The line without what its end has of the tag."""
    size = next((size for size in range(len(tag) - 1, 0, -1) if line.endswith(tag[:size])), 0)
    return line[: len(line) - size]


class LogprobReader:
    """A logits processor (see mlx-lm) that changes nothing and has to come before the others. One serves one row.

    What clients get is the model's own distribution: the log-softmax, in float32, of the logits as the model gave them,
    before temperature, penalties, biases and grammar. How a token was drawn changes nothing of it.

    A generator is one token ahead of what it hands out, and a row that enters again computes its next token anew: what
    is read is kept by the place of the token in prompt and answer, and the last reading of a place counts.
    """

    def __init__(self, num_top: int) -> None:
        """`num_top` of the likeliest tokens are given besides the one that was drawn."""
        self._num_top = num_top
        self._read: dict[int, tuple[mx.array, mx.array | None]] = {}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        logprobs = logits[0].astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs)
        num_top = min(self._num_top, logprobs.size)
        top = mx.argpartition(-logprobs, kth=num_top - 1)[:num_top] if num_top else None
        # Computed along with the step: they are there when the token is handed out.
        mx.async_eval(logprobs, *([] if top is None else [top]))  # type: ignore[no-untyped-call]
        self._read[len(tokens)] = (logprobs, top)
        return logits

    def take(self, place: int, token: int) -> TokenLogprobs:
        """What was read for the token at this place of prompt and answer, which is `token`; can be asked once.

        The drawn token comes before others that are as likely.
        """
        read, top = self._read.pop(place)
        logprobs: np.ndarray[Any, np.dtype[np.float32]] = np.array(read, copy=False)
        likely = {token, *top.tolist()} if top is not None else set()  # type: ignore[misc]
        ranked = sorted(likely, key=lambda each: (-logprobs[each], each != token, each))
        told = tuple((each, float(logprobs[each])) for each in ranked[: self._num_top])
        return TokenLogprobs(float(logprobs[token]), told)
