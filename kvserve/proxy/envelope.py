"""In what form LiteLLM gets a request: a chat as a plain body that it can route and log, everything else as an empty
object. The client's own body travels beside it and goes out in its place. It knows LiteLLM's pass-through
endpoints and no protocol.
"""

import asyncio
from contextlib import suppress

from kvserve.core import JsonObject
from kvserve.errors import BadRequest
from kvserve.proxy.asgi import App, HeaderList, Message, Receive, Scope, Send, at_path

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# LiteLLM has routes of its own under most of the native paths, which rewrite bodies and ids. This one it has not, and
# from outside the guard lets nobody reach it.
_PLACE = "/as-it-is"
_LONGEST_ANSWER_SECONDS = 86_400.0
# The bytes under this name in a request's state go out instead of the body that LiteLLM read.
_RAW_BODY = "litellm_pass_through_raw_body"
# All that LiteLLM sees of a body. Told of a stream it would answer before the backend does, and wait on for it when the
# client has left; it recognises a stream by the answer's content type.
ENVELOPE = b"{}"


# --- a chat, in an envelope ------------------------------------------------------------------------------------------


def chat_envelope(body: JsonObject, default_model: str) -> dict[str, object]:
    """A chat request as LiteLLM sees it: model, stream and the newest message's text.

    The rest of a message it would rewrite (images, files, calls) or stumble over, and it copies what it gets so often
    that a whole history of 300 kB costs 65 ms. Raises BadRequest for a model that is no name.
    """
    messages = body.get("messages")
    newest = messages[-1:] if isinstance(messages, list) else []
    return {**_common(body, default_model), "messages": [_plain_message(message) for message in newest]}


def _common(body: JsonObject, default_model: str) -> dict[str, object]:
    """Model and stream. A mistyped `stream` is shown as absent, so that the backend refuses it in its own words."""
    envelope: dict[str, object] = {"model": _model_name(body, default_model)}
    if body.get("stream") is True:
        envelope["stream"] = True
        if isinstance(options := body.get("stream_options"), dict):
            envelope["stream_options"] = options
    return envelope


def _model_name(body: JsonObject, default_model: str) -> str:
    """The model's name. Raises BadRequest for one that LiteLLM would take for something else than a name."""
    name = body.get("model")
    if name is None or name == "":
        return default_model
    if not isinstance(name, str):
        raise BadRequest("model must be a string.", param="model")
    if "," in name or "://" in name:
        raise BadRequest("Through the proxy a model name has no comma and is no URL.", param="model")
    return name


def _plain_message(message: object) -> dict[str, object]:
    """Role and text of a message, however it is built."""
    if not isinstance(message, dict):
        return {"role": "user", "content": ""}
    role, content = message.get("role"), message.get("content")
    known_role = role if isinstance(role, str) and role in _ROLES else "user"
    if isinstance(content, list):
        return {"role": known_role, "content": [part for part in content if _is_text_part(part)]}
    return {"role": known_role, "content": content if isinstance(content, str) else ""}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


# --- everything else, as it is ---------------------------------------------------------------------------------------


def pass_through_endpoint(backend_url: str) -> dict[str, object]:
    """The one entry of `general_settings.pass_through_endpoints`. The guard has checked the key before."""
    return {
        "path": _PLACE,
        "target": backend_url.rstrip("/"),
        "include_subpath": True,
        "forward_headers": True,
        "auth": False,
        "headers": {},
        "timeout": _LONGEST_ANSWER_SECONDS,
    }


def native_scope(scope: Scope, headers: HeaderList, raw: bytes, api_key: str | None) -> Scope:
    """The request for LiteLLM's endpoint: `headers` are to reach the backend, `raw` is the body that it gets."""
    key = [(b"authorization", f"Bearer {api_key}".encode())] if api_key is not None else []
    kept = [pair for pair in headers if not (key and pair[0].lower() in (b"authorization", b"x-api-key"))]
    state = {**scope.get("state", {}), _RAW_BODY: raw}
    return {**at_path(scope, f"{_PLACE}{scope['path']}"), "headers": [*kept, *key], "state": state}


async def run_while_wanted(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the request, of which the application reads this body, until it is answered or its client leaves; LiteLLM
    itself would wait for the backend's answer."""
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
