"""Decoding one row by itself, for models whose caches cannot be batched: a generator with room for one row.

It has the part of mlx-lm's `BatchGenerator` that the decode pool uses, and its order of things: logits, processors,
log-probabilities, sampler; the next token is being computed while the last one is handed out.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences, generation_stream
from mlx_lm.models.cache import TokenBuffer

from kvserve.engine.sampling import LogitsProcessor, Sampler

CLEAR_EVERY_TOKENS = 256
"""Caches that grow by concatenation leave a buffer of another size behind at every step, and MLX keeps them all."""


@dataclass(frozen=True, slots=True)
class Response:
    """One token of the row; with a `finish_reason` also its caches, which hold the KV of exactly `all_tokens`, this one
    among them or (`holds_token`) not."""

    uid: int
    token: int
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    all_tokens: list[int] | None = None
    holds_token: bool = True


@dataclass(slots=True, eq=False)
class _Row:
    """The row that decodes. `caches` hold the KV of `tokens`; `pending` (1,) comes next, and may not be computed yet.

    It has begun once the last prompt token has gone through the model.
    """

    uid: int
    pending: mx.array
    caches: list[Any]
    tokens: list[int]
    num_left: int
    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    matcher: Any  # StopSequences.Matcher, which is not typed
    context: Any  # TokenBuffer, likewise
    has_begun: bool = False

    def advance(self, module: Callable[..., Any], read: Callable[[mx.array], mx.array]) -> int:
        """Put the pending token through the model, begin to compute the one after it, and return the first of them."""
        taken = self.pending
        logits = module(taken[None], cache=self.caches)[:, -1, :]
        if self.processors:
            context = self.context.update_and_fetch(taken)
            for processor in self.processors:
                logits = processor(context, logits)
        self.pending = self.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.async_eval(self.pending)  # type: ignore[no-untyped-call]
        token = int(read(taken).item())  # type: ignore[arg-type]
        self.tokens.append(token)
        return token


class SoloGenerator:
    """Decodes one row at a time; rows of several generators take turns. Every method may run the model."""

    def __init__(self, module: Callable[..., Any], taken: Callable[[mx.array], mx.array] = lambda ids: ids) -> None:
        """`module(tokens (1, n), cache=caches)` gives logits (1, n, vocabulary). `taken(ids)`: those that its newest
        pass has taken for them."""
        self._module = module
        self._taken = taken
        self._row: _Row | None = None
        self._uids = count()

    def insert(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: Sequence[int],
        caches: Sequence[list[Any]],
        all_tokens: Sequence[list[int]],
        samplers: Sequence[Sampler],
        logits_processors: Sequence[Sequence[LogitsProcessor]],
        stop_sequences: Sequence[StopSequences],
    ) -> list[int]:
        """Take one row in, every argument with one element as `BatchGenerator` has it; returns its uid.

        The prompt is the row's last token, `caches` hold the KV of `all_tokens`, those before it, and are consumed.
        Raises ValueError for several rows, a row too many or a longer prompt.
        """
        [prompt] = prompts
        [last] = prompt
        if self._row is not None:
            raise ValueError("This generator decodes a row already.")
        uid = next(self._uids)
        self._row = _Row(
            uid=uid,
            pending=mx.array([last], dtype=mx.uint32),
            caches=caches[0],
            tokens=list(all_tokens[0]),
            num_left=max_tokens[0],
            sampler=samplers[0],
            processors=logits_processors[0],
            matcher=stop_sequences[0].matcher(),
            context=TokenBuffer(all_tokens[0]),  # type: ignore[no-untyped-call]
        )
        return [uid]

    def next(self) -> tuple[list[Any], list[Response]]:
        """The row's next token. Its first call puts the last prompt token through the model and answers nothing.

        The first list is always empty: it is where `BatchGenerator` reports prefills.
        """
        row = self._row
        if row is None:
            return [], []
        with mx.stream(generation_stream):
            token = row.advance(self._module, self._taken)
        if not row.has_begun:
            row.has_begun = True
            return [], []
        row.num_left -= 1
        if len(row.tokens) % CLEAR_EVERY_TOKENS == 0:
            mx.clear_cache()
        finish_reason = "stop" if row.matcher.advance(token) else "length" if row.num_left <= 0 else None
        if finish_reason is None:
            return [], [Response(row.uid, token)]
        self._row = None
        return [], [Response(row.uid, token, finish_reason, row.caches, row.tokens)]

    def drawn_token(self, uid: int) -> mx.array | None:
        """What the row's next step will hand out; None before its last prompt token has gone through the model."""
        row = self._row
        return row.pending[0] if row is not None and row.uid == uid and row.has_begun else None

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of rows' caches between two steps, and the tokens that these hold."""
        row = self._row
        if row is None or row.uid not in uids:
            return {}
        return {row.uid: (deepcopy(row.caches), list(row.tokens))}

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Take rows out between two steps; with `return_prompt_caches` their caches and the tokens these hold."""
        row = self._row
        if row is None or row.uid not in uids:
            return {}
        self._row = None
        return {row.uid: (row.caches, row.tokens)} if return_prompt_caches else {}

    def close(self) -> None:
        """Let go of the row."""
        self._row = None
