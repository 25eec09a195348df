"""How a row draws its next token: mlx-lm's samplers and logits processors, chosen by a request's parameters.

Rows without a seed share one sampler object per set of parameters, because mlx-lm samples a batch in one call only
when every row holds the same object. A seeded row has a sampler of its own, whose random keys follow from the seed and
the place of each token in the answer: a row that enters again, whatever for, goes on as if it had never left.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import count

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_frequency_penalty,
    make_logits_processors,
    make_presence_penalty,
    make_repetition_penalty,
    make_sampler,
)

from kvserve.core import SamplingParams
from kvserve.errors import BadRequest

type Sampler = Callable[[mx.array], mx.array]
type LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

GREEDY_BELOW_TEMPERATURE = 1e-4
"""Below it 1 / temperature leaves float range, and the draw is the likeliest token anyway."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadRequest for what would make a sampler raise inside a batch that other rows share."""
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"logit_bias names token {token}, but the model has the tokens 0 to {vocab_size - 1}.",
                param="logit_bias",
            )


def sampler_for(params: SamplingParams, vocab_size: int, num_drawn: int = 0) -> Sampler:
    """The sampler of a request that has so many tokens of its answer: log-probabilities (rows, vocabulary) -> token ids
    (rows,), uint32."""
    if params.temperature < GREEDY_BELOW_TEMPERATURE or params.top_p == 0:  # to mlx-lm a top_p of 0 is off
        return greedy_sampler
    top_p = params.top_p if params.top_p < 1 else 0.0  # what does nothing is off
    top_k = params.top_k if params.top_k < vocab_size else 0
    if params.seed is None:
        return _shared_sampler(params.temperature, top_p, params.min_p, top_k)
    return _seeded_sampler(params.seed, num_drawn, params.temperature, top_p, params.min_p, top_k)


@lru_cache(maxsize=256)
def _shared_sampler(temperature: float, top_p: float, min_p: float, top_k: int) -> Sampler:
    return make_sampler(temp=temperature, top_p=top_p, min_p=min_p, top_k=top_k)


def _seeded_sampler(seed: int, num_drawn: int, temperature: float, top_p: float, min_p: float, top_k: int) -> Sampler:
    base = mx.random.split(mx.random.key(seed % 2**64))[0]  # else seed 1 at place 2 were seed 2 at place 1
    places = count(num_drawn)

    def sample(logprobs: mx.array) -> mx.array:
        draw = base ^ mx.random.key(next(places))
        if top_p:
            logprobs = apply_top_p(logprobs, top_p)
        if min_p:
            logprobs = apply_min_p(logprobs, min_p)
        if top_k:
            logprobs = apply_top_k(logprobs, top_k)
        return mx.random.categorical(logprobs * (1 / temperature), key=draw)

    return sample


def processors_for(params: SamplingParams, num_prompt_tokens: int) -> list[LogitsProcessor]:
    """The logits processors of a request, in order; empty where nothing is to be done (then the batch stays fast).

    The repetition penalty sees the last `repetition_context_size` tokens of prompt and answer; presence and frequency
    penalties see the answer only, as OpenAI defines them.
    """
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors += make_logits_processors(logit_bias=dict(params.logit_bias))
    if params.repetition_penalty != 1 and params.repetition_context_size:
        processors.append(make_repetition_penalty(params.repetition_penalty, params.repetition_context_size))
    whole_answer = 2**31
    if params.presence_penalty:
        processors.append(_on_answer(make_presence_penalty(params.presence_penalty, whole_answer), num_prompt_tokens))
    if params.frequency_penalty:
        processors.append(_on_answer(make_frequency_penalty(params.frequency_penalty, whole_answer), num_prompt_tokens))
    return processors


def _on_answer(processor: LogitsProcessor, num_prompt_tokens: int) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(tokens[num_prompt_tokens:], logits)

    return process
