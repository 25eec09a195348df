"""Decode passes of several ranks take the tokens that rank 0 has drawn: their ids are agreed on at the head of the
pass, within its graph, so that the next pass can be described before the tokens of the last one are read.

Followers draw what is likeliest, which counts for nothing but that it depends on their own logits: so all collectives
of a pass are done before the next pass's ids are agreed on, in one order on all ranks.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from kvserve.engine.ranks.place import Ranks
from kvserve.engine.token_dispatcher import SendingModule


class AgreedModule(SendingModule):
    """A model's module for decode passes of several ranks: ids (rows, 1) go in, and rank 0's are taken."""

    def __init__(self, module: Any, send_tokens: Callable[[], None], ranks: Ranks) -> None:
        super().__init__(module, send_tokens)
        self._ranks = ranks
        self.ids: mx.array = mx.array([], dtype=mx.uint32)
        """What the newest pass has taken (rows, 1)."""

    def __call__(self, ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for rank 0's ids, not evaluated yet."""
        self.ids = self._ranks.agreed_ids(ids)
        mx.async_eval(self.ids)  # type: ignore[no-untyped-call]  # it is read while the pass computes
        return super().__call__(self.ids, *args, **kwargs)

    def taken(self, ids: mx.array) -> mx.array:
        """The ids (rows,) that the newest pass has taken in place of these."""
        return self.ids[:, 0]


class FollowedBatch(GenerationBatch):
    """A follower's batch: its tokens are those that its passes have taken, not those that it has drawn."""

    model: Any
    tokens: Any

    @classmethod
    def take_over(cls, generator: Any) -> None:
        """Let a `BatchGenerator` without rows go on with such a batch."""
        generator._generation_batch = cls.empty(generator.model, generator.sampler)

    def _step(self) -> tuple[list[int], list[mx.array]]:
        _, logprobs = super()._step()
        ids: list[int] = self.model.ids[:, 0].tolist()
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens[-1] = token
        return ids, logprobs
