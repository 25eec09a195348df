"""Requests that LiteLLM passes on as they are, byte for byte both ways: which paths these are, and in what form LiteLLM
gets them. It knows LiteLLM's pass-through endpoints and no protocol.
"""

import asyncio
from collections.abc import Container, Mapping
from contextlib import suppress

from kvserve.proxy.asgi import App, HeaderList, Message, Receive, Scope, Send

type Json = dict[str, object]

NATIVE_PATHS: Mapping[str, tuple[str, ...]] = {
    "/v1/messages": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/v1/responses": ("POST",),
    "/v1/responses/*": ("GET", "DELETE"),
    "/v1/agents": ("GET", "POST"),
    "/v1/agents/*": ("GET", "POST", "DELETE"),
}
"""Path, or its beginning where it ends with `*`, and the methods that are passed on."""

ANTHROPIC_VERSION = "anthropic-version"
ANTHROPIC_PATHS: Mapping[str, tuple[str, ...]] = {"/v1/models": ("GET",), "/v1/models/*": ("GET",)}
"""The same for requests with this header: LiteLLM lists its models as OpenAI does, whoever asks."""

# LiteLLM has routes of its own under most of the native paths, which rewrite bodies and ids. This one it has not, and
# from outside the guard lets nobody reach it.
_PLACE = "/as-it-is"
_LONGEST_ANSWER_SECONDS = 86_400.0
# The bytes under this name in a request's state go out instead of the body that LiteLLM read.
_RAW_BODY = "litellm_pass_through_raw_body"
# All that LiteLLM sees of a body. Told of a stream it would answer before the backend does, and wait on for it when the
# client has left; it recognises a stream by the answer's content type.
ENVELOPE = b"{}"


def native_methods(path: str, headers: Container[str] = ()) -> tuple[str, ...]:
    """What is passed on under a path, with headers of these names; nothing if it is none of these."""
    paths = {**NATIVE_PATHS, **(ANTHROPIC_PATHS if ANTHROPIC_VERSION in headers else {})}
    begins = [name[:-1] for name in paths if name.endswith("*")]
    begin = max((begin for begin in begins if path.startswith(begin) and path != begin), key=len, default="")
    return paths.get(path) or paths.get(f"{begin}*", ())


def pass_through_endpoint(backend_url: str) -> Json:
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
    path = f"{_PLACE}{scope['path']}"
    state = {**scope.get("state", {}), _RAW_BODY: raw}
    return {**scope, "path": path, "raw_path": path.encode("utf-8"), "headers": [*kept, *key], "state": state}


async def run_while_wanted(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the request until it is answered or its client leaves; LiteLLM itself would wait for the backend's answer."""
    left = asyncio.Event()
    pending = [ENVELOPE]

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
