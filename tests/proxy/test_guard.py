"""The guard around an application that is not LiteLLM: what passes, what is replaced, what never gets in."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvserve.core import KEY_HEADER, NO_KEY, key_digest
from kvserve.errors import BadRequest, MethodNotAllowed, NotFound
from kvserve.protocols.fields import decode_body
from kvserve.proxy.asgi import App, Message, Receive, Scope, Send, parse_json_object
from kvserve.proxy.backend_health import PlainAnswer
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.envelope import CURRENT_EXCHANGE, ProxyExchange, UpstreamError
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.paths import ROUTES, find_route

HERE = BackendAddress("kvserve", "http://127.0.0.1:9")
RULES = GuardRules("127.0.0.1", "openai/m", backends=(HERE,), max_body_bytes=1000, secret="shared")
CHAT = "/v1/chat/completions"


@dataclass
class Inner:
    """The application inside: notes what it sees and answers what it is told."""

    status: int = 200
    content_type: bytes = b"application/json"
    body: bytes = b"{}"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    on_exchange: Callable[[ProxyExchange], None] | None = None
    seen: list[tuple[Scope, bytes, ProxyExchange | None]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        exchange = CURRENT_EXCHANGE.get()
        self.seen.append((scope, message.get("body", b""), exchange))
        if exchange is not None and self.on_exchange is not None:
            self.on_exchange(exchange)
        headers = [(b"content-type", self.content_type), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def scope_of(method: str = "POST", path: str = CHAT, **headers: str) -> Scope:
    lines = {"host": "localhost:4000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    raw = [(name.encode(), value.encode()) for name, value in lines.items()]
    return {"type": "http", "method": method, "path": path, "headers": raw}


async def unasked(scope: Scope, receive: Receive, send: Send) -> None:
    """The one that is not to be asked."""
    raise AssertionError(scope["path"])


@dataclass
class Behind:
    """What stands behind the guard: one application for all backends, and what each says of its health."""

    app: App
    health: dict[str, PlainAnswer] = field(default_factory=dict)

    def of(self, backend: BackendAddress) -> App:
        return self.app

    async def ask(
        self,
        backend: BackendAddress,
        method: str,
        target: str,
        headers: Mapping[str, str],
        seconds: float | None,
        body: bytes,
    ) -> PlainAnswer:
        return self.health[backend.name]


def call(
    app: App, scope: Scope, *messages: Message, rules: GuardRules = RULES, backend: App = unasked
) -> list[Message]:
    """Everything the guard sent for one request."""
    sent: list[Message] = []

    async def run() -> None:
        pending = list(messages)

        async def receive() -> Message:
            return pending.pop(0) if pending else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        told = rules if rules.backends else replace(rules, backends=(HERE,))
        await Guard(app, Behind(backend), told)(scope, receive, send)

    asyncio.run(run())
    return sent


def piece(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def header(sent: list[Message], name: bytes) -> bytes | None:
    return dict(sent[0]["headers"]).get(name)


def test_litellm_sees_the_envelope_and_the_hook_the_body() -> None:
    """Whatever pieces the body came in; the length is that of the envelope."""
    inner = Inner()
    raw = b'{"messages": [{"role": "user", "content": "hi", "x": 1}], "thinking": {"type": "enabled"}}'
    call(inner, scope_of(content_length=str(len(raw)), user_agent="a"), piece(raw[:9], True), piece(raw[9:]))
    scope, envelope, exchange = inner.seen[0]
    assert json.loads(envelope) == {"model": "openai/m", "messages": [{"role": "user", "content": "hi"}]}
    assert dict(scope["headers"])[b"content-length"] == str(len(envelope)).encode()
    assert exchange is not None
    assert (exchange.body, exchange.headers) == (json.loads(raw), {"User-Agent": "a"})


def test_the_backend_is_told_whose_key_it_is() -> None:
    """LiteLLM carries the proxy's key; a client can neither say that it has another one, nor that it has none."""
    for sent, told in (
        ({}, NO_KEY),
        ({"authorization": "Bearer mine"}, key_digest({"authorization": "Bearer mine"})),
        ({"x_api_key": "mine", "x_kvserve_key": "0123456789abcdef"}, key_digest({"x-api-key": "mine"})),
        ({"x_kvserve_key": "0123456789abcdef"}, NO_KEY),
    ):
        inner = Inner()
        raw = b'{"messages": []}'
        call(inner, scope_of(content_length=str(len(raw)), **sent), piece(raw))
        scope, _, _ = inner.seen[0]
        assert [value for name, value in scope["headers"] if name == KEY_HEADER.encode()] == [f"shared {told}".encode()]
    inner = Inner()
    call(inner, scope_of(content_length="2"), piece(b"{}"), rules=GuardRules("127.0.0.1", "openai/m"))
    assert (KEY_HEADER.encode(), NO_KEY.encode()) in inner.seen[0][0]["headers"], "without a secret: no blank before it"


@pytest.mark.parametrize("name", ["x-pass-x-kvserve-key", "X-Pass-Origin", "x-litellm-api-key", "X-LiteLLM-Timeout"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/models", "/v1/cache"])
def test_headers_by_which_litellm_is_led_reach_nobody(name: str, path: str) -> None:
    """LiteLLM would put them in the place of what the guard says, or obey them; a client's other headers go on."""
    inner = Inner()
    scope = scope_of("POST" if path in (CHAT, "/v1/responses") else "GET", path, x_mine="1")
    scope["headers"].append((name.encode(), b"x"))
    call(inner, scope, piece(b"{}"), backend=inner)
    [(seen, _, _)] = inner.seen
    names = {name.lower() for name, _ in seen["headers"]}
    assert name.lower().encode() not in names and b"x-mine" in names


EQUAL_KEYS = (
    '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":{"b":1,"b":2}}}}]}]}',
    '{"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","type":"array"}}}]}',
    '{"response_format":{"type":"json_schema","json_schema":{"schema":{"anyOf":[{"enum":[1],"enum":[2]}]}}}}',
)


@pytest.mark.parametrize("sent", EQUAL_KEYS)
def test_equal_keys_are_refused_where_the_server_refuses_them(sent: str) -> None:
    """What goes on to the backend has no equal keys any more: it could not tell."""
    with pytest.raises(BadRequest, match="a key is named twice"):
        parse_json_object(sent.encode())
    once = sent.replace('"b":1,', "").replace('"type":"array"', '"x":{"type":"array"}').replace('"enum":[1],', "")
    assert parse_json_object(once.encode()) == decode_body(once.encode())
    assert (
        parse_json_object(b'{"a":1,"a":{"b":2,"b":3}}') == decode_body(b'{"a":1,"a":{"b":2,"b":3}}') == {"a": {"b": 3}}
    )


HALVES = rb'{"m\udc00": [{"content": "\ud83d \ud83d\ude00 \\ud83d \uDE00\ud83d"}, 5], "model": "m"}'


def test_halves_of_characters_are_mended_as_the_server_does() -> None:
    """Clients cut text in the middle of an emoji; LiteLLM's HTTP client could not write such a body down again."""
    body = parse_json_object(HALVES)
    assert body == decode_body(HALVES)
    assert json.dumps(body, ensure_ascii=False).encode("utf-8")
    assert body == {"m\ufffd": [{"content": "\ufffd \U0001f600 \\ud83d \ufffd\ufffd"}, 5], "model": "m"}
    with pytest.raises(BadRequest, match="nested too deeply"):
        parse_json_object(b'{"x": ' + b"[" * 5000 + rb'"\ud83d"' + b"]" * 5000 + b"}")


def test_litellm_never_sees_an_origin() -> None:
    """It would answer for it with a wildcard."""
    inner = Inner()
    call(inner, scope_of("GET", "/v1/models", origin="http://localhost:4000"), piece(b""))
    call(inner, scope_of(origin="http://localhost:4000"), piece(b"{}"))
    assert [b"origin" in dict(scope["headers"]) for scope, _, _ in inner.seen] == [False, False]


def test_the_backends_error_replaces_litellms() -> None:
    """Status, body, type and Retry-After; LiteLLM's own body is dropped."""

    def fail(exchange: ProxyExchange) -> None:
        exchange.upstream_error = UpstreamError(529, b"own words", "text/weird", "7")

    inner = Inner(500, body=b'{"error": "litellm says"}', on_exchange=fail)
    sent = call(inner, scope_of(), piece(b"{}"))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], sent[1]["body"]) == (529, b"own words")
    assert (header(sent, b"content-type"), header(sent, b"retry-after")) == (b"text/weird", b"7")


def test_an_error_that_litellm_overcame_is_not_shown() -> None:
    """A fallback that answered 200 stays a 200."""

    def fail(exchange: ProxyExchange) -> None:
        exchange.upstream_error = UpstreamError(500, b"first try", "text/plain", None)

    sent = call(Inner(on_exchange=fail), scope_of(), piece(b"{}"))
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"{}")


def test_an_error_in_plain_text_becomes_openais_form() -> None:
    """LiteLLM's own crashes answer `Internal Server Error`; clients expect JSON."""
    sent = call(Inner(500, b"text/plain; charset=utf-8", b"Internal Server Error"), scope_of(), piece(b"{}"))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["type"] == "server_error"


def test_litellms_own_json_errors_pass() -> None:
    """What it says about its own business is kept."""
    sent = call(Inner(400, body=b'{"error": {"message": "budget"}}'), scope_of(), piece(b"{}"))
    assert (sent[0]["status"], sent[1]["body"]) == (400, b'{"error": {"message": "budget"}}')


def test_the_request_id_is_the_backends() -> None:
    """LiteLLM hides it under a name of its own."""
    inner = Inner(headers=[(b"llm_provider-x-request-id", b"r1"), (b"x-request-id", b"other")])
    assert header(call(inner, scope_of(), piece(b"{}")), b"x-request-id") == b"r1"


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        (scope_of("GET", "/v1/models"), 200),
        (scope_of("GET", "/health/readiness"), 200),
        (scope_of("OPTIONS", origin="http://localhost:4000", access_control_request_method="POST"), 204),
        (scope_of(host="evil.example"), 403),
        (scope_of(path="/config/update"), 404),
        (scope_of("GET"), 405),
        (scope_of(content_length="1001"), 413),
    ],
)
def test_what_no_backend_answered_has_an_id_of_its_own(scope: Scope, status: int) -> None:
    """LiteLLM's own answers and the guard's refusals can be told apart too, each by another id."""
    answers = [call(Inner(), {**scope}, piece(b"{}")) for _ in range(2)]
    assert [sent[0]["status"] for sent in answers] == [status] * 2
    ids = [[value for name, value in sent[0]["headers"] if name == b"x-request-id"] for sent in answers]
    assert ids == [[value for name, value in sent[0]["headers"] if name == b"request-id"] for sent in answers]
    assert [len(values) for values in ids] == [1, 1]
    assert ids[0][0] and ids[0] != ids[1]


@pytest.mark.parametrize(
    ("scope", "messages", "status"),
    [
        (scope_of(host="evil.example"), [piece(b"{}")], 403),
        (scope_of(origin="https://evil.example"), [piece(b"{}")], 403),
        (scope_of("OPTIONS", origin="https://evil.example", access_control_request_method="POST"), [], 403),
        (scope_of("OPTIONS"), [], 405),
        (scope_of(path="/config/update"), [piece(b"{}")], 404),
        (scope_of(path=CHAT + "/"), [piece(b"{}")], 404),
        (scope_of("GET"), [], 405),
        (scope_of(content_length="1001"), [], 413),
        (scope_of(), [piece(b"x" * 600, True), piece(b"x" * 600)], 413),
        (scope_of(), [piece(b"[]")], 400),
        (scope_of(), [piece(b'{"model": 5}')], 400),
    ],
)
def test_what_is_refused_never_gets_in(scope: Scope, messages: list[Message], status: int) -> None:
    """The answer is JSON in OpenAI's form, and the application inside is not called."""
    inner = Inner()
    sent = call(inner, scope, *messages)
    assert sent[0]["status"] == status
    assert set(json.loads(sent[1]["body"])["error"]) == {"message", "type", "param", "code"}
    assert inner.seen == []


def test_a_client_that_leaves_while_sending_costs_nothing() -> None:
    """Nothing is called and nothing is sent."""
    inner = Inner()
    assert call(inner, scope_of(), piece(b'{"mod', True)) == []
    assert inner.seen == []


def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-sent request is given up."""
    monkeypatch.setattr("kvserve.proxy.asgi._BODY_TIMEOUT_SECONDS", 0.05)
    sent: list[Message] = []

    async def never() -> Message:
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Guard(Inner(), Behind(unasked), RULES)(scope_of(), never, send))
    assert sent[0]["status"] == 408


def test_websockets_are_closed() -> None:
    """Nothing behind the proxy speaks them."""
    inner = Inner()
    sent = call(inner, {"type": "websocket", "path": "/v1/realtime", "headers": []}, {"type": "websocket.connect"})
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert inner.seen == []


def test_the_key_is_needed_but_for_health() -> None:
    """Health and the dashboard's files stay open for whoever watches; all else wants the key."""
    rules = GuardRules("127.0.0.1", "m", api_key="k")
    for pattern, route in ROUTES.items():
        path = pattern.replace("*", "x")
        for method in route.methods:
            litellm, kvserve = Inner(), Inner()
            sent = call(litellm, scope_of(method, path), piece(b"{}"), rules=rules, backend=kvserve)
            assert sent[0]["status"] == (401 if route.needs_key else 200), path
            assert len(litellm.seen) + len(kvserve.seen) == (not route.needs_key)
            sent = call(litellm, scope_of(method, path, x_api_key="k"), piece(b"{}"), rules=rules, backend=kvserve)
            assert sent[0]["status"] == 200, path
            assert bool(kvserve.seen) == (route.way == "direct") != bool(litellm.seen)
    assert [path for path, route in ROUTES.items() if not route.needs_key] == [
        *("/health/readiness", "/health/liveliness"),
        *("/health", "/", "/dashboard", "/dashboard/*"),
    ]


def test_the_refusal_names_the_one_key() -> None:
    """Whoever tries one of LiteLLM's virtual keys, or to make one, reads why that cannot work."""
    rules = GuardRules("127.0.0.1", "m", api_key="k")
    sent = call(Inner(), scope_of(authorization="Bearer sk-virtual"), piece(b"{}"), rules=rules)
    assert sent[0]["status"] == 401 and "API_KEY, the only key" in json.loads(sent[1]["body"])["error"]["message"]
    for path in ("/key/generate", "/user/new", "/team/list"):
        sent = call(Inner(), scope_of(path=path, authorization="Bearer k"), piece(b"{}"), rules=rules)
        assert sent[0]["status"] == 404
        assert "virtual keys" in (message := json.loads(sent[1]["body"])["error"]["message"]) and "database" in message


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:8000"])
def test_pages_of_this_machine_may_call(origin: str) -> None:
    """A web app beside the server: its preflight, answers and errors, whoever gives them."""
    wanted = "authorization,content-type,x-api-key,x-session-id,anthropic-version,anthropic-beta"
    asks = {"access_control_request_method": "POST", "access_control_request_headers": wanted}
    sent = call(Inner(), scope_of("OPTIONS", origin=origin, **asks), rules=RULES)
    assert (sent[0]["status"], header(sent, b"access-control-allow-headers")) == (204, wanted.encode())
    assert header(sent, b"access-control-allow-methods") == b"GET, POST, DELETE"
    answers = [sent]
    for scope, inner in (
        (scope_of(origin=origin), Inner()),
        (scope_of(origin=origin), Inner(500, b"text/plain", b"broken")),
        (scope_of(path="/v1/messages", origin=origin), Inner(content_type=b"text/event-stream")),
        (scope_of("GET", "/health", origin=origin), Inner()),
        (scope_of(path="/nothing", origin=origin), Inner()),
    ):
        answers.append(call(inner, scope, piece(b"{}"), backend=inner))
    assert [answer[0]["status"] for answer in answers] == [204, 200, 500, 200, 200, 404]
    assert {header(answer, b"access-control-allow-origin") for answer in answers} == {origin.encode()}


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer w"}, {"x_api_key": "w"}, {"authorization": "Basic a"}]
)
def test_without_a_key_nobody_is_asked(headers: dict[str, str]) -> None:
    """Any key passes, and none; with one all of these are refused, in Anthropic's form where that is spoken."""
    assert call(Inner(), scope_of(**headers), piece(b"{}"))[0]["status"] == 200
    keyed = GuardRules("127.0.0.1", "m", api_key="k")
    for path, kind in ((CHAT, "invalid_api_key"), ("/v1/messages", "authentication_error")):
        inner = Inner()
        sent = call(inner, scope_of(path=path, **headers), piece(b"{}"), rules=keyed)
        error = json.loads(sent[1]["body"])["error"]
        assert (sent[0]["status"], not inner.seen) == (401, True)
        assert kind in (error.get("code"), error["type"])


@pytest.mark.parametrize("headers", [{"x_api_key": "k"}, {"authorization": "Bearer k"}])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models"])
def test_the_key_opens_the_door_in_both_spellings(path: str, headers: dict[str, str]) -> None:
    """Whatever is behind it."""
    inner = Inner()
    method = "GET" if path == "/v1/models" else "POST"
    rules = GuardRules("127.0.0.1", "m", api_key="k")
    assert call(inner, scope_of(method, path, **headers), piece(b"{}"), rules=rules)[0]["status"] == 200
    assert len(inner.seen) == 1


def test_the_start_is_held_back_until_litellm_is_warm() -> None:
    """One request goes through, past the backend and with the key, before the server learns that it may begin."""
    order: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["from"] = "lifespan"
            await send({"type": "lifespan.startup.complete"})
        else:
            exchange = CURRENT_EXCHANGE.get()
            assert exchange is not None
            authorization = dict(scope["headers"])[b"authorization"]
            order.append(
                (
                    exchange.instead_of_backend is not None,
                    authorization,
                    scope["state"],
                    json.loads((await receive())["body"])["model"],
                )
            )

    async def run() -> None:
        async def receive() -> Message:
            return {"type": "lifespan.startup"}

        async def send(message: Message) -> None:
            order.append(message["type"])

        rules = GuardRules("127.0.0.1", "m", api_key="k")
        await Guard(app, Behind(unasked), rules)({"type": "lifespan", "state": {}}, receive, send)

    asyncio.run(run())
    assert order == [(True, b"Bearer k", {"from": "lifespan"}, "m"), "lifespan.startup.complete"]


def test_a_warm_up_that_hangs_does_not_keep_the_proxy_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time the start goes on."""
    monkeypatch.setattr("kvserve.proxy.guard._WARM_UP_TIMEOUT_SECONDS", 0.05)
    sent: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
        else:
            await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    asyncio.run(Guard(app, Behind(unasked), RULES)({"type": "lifespan", "state": {}}, receive, send))
    assert sent == ["lifespan.startup.complete"]


def test_routes_are_exact() -> None:
    """No prefix and no other method opens a path."""
    assert find_route("POST", CHAT) == replace(ROUTES[CHAT], path=CHAT)
    for path in ("//", "/v1", "//v1/models", "/v1/models/", "/openai/v1/models", "/V1/MODELS"):
        with pytest.raises(NotFound):
            find_route("GET", path)
    with pytest.raises(MethodNotAllowed):
        find_route("HEAD", "/v1/models")
