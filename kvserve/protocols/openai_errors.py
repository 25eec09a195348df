"""Encodes request errors as OpenAI's error body. This file knows the wire's error types, not the status line."""

from kvserve.core import JsonObject
from kvserve.errors import RequestError

_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIRST_SERVER_STATUS = 500


def encode_error(error: RequestError) -> dict[str, JsonObject]:
    """{"error": {"message", "type", "param", "code"}}, the body of an error answer or of a stream's last event."""
    fallback = "server_error" if error.status >= _FIRST_SERVER_STATUS else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPE_BY_STATUS.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }
