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
from typing import Any, Protocol

from kvserve.core import BEGIN_HEADER, KEY_HEADER, NO_KEY, JsonObject, key_digest
from kvserve.errors import Forbidden, RequestError
from kvserve.proxy.access import AccessRules, Headers, check_access, preflight_headers, sharing_headers
from kvserve.proxy.answer_filter import AnswerFilter
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
    error_status,
    json_header,
    own_scope,
    parse_json_object,
    read_body,
    read_headers,
    readable,
    replay,
    retry_after,
    with_request_id,
)
from kvserve.proxy.attempts import Attempt, Serve, try_in_turn
from kvserve.proxy.backend_health import Ask, Fleet, look, watch
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.envelope import (
    CURRENT_EXCHANGE,
    EMPTY_BODY,
    ProxyExchange,
    native_scope,
    run_while_wanted,
    with_key,
    without_keys,
)
from kvserve.proxy.keys_file import KeyHolder, KeysFile, headers_of_holder
from kvserve.proxy.paths import Envelope, ProxyRoute, find_route, versioned
from kvserve.proxy.request_limits import RequestLimits
from kvserve.proxy.routing import Routing

_WARM_UP_TIMEOUT_SECONDS = 10.0
_MODEL_PLACE = "/v1/models/"


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The guard's rules, passed to the child process as JSON. `secret` proves the guard's statements to the backend.
    LiteLLM lists `listed_model_id`; `backend_model_id` is the same model's name on the backend's own port. With
    `api_keys_file` the holders that it names may speak beside who has `api_key`. With `watches_backends` every backend
    is asked how it is; one where more than `max_waiting` requests wait is busy."""

    host: str
    listed_model_id: str
    backend_model_id: str = ""
    backends: tuple[BackendAddress, ...] = ()
    api_key: str | None = None
    secret: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    api_keys_file: str | None = None
    max_waiting: int = 8
    watches_backends: bool = False

    @property
    def access(self) -> AccessRules:
        """The rules of who may speak."""
        return AccessRules(self.host, self.api_key, self.allowed_origins, self.allowed_hosts)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "GuardRules":
        """The rules from their fields as JSON."""
        names = {name: tuple(value[name]) for name in ("allowed_origins", "allowed_hosts")}
        backends = tuple(BackendAddress(**each) for each in value["backends"])
        return cls(**{**value, **names, "backends": backends})


# In order of preference; LiteLLM routes a session by x-session-id.
_SESSION_HEADERS = ("session_id", "session-id", "thread_id", "thread-id", "conversation_id", "conversation-id")
# LiteLLM forwards only x-*; the backend reads these, too.
_FORWARDED_HEADERS = frozenset({"user-agent", "traceparent", "tracestate", *_SESSION_HEADERS})
# The guard answers for the Origin, replaces the body and states the client's key.
_WITHHELD_HEADERS = frozenset(
    {b"origin", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", KEY_HEADER.encode()}
)
# Less than the ten seconds after which LiteLLM, or kvserve itself, sends a sign of life: nobody waits longer for one.
_BEGIN = (BEGIN_HEADER.encode(), b"9")

# How names begin that only the guard gives: LiteLLM's endpoint puts what stands behind `x-pass-` in the place of the
# guard's own headers, and LiteLLM obeys the others.
_NO_CLIENTS_HEADERS = (KEY_HEADER.encode(), BEGIN_HEADER.encode(), b"x-pass-", b"x-litellm-")

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


class Backends(Protocol):
    """The way to the servers past LiteLLM."""

    @property
    def ask(self) -> Ask:
        """Asks one on the proxy's own behalf."""

    def of(self, backend: BackendAddress) -> App:
        """The application that passes requests to this one."""


class Guard:
    """The child process's ASGI application: LiteLLM's, and the backends for requests that bypass LiteLLM."""

    def __init__(self, app: App, backends: Backends, rules: GuardRules) -> None:
        self._app = app
        self._backends = backends
        self._rules = rules
        file = rules.api_keys_file
        self._keys = KeysFile(Path(file), rules.api_key, _say_to_log) if file is not None else None
        self._limits = RequestLimits()
        self._fleet = Fleet(rules.backends, rules.max_waiting, is_watched=rules.watches_backends)
        self._routing = Routing(self._fleet, backends.ask)
        self._watching: asyncio.Task[None] | None = None

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
            path = versioned(scope["path"])
            own = [*json_header(), *retry_after(error), *encoded(sharing_headers(origin))]
            await answer(send, error_status(error, path), error_body(error, path), own)

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

    async def _pass_on(self, route: ProxyRoute, scope: Scope, receive: Receive, send: AnswerFilter) -> None:
        if route.way == "litellm" and route.envelope is None:
            await self._app({**scope, "headers": _without_origin(scope)}, receive, send)
            return
        raw = await read_body(receive, self._rules.max_body_bytes, read_headers(scope))
        if raw is None:
            return
        told = told_key(read_headers(scope), self._rules.secret)[1].decode()
        if self._routing.is_for_all(route, scope["method"]):
            await run_while_wanted(self._together(route, told), scope, raw, receive, send)
            return
        # With one backend no body is read that LiteLLM need not read.
        is_read = route.envelope is not None or (self._routing.has_several and route.needs_key)
        body = parse_json_object(raw) if route.envelope is not None else readable(raw) if is_read else {}
        order = await self._routing.order(route, scope, body, told)
        serve = self._way_of(route, scope, raw, body, receive, send)

        async def serve_named(attempt: Attempt, answer: Send) -> None:
            if self._routing.has_several:
                send.backend_name = attempt.backend.name
            self._fleet.num_requests[attempt.backend.name] += 1
            await serve(attempt, answer)

        await try_in_turn(order, serve_named, send, self._fleet)

    def _way_of(
        self, route: ProxyRoute, scope: Scope, raw: bytes, body: JsonObject, receive: Receive, send: AnswerFilter
    ) -> Serve:
        if route.way == "direct":
            return self._directly(route, scope, raw, receive)
        if route.envelope is None:
            return self._natively(scope, raw, receive)
        return self._enveloped(route.envelope, body, scope, receive, send)

    def _together(self, route: ProxyRoute, told: str) -> App:
        """What all backends answer."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raw = (await receive()).get("body", b"")
            status, body, headers = await self._routing.answer_of_all(route, scope, raw, told)
            await answer(send, status, b"" if scope["method"] == "HEAD" else body, headers)

        return app

    def _enveloped(
        self, envelope: Envelope, body: JsonObject, scope: Scope, receive: Receive, outer: AnswerFilter
    ) -> Serve:
        """Through LiteLLM, which sees the envelope."""
        shown = json.dumps(envelope(body, self._rules.listed_model_id)).encode("utf-8")
        forwarded = forwarded_headers(read_headers(scope))

        async def serve(attempt: Attempt, send: Send) -> None:
            attempt.exchange = outer.exchange = ProxyExchange(body, forwarded)
            CURRENT_EXCHANGE.set(attempt.exchange)
            inner = {**own_scope(scope), "headers": self._inner_headers(scope, len(shown), attempt)}
            await run_while_wanted(self._app, inner, shown, receive, send)

        return serve

    def _natively(self, scope: Scope, raw: bytes, receive: Receive) -> Serve:
        """Through LiteLLM's pass-through endpoint, byte for byte."""

        async def serve(attempt: Attempt, send: Send) -> None:
            headers = self._inner_headers(scope, len(EMPTY_BODY), attempt)
            inner = native_scope(own_scope(scope), headers, raw, attempt.backend, self._rules.api_key)
            await run_while_wanted(self._app, inner, EMPTY_BODY, receive, send)

        return serve

    def _directly(self, route: ProxyRoute, scope: Scope, raw: bytes, receive: Receive) -> Serve:
        """Past LiteLLM. No client's key goes further: the backend is told whose it is."""
        if scope["path"] == f"{_MODEL_PLACE}{self._rules.listed_model_id}":
            scope = at_path(scope, f"{_MODEL_PLACE}{self._rules.backend_model_id}")
        told = told_key(read_headers(scope), self._rules.secret)
        nobodys = without_keys(pair for pair in _without_origin(scope) if pair[0].lower() != told[0])

        async def serve(attempt: Attempt, send: Send) -> None:
            own = with_key(nobodys, attempt.backend.api_key) if route.needs_key else nobodys
            app = self._backends.of(attempt.backend)
            await run_while_wanted(app, {**scope, "headers": [*own, told]}, raw, receive, send)

        return serve

    def _inner_headers(self, scope: Scope, num_body_bytes: int, attempt: Attempt) -> HeaderList:
        headers = inner_headers(scope, num_body_bytes, self._rules.secret)
        return headers if attempt.is_last else [*headers, _BEGIN]

    def _warm_before_ready(self, scope: Scope, send: Send) -> Send:
        """Delays "started" until one request has run: the first takes 600 ms longer than the others."""

        async def warming_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await asyncio.create_task(self._warm_up(dict(scope.get("state", {}))))
                await self._begin_watching()
            if message["type"] == "lifespan.shutdown.complete" and self._watching is not None:
                self._watching.cancel()
            await send(message)

        return warming_send

    async def _begin_watching(self) -> None:
        """Look at every backend once, and go on looking."""
        if not self._rules.watches_backends:
            return
        ask, secret = self._backends.ask, self._rules.secret
        await asyncio.gather(*(look(self._fleet, backend, ask, secret) for backend in self._fleet.backends))
        self._watching = asyncio.create_task(watch(self._fleet, ask, secret))

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
