"""Encodes request errors as OpenAI's and as Anthropic's error body. This file knows the wires' error types, not the
status line."""

from collections.abc import Mapping

from kvserve.core import JsonObject
from kvserve.errors import ContextOverflow, RequestError

ANTHROPIC_STATUSES: Mapping[int, int] = {503: 529}
"""Anthropic's protocol has its own status for not ready and out of memory; clients retry it."""

RETRY_AFTER_SECONDS: Mapping[int, int] = {429: 1, 503: 2, 529: 2}
"""When to come back where an error does not say it."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    **_OPENAI_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}
_FIRST_SERVER_STATUS = 500


def encode_openai_error(error: RequestError) -> dict[str, JsonObject]:
    """{"error": {"message", "type", "param", "code"}}, the body of an error answer or of a stream's last event."""
    fallback = "server_error" if error.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    kind = _OPENAI_TYPES.get(error.status, fallback)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def encode_anthropic_error(error: RequestError) -> dict[str, object]:
    """{"type": "error", "error": {"type", "message"}}: the body of an error answer or of a stream's `error` event."""
    fallback = "api_error" if error.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": _anthropic_message(error)}}


def _anthropic_message(error: RequestError) -> str:
    """The message. Agents shorten their conversation when they read this wording of an overflow."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.context_limit} maximum"
    return error.message
