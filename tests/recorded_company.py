"""Recorded sessions alone and in company: small questions of the same client under the same session beside them."""

from collections.abc import Sequence

from benchmarks.model_free import ModelFree, Told
from benchmarks.recordings import MESSAGES, Conversation, Request, side_request
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.core import RequestId
from kvserve.protocols.anthropic_messages import parse_counted
from kvserve.requests.serve import count_tokens
from tests.models import tiny_model


def model_of(family: str) -> ModelFree:
    """A server that knows nothing, without its model."""
    return ModelFree(tiny_model(family), is_cuttable=CONVENTIONS[family].is_cuttable)


def lead(talk: Conversation, family: str, *, in_company: bool) -> list[Told]:
    """What a server that knows nothing tells of each request of a conversation.

    In company each comes behind a side request, and behind a count of its tokens where its API has one.
    """
    model, told = model_of(family), []
    for number, request in enumerate(talk.requests):
        counted = None
        if in_company:
            counted = _counted(model, request)
            model.serve(side_request(request, number), 1_000 + number)
        told.append(model.serve(request, number))
        assert counted in (None, told[-1].num_prompt_tokens)
    return told


def is_no_worse(alone: Sequence[Told], in_company: Sequence[Told]) -> bool:
    """Whether every request has the same prompt and reuses as much of it."""
    return all(
        other.num_cached_tokens >= one.num_cached_tokens and other.num_prompt_tokens == one.num_prompt_tokens
        for one, other in zip(alone, in_company, strict=True)
    )


def _counted(model: ModelFree, request: Request) -> int | None:
    """What count_tokens says of a request."""
    if request.path != MESSAGES:
        return None
    body = model.sent({key: value for key, value in request.body.items() if key != "max_tokens"})
    counted = parse_counted(body, request.headers, model.served.defaults, RequestId("count"))
    return count_tokens(counted, model.served)
