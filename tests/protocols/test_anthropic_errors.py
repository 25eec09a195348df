"""Error bodies of the Anthropic protocol: one golden file for every request error, as the anthropic SDK raises it."""

import json
from collections.abc import Callable

import pytest

from kvserve.errors import ContextOverflow, RequestError
from kvserve.protocols.error_bodies import ANTHROPIC_STATUSES, encode_anthropic_error
from tests.protocols.anthropic_wire import sdk_reading
from tests.protocols.test_openai_errors import ERRORS

EXPECTED: dict[str, str] = {
    "BadRequest": "BadRequestError",
    "ContextOverflow": "BadRequestError",
    "Unauthorized": "AuthenticationError",
    "Forbidden": "PermissionDeniedError",
    "NotFound": "NotFoundError",
    "QueueFull": "RateLimitError",
    "NotReady": "InternalServerError",
    "MemoryExhausted": "InternalServerError",
    "NoProgress": "InternalServerError",
    "EngineFailure": "InternalServerError",
}


def _status(error: RequestError) -> int:
    return ANTHROPIC_STATUSES.get(error.status, error.status)


def test_errors_have_their_wire_form(golden: Callable[[str, str], None]) -> None:
    """All bodies, by error name and the status that this protocol gives it."""
    bodies = {f"{type(error).__name__} {_status(error)}": encode_anthropic_error(error) for error, _ in ERRORS}
    golden("anthropic_errors.json", json.dumps(bodies, indent=1) + "\n")


@pytest.mark.parametrize("error", [error for error, _ in ERRORS], ids=lambda error: type(error).__name__)
def test_the_sdk_raises_its_own_class(error: RequestError) -> None:
    """The SDK recognises the error and shows its type and message."""
    import anthropic

    client = sdk_reading(json.dumps(encode_anthropic_error(error)), _status(error))
    with pytest.raises(getattr(anthropic, EXPECTED.get(type(error).__name__, "APIStatusError"))) as caught:
        client.messages.create(model="m", max_tokens=1, messages=[])
    assert caught.value.body == encode_anthropic_error(error)
    assert caught.value.status_code == _status(error)


def test_agents_recognise_a_prompt_that_is_too_long() -> None:
    """Both numbers, in the wording by which they know that they should shorten their conversation."""
    details = encode_anthropic_error(ContextOverflow(140_000, 131_072))["error"]
    assert isinstance(details, dict)
    assert details["message"] == "prompt is too long: 140000 tokens > 131072 maximum"
