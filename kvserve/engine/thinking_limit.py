"""A row whose thinking is limited: its tokens are counted, and in time the tag that ends it is all that may follow.

It knows tags as text and the logits' layout; what else a tag means is not its business.
"""

import mlx.core as mx

from kvserve.core import ThinkingLimit
from kvserve.engine.constraint import keep_only

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
