"""Samplers and processors chosen by a request's parameters."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

from kvserve.core import SamplingParams
from kvserve.engine.sampling import check_sampling, processors_for, sampler_for
from kvserve.errors import BadRequest

LOGPROBS = mx.log(mx.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))


def draws(params: SamplingParams, num_draws: int = 200) -> set[int]:
    sampler = sampler_for(params, 5)
    return {int(sampler(LOGPROBS).item()) for _ in range(num_draws)}


def test_equal_parameters_share_one_sampler() -> None:
    """Rows with the same parameters hold the same object, which keeps a batch's sampling vectorised."""
    one, two = (sampler_for(SamplingParams(temperature=0.5, top_k=3), 10) for _ in range(2))
    assert one is two
    assert sampler_for(SamplingParams(temperature=0.6, top_k=3), 10) is not one


@pytest.mark.parametrize("temperature", [0, 1e-9, 5e-324])
def test_no_temperature_is_greedy(temperature: float) -> None:
    """A temperature whose inverse leaves float range draws the likeliest token instead of nan."""
    assert sampler_for(SamplingParams(temperature=temperature), 5) is greedy_sampler


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 500}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
    ],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_truncation_limits_what_is_drawn(changes: dict[str, float], possible: set[int], seed: int | None) -> None:
    """top_k, top_p and min_p keep the likeliest tokens, seeded or not; a top_k beyond the vocabulary is off."""
    assert draws(SamplingParams(temperature=1.5, seed=seed, **changes)) == possible  # type: ignore[arg-type]


def test_a_top_p_of_zero_is_the_likeliest_token() -> None:
    """An empty nucleus still holds its first token."""
    assert sampler_for(SamplingParams(temperature=1.0, top_p=0), 5) is greedy_sampler


def test_negative_and_huge_seeds_are_seeds() -> None:
    """Any integer works as a seed."""
    for seed in (-1, 2**70):
        assert draws(SamplingParams(temperature=1.0, seed=seed), 3) <= {0, 1, 2, 3, 4}


def test_neutral_penalties_need_no_processor() -> None:
    """Without bias and penalties the batch keeps its fast path."""
    assert processors_for(SamplingParams(), 3) == []
    assert processors_for(SamplingParams(repetition_penalty=1.3, repetition_context_size=0), 3) == []


def apply(params: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> list[float]:
    logits = mx.ones((1, 4))
    for processor in processors_for(params, num_prompt_tokens):
        logits = processor(mx.array(tokens), logits)
    return [round(value, 3) for value in logits[0].tolist()]  # type: ignore[union-attr, arg-type, misc]


def test_repetition_sees_the_prompt_presence_and_frequency_the_answer() -> None:
    """The repetition penalty counts recent prompt tokens too; the OpenAI penalties only what was generated."""
    assert apply(SamplingParams(repetition_penalty=2.0), [0, 1], 2) == [0.5, 0.5, 1, 1]
    assert apply(SamplingParams(repetition_penalty=2.0, repetition_context_size=1), [0, 1], 2) == [1, 0.5, 1, 1]
    assert apply(SamplingParams(presence_penalty=0.5), [0, 1, 1, 2], 1) == [1, 0.5, 0.5, 1]
    assert apply(SamplingParams(frequency_penalty=0.5), [0, 1, 1, 2], 1) == [1, 0, 0.5, 1]
    assert apply(SamplingParams(logit_bias=((3, -1.0),)), [0], 1) == [1, 1, 1, 0]


def test_a_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    """logit_bias beyond the vocabulary is a 400, not an error inside the batch."""
    check_sampling(SamplingParams(logit_bias=((4, 1.0),)), 5)
    with pytest.raises(BadRequest, match="token 5"):
        check_sampling(SamplingParams(logit_bias=((5, 1.0),)), 5)
