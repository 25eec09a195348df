"""The ASGI application around LiteLLM's: it checks who may speak and which paths exist, gives LiteLLM an envelope
instead of the client's body, and returns the backend's errors unchanged. It knows ASGI and no model.
"""

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.core import KEY_HEADER, NO_KEY, key_digest
from kvserve.errors import EngineFailure, Forbidden, RequestError
from kvserve.proxy.access import AccessRules, Headers, check_access, preflight_headers, sharing_headers
from kvserve.proxy.asgi import (
    App,
    HeaderList,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    at_path,
    encoded,
    error_body,
    json_header,
    read_body,
    read_headers,
    read_json_object,
    replay,
    retry_after,
    with_request_id,
)
from kvserve.proxy.envelope import CURRENT_EXCHANGE, EMPTY_BODY, ProxyExchange, native_scope, run_while_wanted
from kvserve.proxy.keys_file import KeyHolder, KeysFile, headers_of_holder
from kvserve.proxy.paths import Envelope, ProxyRoute, find_route, versioned
from kvserve.proxy.request_limits import RequestLimits

_WARM_UP_TIMEOUT_SECONDS = 10.0
_MODEL_PLACE = "/v1/models/"


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The guard's rules, passed to the child process as JSON. `secret` proves the guard's statements to the backend.
    LiteLLM lists `listed_model_id`; `backend_model_id` is the same model's name on the backend's own port. With
    `api_keys_file` the holders that it names may speak beside who has `api_key`."""

    host: str
    listed_model_id: str
    backend_model_id: str = ""
    backend_url: str = ""
    api_key: str | None = None
    secret: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    api_keys_file: str | None = None

    @property
    def access(self) -> AccessRules:
        """The rules of who may speak."""
        return AccessRules(self.host, self.api_key, self.allowed_origins, self.allowed_hosts)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "GuardRules":
        """The rules from their fields as JSON."""
        names = {name: tuple(value[name]) for name in ("allowed_origins", "allowed_hosts")}
        return cls(**{**value, **names})


# In order of preference; LiteLLM routes a session by x-session-id.
_SESSION_HEADERS = ("session_id", "session-id", "thread_id", "thread-id", "conversation_id", "conversation-id")
# LiteLLM forwards only x-*; the backend reads these, too.
_FORWARDED_HEADERS = frozenset({"user-agent", "traceparent", "tracestate", *_SESSION_HEADERS})
# The guard answers for the Origin, replaces the body and states the client's key.
_WITHHELD_HEADERS = frozenset(
    {b"origin", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", KEY_HEADER.encode()}
)

# How names begin that only the guard gives: LiteLLM's endpoint puts what stands behind `x-pass-` in the place of the
# guard's own headers, and obeys the others.
_NO_CLIENTS_HEADERS = (KEY_HEADER.encode(), b"x-pass-", b"x-litellm-")

_WARM_UP_SCOPE: Scope = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "query_string": b"",
    "root_path": "",
    "client": ("127.0.0.1", 0),
    "server": ("127.0.0.1", 80),
}


class Guard:
    """The child process's ASGI application: LiteLLM's, and the backend for requests that bypass LiteLLM."""

    def __init__(self, app: App, backend: App, rules: GuardRules) -> None:
        self._app = app
        self._backend = backend
        self._rules = rules
        file = rules.api_keys_file
        self._keys = KeysFile(Path(file), rules.api_key, _say_to_log) if file is not None else None
        self._limits = RequestLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._warm_before_ready(scope, send))
        elif scope["type"] == "http":
            await self._serve(scope, receive, with_request_id(send))
        else:  # the backend does not speak WebSocket
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = read_headers(scope)
        origin: str | None = None
        try:
            origin = check_access(headers, self._rules.access, needs_key=False)
            if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                granted = preflight_headers(headers, ("GET", "POST", "DELETE"))
                await answer(send, 204, b"", encoded((*sharing_headers(origin), *granted)))
                return
            route = find_route(scope["method"], scope["path"], headers)
            holder = self._admit(route, headers)
            with self._limits.admit(holder) if route.counts(scope["method"]) else nullcontext():
                inner = {**at_path(scope, route.path), "headers": self._headers_of(holder, scope["headers"])}
                await self._pass_on(route, inner, receive, AnswerFilter(send, origin))
        except RequestError as error:
            body = error_body(error, versioned(scope["path"]))
            own = [*json_header(), *retry_after(error)]
            await answer(send, error.status, body, [*own, *encoded(sharing_headers(origin))])

    def _admit(self, route: ProxyRoute, headers: Headers) -> KeyHolder | None:
        """Who asks; None where nobody is asked for a key of the file. Raises Unauthorized, Forbidden, NotReady."""
        if self._keys is None or not route.needs_key:
            check_access(headers, self._rules.access, needs_key=route.needs_key)
            return None
        holder = self._keys.holder(headers)
        if route.for_operator and not holder.is_operator:
            raise Forbidden("This path is for operators: ask who gave you the key.")
        return holder

    def _headers_of(self, holder: KeyHolder | None, sent: HeaderList) -> HeaderList:
        """The request's headers: whose it is in its key or, of a holder, in `KEY_HEADER`, which no client may set."""
        kept = [pair for pair in sent if not pair[0].lower().startswith(_NO_CLIENTS_HEADERS)]
        return kept if holder is None else headers_of_holder(kept, holder, self._rules.api_key)

    async def _pass_on(self, route: ProxyRoute, scope: Scope, receive: Receive, send: "AnswerFilter") -> None:
        if route.way == "direct":
            await self._pass_directly(scope, receive, send)
        elif route.way == "as it is":
            await self._pass_natively(scope, receive, send)
        elif route.envelope is None:
            await self._app({**scope, "headers": _without_origin(scope)}, receive, send)
        else:
            await self._pass_enveloped(route.envelope, scope, receive, send)

    async def _pass_enveloped(self, envelope: Envelope, scope: Scope, receive: Receive, send: "AnswerFilter") -> None:
        body = await read_json_object(receive, self._rules.max_body_bytes, read_headers(scope))
        if body is None:
            return
        shown = json.dumps(envelope(body, self._rules.listed_model_id)).encode("utf-8")
        inner = {**scope, "headers": inner_headers(scope, len(shown), self._rules.secret)}
        send.exchange = ProxyExchange(body, forwarded_headers(read_headers(scope)))
        CURRENT_EXCHANGE.set(send.exchange)
        await self._app(inner, replay(shown, receive), send)

    async def _pass_natively(self, scope: Scope, receive: Receive, send: "AnswerFilter") -> None:
        raw = await read_body(receive, self._rules.max_body_bytes, read_headers(scope))
        if raw is None:
            return
        inner = native_scope(scope, inner_headers(scope, len(EMPTY_BODY), self._rules.secret), raw, self._rules.api_key)
        await run_while_wanted(self._app, inner, EMPTY_BODY, receive, send)

    async def _pass_directly(self, scope: Scope, receive: Receive, send: "AnswerFilter") -> None:
        """Passes the client's own headers: if the guard asks for no key, the backend may."""
        raw = await read_body(receive, self._rules.max_body_bytes, read_headers(scope))
        if raw is None:
            return
        if scope["path"] == f"{_MODEL_PLACE}{self._rules.listed_model_id}":
            scope = at_path(scope, f"{_MODEL_PLACE}{self._rules.backend_model_id}")
        told = told_key(read_headers(scope), self._rules.secret)
        kept = [pair for pair in _without_origin(scope) if pair[0].lower() != told[0]]
        await run_while_wanted(self._backend, {**scope, "headers": [*kept, told]}, raw, receive, send)

    def _warm_before_ready(self, scope: Scope, send: Send) -> Send:
        """Delays "started" until one request has run: the first takes 600 ms longer than the others."""

        async def warming_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await asyncio.create_task(self._warm_up(dict(scope.get("state", {}))))
            await send(message)

        return warming_send

    async def _warm_up(self, state: dict[str, object]) -> None:
        """Sends one chat request through LiteLLM to a refusing port, which is bound so that no other process takes
        it."""
        body = {"model": self._rules.listed_model_id, "messages": [{"role": "user", "content": "."}], "stream": True}
        key = f"Bearer {self._rules.api_key or 'none'}".encode()
        headers = [(b"host", b"localhost"), (b"authorization", key), *json_header()]
        inner: Scope = {**_WARM_UP_SCOPE, "state": state, "headers": headers}
        logging.disable(logging.CRITICAL)  # this failure is intended
        # A slow first request is better than no proxy.
        with suppress(TimeoutError), socket.socket() as refusing:
            refusing.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{refusing.getsockname()[1]}/v1"
            CURRENT_EXCHANGE.set(ProxyExchange(body, {}, instead_of_backend=url))
            async with asyncio.timeout(_WARM_UP_TIMEOUT_SECONDS):
                await self._app(inner, replay(json.dumps(body).encode("utf-8"), _say_nothing), _discard)
        logging.disable(logging.NOTSET)


def _say_to_log(line: str) -> None:
    """Past the log records, whose text is not kept: this line quotes no request."""
    sys.stderr.write(f"kvserve: {line}\n")
    sys.stderr.flush()


async def _say_nothing() -> Message:
    return await asyncio.Future()


async def _discard(message: Message) -> None:
    return None


class AnswerFilter:
    """LiteLLM's `send`: it replaces LiteLLM's version of an error by the backend's own."""

    def __init__(self, send: Send, origin: str | None) -> None:
        self._send = send
        self._origin = origin
        self._is_replaced = False
        self.exchange: ProxyExchange | None = None

    async def __call__(self, message: Message) -> None:
        """Passes on, or replaces, one ASGI message of the answer."""
        if message["type"] == "http.response.start":
            replaced = self._replacement(message)
            if self.exchange is not None:
                self.exchange.has_begun = True
            if replaced is None:
                message["headers"] = [*outer_headers(message["headers"]), *encoded(sharing_headers(self._origin))]
            else:
                self._is_replaced = True
                await answer(self._send, *replaced)
        if not self._is_replaced:
            await self._send(message)

    def _replacement(self, start: Message) -> tuple[int, bytes, HeaderList] | None:
        status = int(start["status"])
        if status < 400:
            return None
        sent = {name.lower(): value for name, value in start["headers"]}
        kept = [*outer_headers(request_id_of(sent)), *encoded(sharing_headers(self._origin))]
        upstream = self.exchange.upstream_error if self.exchange is not None else None
        if upstream is not None:
            extra = [(b"content-type", upstream.content_type.encode("latin-1")), *kept]
            if upstream.retry_after is not None:
                extra.append((b"retry-after", upstream.retry_after.encode("latin-1")))
            return upstream.status, upstream.body, extra
        if b"json" in sent.get(b"content-type", b""):
            return None
        failure = EngineFailure("LiteLLM failed on this request; its log in the state folder says more.")
        return status, error_body(failure), [*json_header(), *kept]


def inner_headers(scope: Scope, num_body_bytes: int, secret: str) -> HeaderList:
    """The request's headers for LiteLLM: with the session under the name that LiteLLM forwards, and with the digest of
    the client's key, because the backend gets the proxy's key."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in _WITHHELD_HEADERS]
    headers += [*json_header(), (b"content-length", str(num_body_bytes).encode())]
    sent = read_headers(scope)
    headers.append(told_key(sent, secret))
    session = next((sent[name][0] for name in _SESSION_HEADERS if name in sent), None)
    if session is not None and "x-session-id" not in sent:
        headers.append((b"x-session-id", session.encode("latin-1")))
    return headers


def told_key(sent: Headers, secret: str) -> tuple[bytes, bytes]:
    """The header that tells the backend whose a request with these headers is: what the guard knows of a holder, else
    the digest of its key."""
    own = {name: values[0] for name, values in sent.items()}
    whose = own.get(KEY_HEADER) or key_digest(own) or NO_KEY
    told = f"{secret} {whose}".lstrip()  # LiteLLM's client refuses a value that begins with a blank
    return KEY_HEADER.encode(), told.encode()


def _without_origin(scope: Scope) -> HeaderList:
    return [pair for pair in scope["headers"] if pair[0].lower() != b"origin"]


def forwarded_headers(headers: Headers) -> dict[str, str]:
    """The headers for the backend that LiteLLM would not forward."""
    # `User-Agent` as LiteLLM's HTTP client spells it: another spelling would be added instead of replacing it.
    return {
        name.title() if name == "user-agent" else name: values[0]
        for name, values in headers.items()
        if name in _FORWARDED_HEADERS
    }


def request_id_of(headers: Mapping[bytes, bytes]) -> HeaderList:
    """The backend's request id, if it set one: the only valid header of LiteLLM's error answers."""
    name = b"llm_provider-x-request-id"
    return [(name, headers[name])] if name in headers else []


def outer_headers(headers: HeaderList) -> HeaderList:
    """The answer's headers, with the backend's request id also under its own name."""
    for name, value in headers:
        if name.lower() == b"llm_provider-x-request-id":
            return [*(pair for pair in headers if pair[0].lower() != b"x-request-id"), (b"x-request-id", value)]
    return list(headers)
