"""ASGI and JSON helpers of the guard: reads bodies, answers, encodes errors. It knows neither LiteLLM nor who may
speak.
"""

import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from kvserve.errors import BadRequest, BodyTooLarge, RequestError, RequestTimeout
from kvserve.proxy.access import HeaderLines, Headers

type Message = MutableMapping[str, Any]
type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]
type App = Callable[[Scope, Receive, Send], Awaitable[None]]
type HeaderList = list[tuple[bytes, bytes]]

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_BODY_TIMEOUT_SECONDS = 60.0
_WHOLE_FIELDS = ("arguments", "parameters", "schema")
"""The fields in which the server's own port refuses equal keys: the model must read them whole."""

_PLAIN_IN_PATHS = "/:@!$&'()*+,;=~"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_headers(scope: Scope) -> dict[str, list[str]]:
    """Lower-case name -> its values in order."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def at_path(scope: Scope, path: str) -> Scope:
    """The request as if sent to this decoded path."""
    return {**scope, "path": path, "raw_path": quote(path, safe=_PLAIN_IN_PATHS).encode("ascii")}


async def read_json_object(receive: Receive, max_bytes: int, headers: Headers) -> dict[str, object] | None:
    """The request's JSON object, None if the client left. Raises BodyTooLarge, RequestTimeout, BadRequest."""
    raw = await read_body(receive, max_bytes, headers)
    return None if raw is None else parse_json_object(raw)


async def read_body(receive: Receive, max_bytes: int, headers: Headers) -> bytes | None:
    """The request's body, None if the client left. Raises BodyTooLarge, RequestTimeout."""
    too_large = BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    declared = "".join(headers.get("content-length", ("0",)))
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                raw += message.get("body", b"")
                if len(raw) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {_BODY_TIMEOUT_SECONDS:.0f} seconds.") from None
    return bytes(raw)


def parse_json_object(raw: bytes) -> dict[str, object]:
    """The JSON object in `raw`. Raises BadRequest for anything else.

    A lone surrogate becomes U+FFFD as on the server's own port: LiteLLM's HTTP client cannot encode it. Of equal keys
    the last one counts; in arguments and schemas they are refused here, because the backend gets a re-encoded body
    without them.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_noting_equal_keys,
        )
        if _ESCAPED_SURROGATE.search(raw):
            value = _mended(value)
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"The body is not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


class _EqualKeys(dict[str, Any]):
    """An object that names a key more than once."""


def _noting_equal_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    for name, child in pairs:
        if name in _WHOLE_FIELDS and _has_equal_keys(child):
            raise BadRequest(f"{name}: a key is named twice in one object; give each key once.", param=name)
    return value if len(value) == len(pairs) else _EqualKeys(value)


def _has_equal_keys(value: Any) -> bool:
    level = [value]
    while level:
        if any(isinstance(each, _EqualKeys) for each in level):
            return True
        objects = [each.values() for each in level if isinstance(each, dict)]
        level = [child for each in (*objects, *(each for each in level if isinstance(each, list))) for child in each]
    return False


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_mended(key): _mended(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_mended(child) for child in value]
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first and then the connection's own messages."""
    pending = [body]

    async def replaying_receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replaying_receive


def with_request_id(send: Send) -> Send:
    """A `send` that adds an `x-request-id` if the backend set none, and repeats it as `request-id`, which Anthropic's
    SDK reads."""

    async def naming_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: HeaderList = [pair for pair in message["headers"] if pair[0].lower() != b"request-id"]
            given = next((value for name, value in headers if name.lower() == b"x-request-id"), None)
            request_id = given or f"proxy{secrets.token_hex(12)}".encode()
            own = [(b"x-request-id", request_id)] if given is None else []
            message["headers"] = [*headers, *own, (b"request-id", request_id)]
        await send(message)

    return naming_send


async def answer(send: Send, status: int, body: bytes, headers: HeaderList) -> None:
    """Sends a complete answer."""
    complete = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": complete})
    await send({"type": "http.response.body", "body": body})


def json_header() -> HeaderList:
    """The content type of JSON."""
    return [(b"content-type", b"application/json")]


def encoded(lines: HeaderLines) -> HeaderList:
    """Header lines in ASGI's form."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines]


def error_body(error: RequestError, path: str = "") -> bytes:
    """The error in OpenAI's form, or in Anthropic's under its paths."""
    if path.startswith(_ANTHROPIC_PATHS):
        fallback = "api_error" if error.status >= 500 else "invalid_request_error"
        details = {"type": _ANTHROPIC_ERROR_TYPES.get(error.status, fallback), "message": error.message}
        return json.dumps({"type": "error", "error": details}).encode("utf-8")
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    value = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": value}).encode("utf-8")
