"""The log-probabilities of a row's tokens, for requests that ask for them. It knows the layout of logits and which
token was drawn; how tokens are spelt or sent is not its business.

What clients get is the model's own distribution: the log-softmax, in float32, of the logits as the model gave them,
before temperature, penalties, biases and grammar. How a token was drawn changes nothing of it.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from kvserve.core import TokenLogprobs


class LogprobReader:
    """A logits processor (see mlx-lm) that changes nothing and has to come before the others. One serves one row.

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
