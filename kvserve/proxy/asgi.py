"""ASGI helpers of the guard: reads bodies, answers, encodes errors, the latter as `protocols/` does. It knows neither
LiteLLM nor who may speak."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import quote

from kvserve.core import JsonObject
from kvserve.errors import BadRequest, BodyTooLarge, RequestError, RequestTimeout
from kvserve.protocols.error_bodies import (
    ANTHROPIC_STATUSES,
    RETRY_AFTER_SECONDS,
    encode_anthropic_error,
    encode_openai_error,
)
from kvserve.protocols.fields import children, decode_body, refuse_equal_keys
from kvserve.proxy.access import HeaderLines, Headers

type Message = MutableMapping[str, Any]
type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]
type App = Callable[[Scope, Receive, Send], Awaitable[None]]
type HeaderList = list[tuple[bytes, bytes]]

_ANTHROPIC_PATHS = "/v1/messages"
_BODY_TIMEOUT_SECONDS = 60.0
_MAX_CAUSES = 16
_WHOLE_FIELDS = frozenset(("arguments", "parameters", "schema"))
"""The fields in which the server's own port refuses equal keys: the model must read them whole."""

_PLAIN_IN_PATHS = "/:@!$&'()*+,;=~"


def read_headers(scope: Scope) -> dict[str, list[str]]:
    """Lower-case name -> its values in order."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def at_path(scope: Scope, path: str) -> Scope:
    """The request as if sent to this decoded path."""
    return {**scope, "path": path, "raw_path": quote(path, safe=_PLAIN_IN_PATHS).encode("ascii")}


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


def parse_json_object(raw: bytes) -> JsonObject:
    """The JSON object in `raw`, as the server's own port reads it. Raises BadRequest for anything else, and for equal
    keys in arguments and schemas: the backend gets a re-encoded body without them."""
    body = decode_body(raw)
    level: list[object] = [body]
    while level:
        for each in level:
            if isinstance(each, dict):
                for name in each.keys() & _WHOLE_FIELDS:
                    refuse_equal_keys(each[name], name)
        level = [child for each in level for child in children(each)]
    return body


def readable(body: JsonObject | bytes | None) -> JsonObject:
    """The JSON object in it as far as there is one: for what is decided beside the backend, which judges the body."""
    if not isinstance(body, bytes):
        return body or {}
    try:
        return decode_body(body)
    except BadRequest:
        return {}


def own_scope(scope: Scope) -> Scope:
    """The scope for one of several applications that answer it in turn: each writes into its scope."""
    return {**scope, "state": {**scope.get("state", {})}}


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


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from, `_MAX_CAUSES` at most."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


async def answer(send: Send, status: int, body: bytes, headers: HeaderList) -> None:
    """Sends a complete answer."""
    complete = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": complete})
    await send({"type": "http.response.body", "body": body})


def json_header() -> HeaderList:
    """The content type of JSON."""
    return [(b"content-type", b"application/json")]


def retry_after(error: RequestError) -> HeaderList:
    """When to come back, by the error itself or by its status."""
    seconds = error.retry_after_seconds or RETRY_AFTER_SECONDS.get(error.status)
    return [(b"retry-after", str(seconds).encode())] if seconds is not None else []


def encoded(lines: HeaderLines) -> HeaderList:
    """Header lines in ASGI's form."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines]


def error_status(error: RequestError, path: str) -> int:
    """The status of an error: under Anthropic's paths that protocol's own."""
    return ANTHROPIC_STATUSES.get(error.status, error.status) if path.startswith(_ANTHROPIC_PATHS) else error.status


def error_body(error: RequestError, path: str = "") -> bytes:
    """The error in OpenAI's form, or in Anthropic's under its paths."""
    encode = encode_anthropic_error if path.startswith(_ANTHROPIC_PATHS) else encode_openai_error
    return json.dumps(encode(error)).encode("utf-8")
