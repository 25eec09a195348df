"""Requests that LiteLLM passes on as they are, byte for byte both ways: in what form LiteLLM gets them. It knows
LiteLLM's pass-through endpoints and no protocol.
"""

import asyncio
from contextlib import suppress

from kvserve.proxy.asgi import App, HeaderList, Message, Receive, Scope, Send, at_path

type Json = dict[str, object]

# LiteLLM has routes of its own under most of the native paths, which rewrite bodies and ids. This one it has not, and
# from outside the guard lets nobody reach it.
_PLACE = "/as-it-is"
_LONGEST_ANSWER_SECONDS = 86_400.0
# The bytes under this name in a request's state go out instead of the body that LiteLLM read.
_RAW_BODY = "litellm_pass_through_raw_body"
# All that LiteLLM sees of a body. Told of a stream it would answer before the backend does, and wait on for it when the
# client has left; it recognises a stream by the answer's content type.
ENVELOPE = b"{}"


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
