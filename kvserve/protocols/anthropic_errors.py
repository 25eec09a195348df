"""Encodes request errors as Anthropic's error body. This file knows the wire's error types, not the status line."""

from collections.abc import Mapping

from kvserve.core import JsonObject
from kvserve.errors import ContextOverflow, RequestError

STATUSES: Mapping[int, int] = {503: 529}
"""This protocol has its own status for not ready and out of memory; clients retry it."""

_TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_FIRST_SERVER_STATUS = 500


def encode_error(error: RequestError) -> dict[str, object]:
    """{"type": "error", "error": {"type", "message"}}: the body of an error answer or of a stream's `error` event."""
    fallback = "api_error" if error.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    details: JsonObject = {"type": _TYPE_BY_STATUS.get(error.status, fallback), "message": _message(error)}
    return {"type": "error", "error": details}


def _message(error: RequestError) -> str:
    """The message. Agents shorten their conversation when they read this wording of an overflow."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.context_limit} maximum"
    return error.message
