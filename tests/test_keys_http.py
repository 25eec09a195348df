"""Two holders of keys before one server: what is one's is not the other's, neither words nor the time of a prefill. The
guard is port 4000's own, a relay stands in LiteLLM's place."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvserve.core import Principal
from kvserve.engine.waiting_for_prefix import WaitingForPrefix
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.entry import Backend
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.keys_file import KeyHolder
from tests.proxy.held import ANNA, ANNAS_SECOND, API_KEY, OTTO, write_keys
from tests.proxy.plain_relay import PlainRelay
from tests.serving import AppUnderTest, chat_body, eventually, serving_app, slow_prefill

RULES = "You look at places and say what is there, in short and friendly words. " * 8
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ANNAS, OTTOS = (KeyHolder(name, name).digest for name in ("anna", "otto"))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    folder = tmp_path_factory.mktemp("held")
    with serving_app(folder, tenant_isolation=True, api_key=API_KEY) as running:
        yield running


@pytest.fixture
def app(started: AppUnderTest) -> AppUnderTest:
    """Nothing is cached."""
    with started.connect() as client:
        emptied = client.request("DELETE", "/v1/cache", None, {"Connection": "close", "x-api-key": API_KEY})
    assert emptied.status == 200
    return started


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys.toml")


class Port:
    """Port 4000, asked by holders of keys."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, key: str, method: str, path: str, body: object = None) -> httpx.Response:
        return await self._client.request(method, path, json=body, headers={"x-api-key": key})

    async def post(self, key: str, path: str, body: object) -> dict[str, Any]:
        answer = await self.ask(key, "POST", path, body)
        assert answer.status_code in (200, 201), answer.text
        return dict(answer.json())

    async def statuses(self, method: str, path: str, body: object = None) -> dict[str, int]:
        """What each principal is answered."""
        keys = {"otto": OTTO, "anna": ANNAS_SECOND}
        return {name: (await self.ask(key, method, path, body)).status_code for name, key in keys.items()}


@asynccontextmanager
async def port_of(app: AppUnderTest, file: Path) -> AsyncIterator[Port]:
    behind, here = Backend(), BackendAddress("kvserve", f"http://127.0.0.1:{app.port}", API_KEY)
    secret = app.app._proxy_secret
    rules = GuardRules(
        "127.0.0.1", "openai/m", backends=(here,), api_key=API_KEY, secret=secret, api_keys_file=str(file)
    )
    transport = httpx.ASGITransport(Guard(PlainRelay(behind), behind, rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield Port(client)


def prompt(said: str, path: str = CHAT) -> dict[str, Any]:
    turn = {"role": "user", "content": said}
    if path == MESSAGES:
        return {"model": "m", "system": RULES, "messages": [turn], "max_tokens": 2}
    return chat_body([{"role": "system", "content": RULES}, turn], max_tokens=2)


def num_cached(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_is_one_principals_another_has_never_heard_of(app: AppUnderTest, file: Path) -> None:
    """Responses, explanations, agents: 404 as for a name that nobody has; for another key of the principal they are
    there."""
    asked = {"input": "Where is the harbour?", "max_output_tokens": 4, "temperature": 0}

    async def run() -> None:
        async with port_of(app, file) as port:
            response = await port.post(ANNA, RESPONSES, asked)
            kept = f"{RESPONSES}/{response['id']}"
            assert await port.statuses("GET", kept) == {"otto": 404, "anna": 200}
            assert await port.statuses("GET", f"{kept}/input_items") == {"otto": 404, "anna": 200}
            further = {**asked, "previous_response_id": response["id"]}
            assert await port.statuses("POST", RESPONSES, further) == {"otto": 404, "anna": 200}
            unknown = await port.ask(OTTO, "GET", f"{RESPONSES}/{'x' * len(response['id'])}")
            theirs = await port.ask(OTTO, "GET", kept)
            assert unknown.text.replace("x" * len(response["id"]), response["id"]) == theirs.text
            explained = f"/v1/cache/explain/{response['id']}"
            assert await port.statuses("GET", explained) == {"otto": 404, "anna": 200}
            shown = (await port.ask(ANNA, "GET", explained)).json()
            assert shown["principal"] == str(Principal(ANNAS)) and ANNAS != OTTOS
            assert await port.statuses("DELETE", kept) == {"otto": 404, "anna": 200}

    asyncio.run(run())


def test_agents_are_their_holders(app: AppUnderTest, file: Path) -> None:
    """Two holders may give theirs one name; the operator finds both behind the digests of their principals."""
    said = {"messages": [{"role": "user", "content": "Where is the harbour?"}], "max_tokens": 4, "temperature": 0}

    async def run() -> None:
        async with port_of(app, file) as port:
            for key, words in ((ANNA, "Be brief."), (OTTO, "Be rude."), (API_KEY, "Be everybody's.")):
                made = await port.post(key, "/v1/agents", {"agent_id": "one", "system_prompt": words})
                assert made["agent_id"] == "one"
            again = await port.ask(ANNAS_SECOND, "POST", "/v1/agents", {"agent_id": "one"})
            assert again.status_code == 409 and "There is an agent 'one' already." in again.text
            assert await port.statuses("POST", "/v1/agents", {"agent_id": f"{ANNAS}/two"}) == {"otto": 400, "anna": 400}
            answered = await port.post(ANNA, "/v1/agents/one/generate", said)
            assert answered["agent"]["agent_id"] == "one" and answered["agent"]["num_turns"] == 1
            turns = {}
            for name, key in (("anna", ANNAS_SECOND), ("otto", OTTO), ("operator", API_KEY)):
                found = (await port.ask(key, "GET", "/v1/agents/one")).json()
                turns[name] = (found["system_prompt"], found["num_turns"])
            assert turns == {"anna": ("Be brief.", 1), "otto": ("Be rude.", 0), "operator": ("Be everybody's.", 0)}
            listed = {
                key: [agent["agent_id"] for agent in (await port.ask(key, "GET", "/v1/agents")).json()["agents"]]
                for key in (ANNA, OTTO, API_KEY)
            }
            assert listed == {ANNA: ["one"], OTTO: ["one"], API_KEY: [f"{ANNAS}/one", f"{OTTOS}/one", "one"]}
            for path in (f"/v1/agents/{OTTOS}/one", f"/v1/agents/{ANNAS}/one"):
                assert await port.statuses("GET", path) == {"otto": 404, "anna": 404}
            explained = f"/v1/cache/explain/{answered['id']}"
            assert await port.statuses("GET", explained) == {"otto": 404, "anna": 200}
            owner = str(Principal(ANNAS))
            assert (await port.ask(ANNA, "GET", explained)).json()["principal"] == owner
            assert await port.statuses("DELETE", "/v1/agents/one") == {"otto": 200, "anna": 200}
            assert await port.statuses("DELETE", "/v1/agents/one") == {"otto": 404, "anna": 404}
            gone = await port.ask(API_KEY, "GET", "/v1/agents")
            assert [agent["agent_id"] for agent in gone.json()["agents"]] == ["one"]

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_another_tenants_same_prompt_is_computed(app: AppUnderTest, file: Path, path: str) -> None:
    """0 cached tokens; for the principal's other key, the control, all that was read before is there."""
    body = prompt("Where is the mill?", path)

    def cached(answer: Mapping[str, Any]) -> int:
        return num_cached(answer) if path == CHAT else int(answer["usage"]["cache_read_input_tokens"])

    async def run() -> list[int]:
        async with port_of(app, file) as port:
            return [cached(await port.post(key, path, body)) for key in (ANNA, OTTO, ANNAS_SECOND)]

    first, others, own = asyncio.run(run())
    assert (first, others) == (0, 0) and own > len(RULES.split())


@pytest.mark.parametrize(("key", "waits"), [(OTTO, False), (ANNAS_SECOND, True)], ids=["another", "its own"])
def test_a_tenant_waits_for_no_row_of_another(
    app: AppUnderTest, file: Path, monkeypatch: pytest.MonkeyPatch, key: str, waits: bool
) -> None:
    """The same prompt while the first one's is being read: another principal reads it itself; its own, the control,
    waits and finds it."""
    told: list[int] = []
    real = WaitingForPrefix._tell

    def noted(self: WaitingForPrefix, row: Any, prefill: Any, num_tokens: int, rate: float | None) -> None:
        told.append(num_tokens)
        real(self, row, prefill, num_tokens, rate)

    monkeypatch.setattr(WaitingForPrefix, "_tell", noted)
    body = prompt("Go on to the next house. " * 60)

    async def run() -> list[int]:
        async with port_of(app, file) as port:
            first = asyncio.create_task(port.post(ANNA, CHAT, body))
            is_running = lambda: app.app.health()[1]["num_running"] == 1  # noqa: E731
            assert await asyncio.to_thread(eventually, is_running)
            second = await port.post(key, CHAT, body)
            return [num_cached(await first), num_cached(second)]

    with slow_prefill():
        cached = asyncio.run(run())
    assert cached[0] == 0 and (cached[1] > 0) is waits and bool(told) is waits
