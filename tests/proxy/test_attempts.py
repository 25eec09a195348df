"""Two backends behind the guard: what is tried elsewhere, what is not, and what the client gets."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvserve.core import BEGIN_HEADER, KEY_HEADER
from kvserve.errors import NotReady
from kvserve.proxy.asgi import App, Message, Receive, Scope, Send
from kvserve.proxy.attempts import CURRENT_ATTEMPT, Attempt
from kvserve.proxy.backend_health import PlainAnswer
from kvserve.proxy.backends import BackendAddress, rendezvous
from kvserve.proxy.envelope import CURRENT_EXCHANGE, UpstreamError, pass_through_endpoint
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.routing_key import routing_key
from tests.proxy.test_guard import CHAT, piece, scope_of

ONE, TWO, THREE = (BackendAddress(name, f"http://{name}", f"key-{name}") for name in ("one", "two", "three"))
RULES = GuardRules("127.0.0.1", "openai/m", backends=(ONE, TWO, THREE), secret="shared", api_key="front")
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
BY_NAME = {backend.name: backend for backend in (ONE, TWO, THREE)}
WAYS = (CHAT, "/v1/messages", "/v1/models/name")
"""One path of each way to a backend: a chat, as it is, past LiteLLM."""


type Play = Callable[[Attempt, Send], Any]


@dataclass
class Stage:
    """LiteLLM and the servers behind it: each backend's part is played by its entry; who has none answers 200."""

    parts: dict[str, Play] = field(default_factory=dict)
    asked: list[tuple[str, Scope, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attempt = CURRENT_ATTEMPT.get()
        assert attempt is not None
        self.asked.append((attempt.backend.name, scope, (await receive())["body"]))
        scope["state"]["written"] = scope["state"].get("written", 0) + 1
        assert scope["state"]["written"] == 1, "each application writes into a scope of its own"
        await self.parts.get(attempt.backend.name, answers(200))(attempt, send)

    def of(self, backend: BackendAddress) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            attempt = CURRENT_ATTEMPT.get()
            assert attempt is not None and attempt.backend == backend
            await self({**scope, "state": {}}, receive, send)
            if attempt.is_unreached:
                raise NotReady("kvserve itself gives no answer.")

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
        raise AssertionError(target)


def answers(status: int, body: bytes = b"{}") -> Play:
    async def play(attempt: Attempt, send: Send) -> None:
        if (exchange := CURRENT_EXCHANGE.get()) is not None and status >= 400:
            exchange.upstream_error = UpstreamError(status, body, "application/json", "7")
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": body})

    return play


async def gone(attempt: Attempt, send: Send) -> None:
    """Nobody listens: the hook has noted it, and LiteLLM answers in its own words."""
    attempt.is_unreached = True
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"error": "litellm"}'})


async def breaks(attempt: Attempt, send: Send) -> None:
    """The answer has begun, and breaks off."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    attempt.is_unreached = True
    await send({"type": "http.response.body", "body": b"half", "more_body": True})


ORDER = [
    backend.name
    for backend in rendezvous(routing_key(json.loads(BODY), {"authorization": "Bearer front"}), RULES.backends)
]
"""The backends as they are asked for this body."""


def staged(*parts: Play) -> tuple[Stage, str, str]:
    """A stage on which the backends play these parts in the order in which they are asked, and the first two."""
    return Stage(dict(zip(ORDER, parts, strict=False))), ORDER[0], ORDER[1]


def call(
    stage: Stage, path: str, *messages: Message, rules: GuardRules = RULES, scope: Scope | None = None
) -> list[Message]:
    sent: list[Message] = []

    async def run() -> None:
        pending, left = list(messages or (piece(BODY),)), asyncio.Event()

        async def receive() -> Message:
            if not pending:
                await left.wait()
            return pending.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        method = "GET" if path.startswith("/v1/models") else "POST"
        own = scope or scope_of(method, path, authorization="Bearer front")
        await Guard(stage, stage, rules)(own, receive, send)

    asyncio.run(asyncio.wait_for(run(), 20))
    return sent


def outcome(sent: list[Message]) -> tuple[int, str | None, bytes]:
    headers = dict(sent[0]["headers"])
    named = headers.get(b"x-kvserve-backend")
    return sent[0]["status"], named.decode() if named else None, b"".join(each.get("body", b"") for each in sent)


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("odd", [gone, answers(429), answers(503), answers(529)], ids=["gone", "429", "503", "529"])
def test_what_one_does_not_answer_the_next_one_does(path: str, odd: Play) -> None:
    """Once, with the whole body, by its own key, and the client sees nothing of the first."""
    stage, first, second = staged(odd)
    assert outcome(call(stage, path)) == (200, second, b"{}")
    assert [name for name, _, _ in stage.asked] == [first, second]
    bodies = [scope.get("state", {}).get("litellm_pass_through_raw_body", body) for _, scope, body in stage.asked]
    assert bodies[0] == bodies[1] and (path == CHAT or bodies[0] == BODY)
    keys = [dict(scope["headers"])[b"authorization"].decode() for _, scope, _ in stage.asked]
    past_litellm = path == WAYS[2]
    assert keys == ([f"Bearer key-{first}", f"Bearer key-{second}"] if past_litellm else ["Bearer front"] * 2)
    if path == WAYS[1]:
        places = [str(pass_through_endpoint(BY_NAME[name])["path"]) for name in (first, second)]
        assert [scope["path"] for _, scope, _ in stage.asked] == [f"{place}{path}" for place in places]


@pytest.mark.parametrize("path", WAYS[:2])
def test_only_one_that_is_not_the_last_holds_its_head_back(path: str) -> None:
    """What a client says of it itself counts nothing."""
    stage, _first, _second = staged(gone)
    call(stage, path)
    held = [dict(scope["headers"]).get(BEGIN_HEADER.encode()) for _, scope, _ in stage.asked]
    assert held == [b"9", None]


def test_no_header_of_a_client_becomes_what_the_guard_states() -> None:
    """LiteLLM's pass-through endpoints send `x-pass-NAME` on as NAME."""
    stage, _, _ = staged()
    scope = scope_of(path=WAYS[1], authorization="Bearer front", x_pass_x_kvserve_key="other -", x_kvserve_key="mine")
    sent = call(stage, WAYS[1], scope=scope)
    assert sent[0]["status"] == 200
    names = [name for name, _ in stage.asked[0][1]["headers"]]
    assert b"x-pass-x-kvserve-key" not in names and names.count(KEY_HEADER.encode()) == 1


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("status", [400, 404, 413, 500])
def test_an_answer_is_an_answer(path: str, status: int) -> None:
    """A request that breaks one model is not carried on to the next."""
    stage, first, _second = staged(answers(status, b'{"own": "words"}'))
    assert outcome(call(stage, path)) == (status, first, b'{"own": "words"}')
    assert [name for name, _, _ in stage.asked] == [first]


@pytest.mark.parametrize("path", WAYS[:2])
def test_what_has_begun_is_not_taken_back(path: str) -> None:
    """The client has the head already."""
    stage, first, _second = staged(breaks)
    assert outcome(call(stage, path)) == (200, first, b"half")
    assert len(stage.asked) == 1


@pytest.mark.parametrize("path", WAYS)
def test_the_second_answer_counts_whatever_it_is(path: str) -> None:
    """Two attempts and never a third."""
    stage, _first, second = staged(answers(503), answers(429, b'{"own": "words"}'))
    assert outcome(call(stage, path)) == (429, second, b'{"own": "words"}')
    assert len(stage.asked) == 2


@pytest.mark.parametrize("path", WAYS)
def test_where_nobody_answers_the_guard_says_so(path: str) -> None:
    """In the protocol's form with its status, and when to come back; not in LiteLLM's words."""
    stage, _first, _second = staged(gone, gone)
    sent = call(stage, path)
    status, _, body = outcome(sent)
    said, is_anthropics = json.loads(body), path == "/v1/messages"
    assert status == (529 if is_anthropics else 503) and "None of the servers" in said["error"]["message"]
    assert (said.get("type") == "error") == is_anthropics
    assert dict(sent[0]["headers"])[b"retry-after"] == b"2"


@pytest.mark.parametrize("path", WAYS[:2])
def test_one_that_gave_no_answer_is_asked_last(path: str) -> None:
    """Until it is seen again: the guard remembers what a request met."""
    stage, first, second = staged(gone)
    guard = Guard(stage, stage, RULES)

    async def twice() -> None:
        for _ in range(2):
            pending = [piece(BODY)]

            async def receive(pending: list[Message] = pending) -> Message:
                return pending.pop() if pending else await asyncio.Future()

            async def send(message: Message) -> None:
                return None

            await guard(scope_of(path=path, authorization="Bearer front"), receive, send)

    asyncio.run(asyncio.wait_for(twice(), 20))
    assert [name for name, _, _ in stage.asked] == [first, second, second]


@pytest.mark.parametrize("path", WAYS)
def test_a_client_that_leaves_is_not_answered_elsewhere(path: str) -> None:
    """Nobody would read it."""

    async def waits(attempt: Attempt, send: Send) -> None:
        await asyncio.sleep(60)

    stage, _first, _second = staged(waits)
    assert call(stage, path, piece(BODY), {"type": "http.disconnect"}) == []
    assert len(stage.asked) == 1


@pytest.mark.parametrize("path", WAYS)
def test_with_one_backend_nothing_is_named_and_nothing_read(path: str) -> None:
    """As it was: the body goes on unread, and its answer counts."""
    rules = GuardRules("127.0.0.1", "openai/m", backends=(ONE,), secret="shared", api_key="front")
    stage = Stage({"one": answers(503, b'{"own": "words"}')})
    assert outcome(call(stage, path, rules=rules)) == (503, None, b'{"own": "words"}')
    assert len(stage.asked) == 1 and BEGIN_HEADER.encode() not in dict(stage.asked[0][1]["headers"])
