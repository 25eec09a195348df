"""Runs the child process: LiteLLM's application inside our guard, until the parent asks or is gone; the requests that
bypass LiteLLM; and a log without requests' text. LiteLLM reads its configuration from the environment that the parent
composed; this file reads only its arguments.
"""

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

import httpx
import uvicorn

from kvserve.errors import NotReady
from kvserve.proxy.asgi import App, HeaderList, Receive, Scope, Send, causes
from kvserve.proxy.backend_health import PlainAnswer
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.keep_alive import socket_options

_DRAIN_SECONDS = 1
_LAST_RESORT_SECONDS = 4.0
_KEEP_ALIVE_SECONDS = 75
_CONNECT_SECONDS = 10.0
# Headers of one connection, and headers that this server sets itself.
_OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
)
_SET_HERE = frozenset({*(_OF_A_CONNECTION - {b"content-length"}), b"date", b"vary"})


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM, or until standard input ends because the parent is gone."""
    options = parse_arguments(arguments)
    Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    rules = GuardRules.from_json(json.loads(Path(options.guard).read_text(encoding="utf-8")))
    litellm_app = imported_app()
    uvicorn.run(
        WordlessLog(Guard(litellm_app, Backend(), rules)),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )


def imported_app() -> App:
    """LiteLLM's application. What its four thousand modules make stays: to look for garbage among it meanwhile takes a
    sixth of the time, and the collector need not walk over it later either."""
    gc.disable()
    app: App = importlib.import_module("litellm.proxy.proxy_server").app
    gc.freeze()
    gc.enable()
    return app


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options. `--config` is not read: on the command line it proves whose process this is."""
    parser = argparse.ArgumentParser(prog="kvserve.proxy.entry")
    for name in ("--config", "--guard", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", required=True, type=int)
    return parser.parse_args(arguments)


def end_with_parent() -> None:
    """Ends this process when standard input ends, whose other end only the parent holds."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_RESORT_SECONDS)
    os._exit(1)


# --- requests that bypass LiteLLM ------------------------------------------------------------------------------------


class Backend:
    """Passes requests to kvserve's own port and streams the answers back. Each request has its own connection: on one
    machine that costs little, and no kept connection can turn out to be closed."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # an answer takes as long as it takes
        transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=socket_options())
        self._client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    def of(self, backend: BackendAddress) -> App:
        """The application that passes requests to this backend."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._pass(backend.base, scope, receive, send)

        return app

    async def ask(
        self,
        backend: BackendAddress,
        method: str,
        target: str,
        headers: Mapping[str, str],
        seconds: float | None,
        body: bytes,
    ) -> PlainAnswer:
        """Asks this backend on the proxy's own behalf. Raises httpx.HTTPError."""
        own = {**headers, "connection": "close"}
        if backend.api_key is not None:
            own["authorization"] = f"Bearer {backend.api_key}"
        request = httpx.Request(
            method,
            backend.base,
            headers=own,
            content=body,
            extensions={"target": target.encode("latin-1"), "timeout": httpx.Timeout(seconds).as_dict()},
        )
        response = await self._client.send(request)
        return PlainAnswer(response.status_code, dict(response.headers), response.content)

    async def close(self) -> None:
        """Give back what connections need."""
        await self._client.aclose()

    async def _pass(self, url: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request whose body comes in one piece. Raises NotReady if kvserve gives no answer, and httpx's own
        error if the answer breaks off, which breaks off the client's connection, too."""
        request = self._request(url, scope, (await receive()).get("body", b""))
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise NotReady("kvserve itself gives no answer.") from error
        try:
            lines = [(name.lower(), value) for name, value in response.headers.raw]
            headers = [line for line in lines if line[0] not in _SET_HERE]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _request(self, url: str, scope: Scope, body: bytes) -> httpx.Request:
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        headers: HeaderList = [pair for pair in scope["headers"] if pair[0].lower() not in _OF_A_CONNECTION | {b"host"}]
        # As a URL the path would be normalised and could differ from the one that the guard checked.
        return httpx.Request(
            scope["method"],
            url,
            headers=[*headers, (b"connection", b"close")],
            content=body,
            extensions={"target": target},
        )


# --- the log ---------------------------------------------------------------------------------------------------------


class WordlessLog:
    """Serves an application, and from the first request on keeps text out of every log record of this process: an error
    that LiteLLM logs quotes the backend's answer, which may quote the request. Earlier records stay whole."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._is_wordless = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        if scope["type"] == "http" and not self._is_wordless:
            self._is_wordless = True
            keep_words_out()
        await self._app(scope, receive, send)


def keep_words_out() -> None:
    """Replaces this process's record factory: a record keeps its time, level and place, and its text becomes the types
    and places of its exceptions."""
    make = logging.getLogRecordFactory()

    def make_wordless(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        record.msg = _describe(error) if error is not None else "(its text is not kept: it may quote a request)"
        record.args, record.exc_info, record.exc_text, record.stack_info = (), None, None, None
        return record

    logging.setLogRecordFactory(make_wordless)


def _describe(error: BaseException) -> str:
    """The types of an exception and of its causes, and where each was raised, without their texts."""
    told: list[str] = []
    for cause in causes(error):
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        places = [f"  {at.filename}:{at.lineno} in {at.name}" for at in traceback.extract_tb(cause.__traceback__)]
        told.append("\n".join([kind, *places]))
    return "\n".join(told)


if __name__ == "__main__":
    main(sys.argv[1:])
