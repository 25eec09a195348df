"""Error bodies: one golden file for every request error, as the openai SDK raises it."""

import json
from collections.abc import Callable

import openai
import pytest
from openai import OpenAI

from kvserve.errors import (
    BadRequest,
    BodyTooLarge,
    Conflict,
    ContextOverflow,
    EngineFailure,
    Forbidden,
    HeadersTooLarge,
    LengthRequired,
    MemoryExhausted,
    MethodNotAllowed,
    ModelNotFound,
    ModelUnavailable,
    NotFound,
    NotReady,
    QueueFull,
    RequestError,
    RequestTimeout,
    StorageFailure,
    Unauthorized,
)
from kvserve.protocols.openai_errors import encode_error

ERRORS: list[tuple[RequestError, type[openai.APIStatusError]]] = [
    (BadRequest("stop: expected an array, got 5.", param="stop"), openai.BadRequestError),
    (ContextOverflow(140_000, 131_072), openai.BadRequestError),
    (Unauthorized("The API key is missing or wrong."), openai.AuthenticationError),
    (Forbidden("The Host is not allowed."), openai.PermissionDeniedError),
    (NotFound("No such model.", param="model"), openai.NotFoundError),
    (ModelNotFound("No model of this name is on this machine.", param="model"), openai.NotFoundError),
    (Conflict("The agent exists already.", param="agent_id"), openai.ConflictError),
    (ModelUnavailable("The model could not be loaded."), openai.InternalServerError),
    (StorageFailure("The history could not be written."), openai.InternalServerError),
    (MethodNotAllowed("Use POST."), openai.APIStatusError),
    (RequestTimeout("The body did not arrive in time."), openai.APIStatusError),
    (LengthRequired("The body has no length."), openai.APIStatusError),
    (BodyTooLarge("The body is larger than 64 MiB."), openai.APIStatusError),
    (HeadersTooLarge("Too many headers."), openai.APIStatusError),
    (QueueFull("32 requests wait already.", retry_after_seconds=5), openai.RateLimitError),
    (NotReady("The model is still loading.", retry_after_seconds=2), openai.InternalServerError),
    (MemoryExhausted("The request does not fit into memory."), openai.InternalServerError),
    (EngineFailure("The model failed on this request."), openai.InternalServerError),
]


def test_every_request_error_is_listed() -> None:
    """A new error needs a golden file."""

    def leaves(kind: type[RequestError]) -> set[type[RequestError]]:
        return {kind}.union(*(leaves(child) for child in kind.__subclasses__()))

    assert {type(error) for error, _ in ERRORS} == leaves(RequestError) - {RequestError}


def test_errors_have_their_wire_form(golden: Callable[[str, str], None]) -> None:
    """All bodies, by error name and status."""
    bodies = {f"{type(error).__name__} {error.status}": encode_error(error) for error, _ in ERRORS}
    golden("errors.json", json.dumps(bodies, indent=1) + "\n")


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: type(value).__name__)
def test_the_sdk_raises_its_own_class(
    error: RequestError, expected: type[openai.APIStatusError], sdk_reading: Callable[..., OpenAI]
) -> None:
    """The SDK recognises the error and finds its parameter and code."""
    client = sdk_reading(json.dumps(encode_error(error)), error.status)
    with pytest.raises(expected) as caught:
        client.chat.completions.create(model="m", messages=[])
    assert (caught.value.param, caught.value.code) == (error.param, error.code)
    assert error.message in caught.value.message
