"""Error bodies: one golden file for every request error, as the openai SDK raises it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvserve.errors import (
    BadRequest,
    BodyTooLarge,
    Conflict,
    ContextOverflow,
    EngineFailure,
    Forbidden,
    HeadersTooLarge,
    LengthRequired,
    LimitReached,
    MemoryExhausted,
    MethodNotAllowed,
    ModelNotFound,
    ModelUnavailable,
    NoProgress,
    NotFound,
    NotReady,
    QueueFull,
    RankLost,
    RequestError,
    RequestTimeout,
    StorageFailure,
    Unauthorized,
)
from kvserve.protocols.error_bodies import encode_openai_error

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI

ERRORS: list[tuple[RequestError, str]] = [
    (BadRequest("stop: expected an array, got 5.", param="stop"), "BadRequestError"),
    (ContextOverflow(140_000, 131_072), "BadRequestError"),
    (Unauthorized("The API key is missing or wrong."), "AuthenticationError"),
    (Forbidden("The Host is not allowed."), "PermissionDeniedError"),
    (NotFound("No such model.", param="model"), "NotFoundError"),
    (ModelNotFound("No model of this name is on this machine.", param="model"), "NotFoundError"),
    (Conflict("The agent exists already.", param="agent_id"), "ConflictError"),
    (ModelUnavailable("The model could not be loaded."), "InternalServerError"),
    (StorageFailure("The history could not be written."), "InternalServerError"),
    (MethodNotAllowed("Use POST."), "APIStatusError"),
    (RequestTimeout("The body did not arrive in time."), "APIStatusError"),
    (LengthRequired("The body has no length."), "APIStatusError"),
    (BodyTooLarge("The body is larger than 64 MiB."), "APIStatusError"),
    (HeadersTooLarge("Too many headers."), "APIStatusError"),
    (QueueFull("32 requests wait already.", retry_after_seconds=5), "RateLimitError"),
    (LimitReached("anna may begin 3 requests in a minute.", retry_after_seconds=53), "RateLimitError"),
    (NotReady("The model is still loading.", retry_after_seconds=2), "InternalServerError"),
    (RankLost("rank 1 is gone"), "InternalServerError"),
    (MemoryExhausted("The request does not fit into memory."), "InternalServerError"),
    (NoProgress(600), "InternalServerError"),
    (EngineFailure("The model failed on this request."), "InternalServerError"),
]


def test_every_request_error_is_listed() -> None:
    """A new error needs a golden file."""

    def leaves(kind: type[RequestError]) -> set[type[RequestError]]:
        return {kind}.union(*(leaves(child) for child in kind.__subclasses__()))

    assert {type(error) for error, _ in ERRORS} == leaves(RequestError) - {RequestError}


def test_errors_have_their_wire_form(golden: Callable[[str, str], None]) -> None:
    """All bodies, by error name and status."""
    bodies = {f"{type(error).__name__} {error.status}": encode_openai_error(error) for error, _ in ERRORS}
    golden("errors.json", json.dumps(bodies, indent=1) + "\n")


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: type(value).__name__)
def test_the_sdk_raises_its_own_class(error: RequestError, expected: str, sdk_reading: Callable[..., OpenAI]) -> None:
    """The SDK recognises the error and finds its parameter and code."""
    import openai

    client = sdk_reading(json.dumps(encode_openai_error(error)), error.status)
    with pytest.raises(getattr(openai, expected)) as caught:
        client.chat.completions.create(model="m", messages=[])
    assert (caught.value.param, caught.value.code) == (error.param, error.code)
    assert error.message in caught.value.message
