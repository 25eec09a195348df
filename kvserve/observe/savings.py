"""How many seconds of prefill a request's reuse has saved, reckoned by how long prefill took here, and which request
was a conversation's first warm one. It knows facts, no text. Safe for several threads."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from kvserve.requests.request_facts import RequestFacts

MIN_MEASURED_TOKENS = 32
"""A shorter prefill is mostly what every request costs."""

MIN_WARM_TOKENS = 64
"""Less is a beginning that any two prompts may share."""

_WINDOW_SECONDS = 120.0
"""Prefill of about so long counts; what was measured earlier counts half, and half again."""

MAX_CONVERSATIONS = 4_096


@dataclass(slots=True)
class _Measured:
    num_tokens: float = 0.0
    seconds: float = 0.0


class Savings:
    """What prefill takes each model, as its requests measured it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured: dict[str, _Measured] = {}
        self._warm: OrderedDict[Hashable, None] = OrderedDict()

    def seconds_saved(self, facts: RequestFacts) -> float | None:
        """Measure this request too, and reckon what its cached tokens would have taken; None as long as that is not
        known. The true time grows with the context; this is the mean."""
        with self._lock:
            measured = self._measured.setdefault(facts.model, _Measured())
            if facts.prefill_seconds and facts.num_prefilled_tokens >= MIN_MEASURED_TOKENS:
                if measured.seconds > _WINDOW_SECONDS:
                    measured.num_tokens, measured.seconds = measured.num_tokens / 2, measured.seconds / 2
                measured.num_tokens += facts.num_prefilled_tokens
                measured.seconds += facts.prefill_seconds
        return self.seconds_of(facts.model, facts.num_cached_tokens)

    def seconds_of(self, model: str, num_tokens: int) -> float | None:
        """What so many tokens of prefill take about; None as long as that is not known."""
        with self._lock:
            measured = self._measured.get(model)
            if measured is None or not measured.num_tokens:
                return None
            return num_tokens * measured.seconds / measured.num_tokens

    def is_first_warm(self, facts: RequestFacts, branch: Hashable, parent: Hashable) -> bool:
        """Whether this is the first request of its conversation that reused a good part of its prompt; a branch of one
        that had such a request is told of no more."""
        if facts.num_cached_tokens < max(MIN_WARM_TOKENS, facts.num_prompt_tokens // 2):
            return False
        with self._lock:
            is_known = branch in self._warm or parent in self._warm
            self._warm[branch] = None
            self._warm.move_to_end(branch)
            while len(self._warm) > MAX_CONVERSATIONS:
                self._warm.popitem(last=False)
        return not is_known

    def clear(self) -> None:
        """Forget conversations; what prefill takes stays."""
        with self._lock:
            self._warm.clear()
