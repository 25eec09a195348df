"""Two servers behind two guards, on a tiny real model, without LiteLLM: a session stays where its KV is, goes on where
its server ends, and comes back."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pytest

from kvserve.core import JsonObject
from kvserve.proxy.asgi import Message
from kvserve.proxy.backend_health import look
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.entry import Backend
from kvserve.proxy.guard import Guard, GuardRules
from tests.proxy.plain_relay import PlainRelay
from tests.proxy.test_guard import piece, scope_of
from tests.serving import AppUnderTest, serving_app

SECRET = "a-secret-of-sixteen"
RULES = "Answer in one short sentence. " * 12
MESSAGES, RESPONSES, CHATS = "/v1/messages", "/v1/responses", "/v1/chat/completions"


@dataclass(frozen=True)
class Answered:
    """One answer of a front: who gave it, and how much of the prompt was known."""

    status: int
    backend: str | None
    body: Any

    @property
    def num_cached_tokens(self) -> int:
        usage = self.body["usage"]
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens", usage.get("cache_read_input_tokens", 0)))


class Front:
    """One proxy: a guard with a loop of its own."""

    def __init__(self, backends: tuple[BackendAddress, ...]) -> None:
        self._behind = Backend()
        rules = GuardRules("127.0.0.1", "openai/m", backends=backends, secret=SECRET)
        self._guard = Guard(PlainRelay(self._behind), self._behind, rules)
        self._runner = asyncio.Runner()
        self.look()

    def close(self) -> None:
        self._runner.run(self._behind.close())
        self._runner.close()

    def look(self) -> None:
        """See how each backend is, as it does once a second."""

        async def run() -> None:
            fleet = self._guard._fleet
            await asyncio.gather(*(look(fleet, each, self._behind.ask, SECRET) for each in fleet.backends))

        self._runner.run(run())

    def ask(self, path: str, body: JsonObject | None = None, method: str = "POST", **headers: str) -> Answered:
        sent: list[Message] = []

        async def run() -> None:
            pending = [piece(json.dumps(body).encode() if body is not None else b"")]

            async def receive() -> Message:
                return pending.pop() if pending else await asyncio.Future()

            async def send(message: Message) -> None:
                sent.append(message)

            await self._guard(scope_of(method, path, **headers) | {"query_string": b""}, receive, send)

        self._runner.run(asyncio.wait_for(run(), 60), context=copy_context())  # as a server gives each request its own
        raw = b"".join(each.get("body", b"") for each in sent)
        named = dict(sent[0]["headers"]).get(b"x-kvserve-backend")
        body = json.loads(raw) if raw.startswith(b"{") else raw
        return Answered(sent[0]["status"], named.decode() if named else None, body)


@dataclass
class Company:
    """The two servers, each with what ends it, and the fronts."""

    servers: dict[str, AppUnderTest]
    ends: dict[str, ExitStack]
    fronts: list[Front]
    num_asked: int = 0

    def ask(self, *args: Any, **kwargs: Any) -> Answered:
        """Through one front and then the other."""
        self.num_asked += 1
        return self.fronts[self.num_asked % 2].ask(*args, **kwargs)

    def look(self) -> None:
        for front in self.fronts:
            front.look()


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    ends = {name: ExitStack() for name in ("one", "two")}
    try:
        servers = {
            name: end.enter_context(
                serving_app(
                    tmp_path_factory.mktemp(name), proxy_secret=SECRET, tenant_isolation=True, default_max_tokens=8
                )
            )
            for name, end in ends.items()
        }
        backends = tuple(BackendAddress(name, f"http://127.0.0.1:{app.port}") for name, app in servers.items())
        known = Company(servers, ends, [Front(backends), Front(backends[::-1])])
        yield known
        for front in known.fronts:
            front.close()
    finally:
        for end in reversed(ends.values()):
            end.close()


class Session:
    """A conversation in closed loop; `session` None leaves it to the first words."""

    def __init__(self, company: Company, path: str, first: str, session: str | None = None, **fields: Any) -> None:
        self._company = company
        self._path = path
        self._headers = {"x_session_id": session} if session is not None else {}
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": f"{first} {RULES}"}]
        self._fields = {"model": "m", "temperature": 0, **fields}

    def turn(self) -> Answered:
        """The next turn; what was answered stands in the one after it."""
        said = {"input" if self._path == RESPONSES else "messages": self._messages}
        length = "max_output_tokens" if self._path == RESPONSES else "max_tokens"
        answered = self._company.ask(self._path, {**self._fields, **said, length: 8}, **self._headers)
        assert answered.status == 200, answered.body
        again = {"role": "user", "content": "And then?"}
        self._messages = [*self._messages, {"role": "assistant", "content": _text(answered.body)}, again]
        return answered


def _text(body: Any) -> str:
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"] or "-")
    items = (
        body["content"] if "content" in body else [part for item in body["output"] for part in item.get("content", [])]
    )
    return "".join(item.get("text", "") for item in items).strip() or "-"


def sessions(company: Company, mark: str) -> list[Session]:
    """Six, two of each protocol, one of which says which session it is."""
    return [
        Session(company, path, f"{mark} {path} {number}", f"s-{mark}-{number}{path[4:8]}" if number else None)
        for path in (MESSAGES, RESPONSES, CHATS)
        for number in range(2)
    ]


def test_every_turn_of_a_session_is_where_its_first_one_was(company: Company) -> None:
    """Whichever proxy it comes through: all but the first turn find what was computed."""
    all_turns = [[session.turn() for _ in range(3)] for session in sessions(company, "stay")]
    assert all(len({turn.backend for turn in turns}) == 1 for turns in all_turns)
    assert {turns[0].backend for turns in all_turns} == {"one", "two"}, "the test needs sessions on both"
    assert all(turn.num_cached_tokens > 100 for turns in all_turns for turn in turns[1:])


def test_tenants_are_apart_on_one_server(company: Company) -> None:
    """The proxy says whose each request is: the same prompt of another user finds nothing."""
    users = [f"user-{number}" for number in range(40)]
    first = Session(company, CHATS, "the same", user=users[0]).turn()
    for user in users[1:]:
        other = Session(company, CHATS, "the same", user=user).turn()
        assert other.num_cached_tokens == 0
        if other.backend == first.backend:
            return
    raise AssertionError("no other user came to the same server")


def test_a_response_goes_on_where_it_is_kept(company: Company) -> None:
    """Though neither its session nor its first words lead there, and it is read through any proxy."""
    for number in range(4):
        made = company.ask(RESPONSES, {"model": "m", "input": f"{number}. {RULES}", "max_output_tokens": 4})
        on = {"model": "m", "input": "On.", "previous_response_id": made.body["id"], "max_output_tokens": 4}
        gone_on = company.ask(RESPONSES, on, x_session_id=f"elsewhere-{number}")
        assert (gone_on.status, gone_on.backend) == (200, made.backend)
        assert company.ask(f"{RESPONSES}/{made.body['id']}", method="GET").body["id"] == made.body["id"]
    assert company.ask(f"{RESPONSES}/resp_nowhere", method="GET").status == 404


def test_all_servers_are_seen_and_emptied(company: Company) -> None:
    """Metrics and health of both, and a DELETE that reaches both."""
    metrics = company.ask("/metrics", method="GET").body.decode()
    assert all(f'kvserve_up{{backend="{name}"}} 1.0' in metrics for name in company.servers)
    assert company.ask("/v1/cache", method="DELETE").body["backends"].keys() == company.servers.keys()
    reports = company.ask("/v1/cache", method="GET").body["backends"]
    assert all(
        app.get("/v1/cache").json["ram_bytes"] == reports[name]["ram_bytes"] == 0
        for name, app in company.servers.items()
    )


def test_a_drained_server_gets_nothing_new_and_its_sessions_come_back(company: Company) -> None:
    """Drained through either proxy; while it is, the others take its sessions over."""
    talks = sessions(company, "drain")
    homes = [talk.turn().backend for talk in talks]
    assert company.ask("/backends/two/v1/drain", {"draining": True}).status == 200
    company.look()
    assert {talk.turn().backend for talk in talks} == {"one"}
    assert company.ask("/backends/two/v1/drain", {"draining": False}).status == 200
    company.look()
    assert [talk.turn().backend for talk in talks] == homes


def test_sessions_go_on_where_their_server_ends(company: Company) -> None:
    """Each is cold once, and warm again with its next turn. The last test: one server is gone after it."""
    talks = sessions(company, "end")
    homes = [[talk.turn() for _ in range(2)][-1].backend for talk in talks]
    company.ends["two"].close()
    after = [[talk.turn() for _ in range(2)] for talk in talks]
    assert {turn.backend for turns in after for turn in turns} == {"one"}
    for home, (first, second) in zip(homes, after, strict=True):
        assert (first.num_cached_tokens > 100) == (home == "one")
        assert second.num_cached_tokens > 100
