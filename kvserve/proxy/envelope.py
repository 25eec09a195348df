"""Makes the body that LiteLLM sees: for a chat a plain body that it can route and log, for any other request an empty
object. The client's own body travels beside it and replaces it when the request goes out. It knows LiteLLM's pass-
through endpoints and no protocol."""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

from kvserve.core import JsonObject
from kvserve.errors import BadRequest
from kvserve.proxy.asgi import App, HeaderList, Message, Receive, Scope, Send, at_path
from kvserve.proxy.backends import BackendAddress

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# LiteLLM's own routes on most native paths rewrite bodies and ids. It has none on this path, which the guard blocks for
# clients.
_PLACE = "/as-it-is"
_LONGEST_ANSWER_SECONDS = 86_400.0
NO_BACKEND_KEY = "none"
"""Sent where a backend asks for no key, so that no key of the proxy's goes there."""
# LiteLLM sends the bytes under this name in a request's state instead of the body that it read.
_RAW_BODY = "litellm_pass_through_raw_body"
# With `stream` in the body LiteLLM would answer before the backend does and keep waiting after the client has left;
# without it, it recognises a stream by the answer's content type.
EMPTY_BODY = b"{}"


# --- chats -----------------------------------------------------------------------------------------------------------


def chat_envelope(body: JsonObject, default_model: str) -> dict[str, object]:
    """A chat request for LiteLLM: model, stream and the newest message's text.

    LiteLLM would rewrite the rest (images, files, calls) or fail on it, and its copying of a whole history of 300 kB
    costs 65 ms. Raises BadRequest for a model that is not a name.
    """
    messages = body.get("messages")
    newest = messages[-1:] if isinstance(messages, list) else []
    return {**_common(body, default_model), "messages": [_plain_message(message) for message in newest]}


def _common(body: JsonObject, default_model: str) -> dict[str, object]:
    """Model and stream. A mistyped `stream` is left out, so that the backend refuses it in its own words."""
    envelope: dict[str, object] = {"model": _model_name(body, default_model)}
    if body.get("stream") is True:
        envelope["stream"] = True
        if isinstance(options := body.get("stream_options"), dict):
            envelope["stream_options"] = options
    return envelope


def _model_name(body: JsonObject, default_model: str) -> str:
    """The model's name. Raises BadRequest for a name that LiteLLM would read as a list or a URL."""
    name = body.get("model")
    if name is None or name == "":
        return default_model
    if not isinstance(name, str):
        raise BadRequest("model must be a string.", param="model")
    if "," in name or "://" in name:
        raise BadRequest("Through the proxy a model name has no comma and is no URL.", param="model")
    return name


def _plain_message(message: object) -> dict[str, object]:
    """Role and text of a message in any form."""
    if not isinstance(message, dict):
        return {"role": "user", "content": ""}
    role, content = message.get("role"), message.get("content")
    known_role = role if isinstance(role, str) and role in _ROLES else "user"
    if isinstance(content, list):
        return {"role": known_role, "content": [part for part in content if _is_text_part(part)]}
    return {"role": known_role, "content": content if isinstance(content, str) else ""}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def api_base(backend: BackendAddress) -> str:
    """Where LiteLLM sends a chat for this backend; by it the hook tells its deployments apart."""
    return f"{backend.base}/v1"


# --- other requests --------------------------------------------------------------------------------------------------


def pass_through_endpoint(backend: BackendAddress) -> dict[str, object]:
    """A backend's entry of `general_settings.pass_through_endpoints`; the guard checks the key."""
    return {
        "path": _place(backend),
        "target": backend.base,
        "include_subpath": True,
        "forward_headers": True,
        "auth": False,
        "headers": {"authorization": f"Bearer {backend.api_key or NO_BACKEND_KEY}"},
        "timeout": _LONGEST_ANSWER_SECONDS,
    }


def _place(backend: BackendAddress) -> str:
    # LiteLLM compares whole segments, and not every name is one.
    return f"{_PLACE}/{hashlib.sha256(backend.name.encode('utf-8')).hexdigest()[:16]}"


def native_scope(scope: Scope, headers: HeaderList, raw: bytes, backend: BackendAddress, api_key: str | None) -> Scope:
    """The request for the backend's endpoint in LiteLLM, which asks for `api_key`; the backend gets `headers` with its
    own key, and `raw`."""
    state = {**scope.get("state", {}), _RAW_BODY: raw}
    placed = at_path(scope, f"{_place(backend)}{scope['path']}")
    return {**placed, "headers": with_key(headers, api_key), "state": state}


def with_key(headers: HeaderList, api_key: str | None) -> HeaderList:
    """The headers with this key instead of the client's; as they are where none is asked for."""
    if api_key is None:
        return headers
    return [*without_keys(headers), (b"authorization", f"Bearer {api_key}".encode())]


def without_keys(headers: Iterable[tuple[bytes, bytes]]) -> HeaderList:
    """The headers without any key."""
    return [pair for pair in headers if pair[0].lower() not in (b"authorization", b"x-api-key")]


async def run_while_wanted(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the application on the request with this body until it is answered or its client leaves; LiteLLM itself would
    wait for the backend's answer."""
    left = asyncio.Event()
    pending = [body]

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def receive_once() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    watching = asyncio.create_task(watch())
    running = asyncio.ensure_future(app(scope, receive_once, send))
    try:
        await asyncio.wait((watching, running), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    finally:
        watching.cancel()
        running.cancel()


# --- what travels beside it ------------------------------------------------------------------------------------------
#
# The guard around LiteLLM and the hook inside it share it. LiteLLM passes no request to a hook, so it is in a context
# variable: each request runs in its own context.


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """The backend's own answer to a failed request, before LiteLLM rewrote it."""

    status: int
    body: bytes
    content_type: str
    retry_after: str | None


@dataclass(slots=True)
class ProxyExchange:
    """One request on its way through LiteLLM.

    `body` is the client's JSON object; `headers` are those that LiteLLM would not forward. The hook sets
    `upstream_error` for the guard; the guard sets `has_begun` when the client's answer begins. `instead_of_backend` is
    another URL for the request.
    """

    body: Mapping[str, object]
    headers: Mapping[str, str]
    instead_of_backend: str | None = None
    upstream_error: UpstreamError | None = None
    has_begun: bool = False


CURRENT_EXCHANGE: ContextVar[ProxyExchange | None] = ContextVar("current_exchange", default=None)
