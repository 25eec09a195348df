"""The facts of a request for whoever shows it: while it runs, and when it is over. Numbers and names only;
it imports `core` alone, because the terminal needs it before anything heavy is loaded."""

from dataclasses import dataclass
from typing import Literal

from kvserve.core import Drafting, RequestId, ReuseTier

LengthLimit = Literal["max_tokens", "DEFAULT_MAX_TOKENS", "context limit", "watchdog"]

Stage = Literal["waiting for model", "waiting", "prefill", "decode"]
"""Where a request is: until its `model` is loaded, in the engine's queue, or computed."""


@dataclass(frozen=True, slots=True)
class RunningFacts:
    """One request that is not over: how many of its prompt's tokens are in the KV cache, and what it has written."""

    request_id: RequestId
    protocol: str
    model: str
    session: str | None
    stage: Stage
    num_prompt_tokens: int
    num_done_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request, over. None where a thing was never reached: no first token, no finish, no error.

    `cut_by` says whose limit a `length` was; `cause` is why less was reused than could have been. `tier` is where the
    cached tokens came from, `num_matched_tokens` how deep the prompt was known, `num_prefilled_tokens` what of it was
    computed; `seconds` is the whole time since it was submitted, `seconds_saved` about what the cached tokens would
    have taken. `drafting` is what drafts did, with `tokens_per_step` tokens in a pass of the model.
    """

    request_id: RequestId
    protocol: str
    model: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    session: str | None = None
    ttft_seconds: float | None = None
    tokens_per_second: float | None = None
    finish_reason: str | None = None
    cut_by: LengthLimit | None = None
    error_status: int | None = None
    notes: tuple[str, ...] = ()
    cause: str | None = None
    tier: ReuseTier = "nothing"
    num_matched_tokens: int = 0
    num_prefilled_tokens: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    seconds: float = 0.0
    seconds_saved: float | None = None
    drafting: Drafting = Drafting()
    tokens_per_step: float | None = None
