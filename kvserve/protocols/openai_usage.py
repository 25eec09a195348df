"""Encodes OpenAI's usage object, the same in streamed and whole answers of both generation endpoints."""

from kvserve.core import Usage


def encode_usage(usage: Usage) -> dict[str, object]:
    """Prompt tokens include cached and written tokens, completion tokens include reasoning tokens. Predictions are not
    used, so both of their counts are 0."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_written_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
