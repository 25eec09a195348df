"""Request errors -> Anthropic's error body. Knows the wire's error types; the status line is written elsewhere."""

from collections.abc import Mapping

from kvserve.core import JsonObject
from kvserve.errors import ContextOverflow, RequestError

STATUSES: Mapping[int, int] = {503: 529}
"""Not ready and out of memory have a status of their own in this protocol, which clients retry."""

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
    """Agents know by this wording that they should shorten their conversation."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.context_limit} maximum"
    return error.message
