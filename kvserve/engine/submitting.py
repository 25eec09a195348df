"""What a request must be before it becomes a row: short enough, within memory, and with what keeps it in its form. It
runs on the thread of its caller and computes nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvserve.core import GenerationRequest
from kvserve.engine.admission import Budget
from kvserve.engine.logits_processors import GrammarProcessor, ThinkingLimiter
from kvserve.engine.memory import MemoryLedger
from kvserve.engine.model import LoadedModel
from kvserve.engine.sampling import check_sampling
from kvserve.errors import ContextOverflow


def check(request: GenerationRequest, model: LoadedModel, budget: Budget) -> None:
    """Raises ContextOverflow, BadRequest (logit_bias) or MemoryExhausted for a request that can never be answered."""
    num_prompt_tokens = len(request.prompt)
    if num_prompt_tokens >= model.context_limit:
        raise ContextOverflow(num_prompt_tokens, model.context_limit)
    check_sampling(request.sampling, model.vocab_size)
    budget.check(num_prompt_tokens, request.max_tokens)


def within_memory(request: GenerationRequest, budget: Budget, memory: MemoryLedger | None) -> GenerationRequest:
    """Shorten an answer that would outgrow the memory for running rows even alone."""
    num_prompt_tokens = len(request.prompt)
    most = budget.most_tokens(num_prompt_tokens + request.max_tokens) - num_prompt_tokens
    if most >= request.max_tokens or most < 1:
        return request
    if memory is not None:
        memory.press("running_rows", f"an answer ends after {most:,} tokens instead of {request.max_tokens:,}.")
    return replace(request, max_tokens=most)


def constraints_of(
    request: GenerationRequest, grammar_tokenizer: Callable[[], Any]
) -> tuple[GrammarProcessor | ThinkingLimiter, ...]:
    """The processors that keep a row in its form. The limit comes last: it forces nothing that the grammar forbids.

    Raises EngineFailure for a grammar that cannot be used.
    """
    constraints: list[GrammarProcessor | ThinkingLimiter] = []
    if request.grammar is not None:
        constraints.append(GrammarProcessor(request.grammar, grammar_tokenizer(), len(request.prompt)))
    if request.thinking_limit is not None:
        constraints.append(ThinkingLimiter(request.thinking_limit, len(request.prompt)))
    return tuple(constraints)
