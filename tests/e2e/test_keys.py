"""Several people with keys before one server behind a real LiteLLM: what the SDKs raise, and whose things are whose."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import API_KEY, Stage
from tests.e2e.servers import ROOT, ServerProcess, serving, wait_until
from tests.e2e.test_openai_errors import ENDLESS
from tests.proxy.held import ANNA, ANNAS_SECOND, BOSS, OTTO, limited, write_keys

pytestmark = pytest.mark.e2e

SYSTEM = "You look at places and say what is there, in short and friendly words. " * 8
SLOW: dict[str, Any] = {"max_tokens": 100_000, "extra_body": {"logit_bias": ENDLESS}}
"""An answer that does not end by itself."""


class Deployed:
    """A server with a file of keys, and its clients."""

    def __init__(self, server: ServerProcess, file: Path) -> None:
        self.server, self.file = server, file

    def holders(self, **limits: object) -> None:
        """Gives anna these limits, and waits until they count."""
        write_keys(self.file, limited(**limits))
        time.sleep(1.1)

    def openai(self, key: str) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.server.proxy_port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=100)

    def anthropic(self, key: str) -> anthropic.Anthropic:
        url = f"http://127.0.0.1:{self.server.proxy_port}"
        return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=100)

    def ask(self, key: str, method: str, path: str, body: object = None, **more: str) -> tuple[int, Any]:
        """Status and JSON of an answer; the path goes out as it is written here, with headers of `more`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port_of("litellm"), timeout=60)
        try:
            raw = None if body is None else json.dumps(body).encode()
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            headers |= {name.replace("_", "-"): value for name, value in more.items()}
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            text = response.read()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text
        finally:
            connection.close()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, stage: Stage) -> Iterator[Deployed]:
    stage.clear()
    folder = tmp_path_factory.mktemp("keys")
    file = write_keys(folder / "keys.toml")
    settings = {"API_KEY": API_KEY, "API_KEYS_FILE": file, "TENANT_ISOLATION": "true", "MAX_CONCURRENT_REQUESTS": 4}
    with serving(folder / "server", "--demo=tiny", **settings) as server:
        yield Deployed(server.wait_until_proxy_ready(), file)


SAID: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is the harbour?"}]


def chat(deployed: Deployed, key: str, said: list[Any] = SAID) -> int:
    """Each asks the same in its protocol, and says how many tokens it found."""
    with deployed.openai(key) as client:
        answer = client.chat.completions.create(model="m", messages=said, max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def response(deployed: Deployed, key: str) -> int:
    with deployed.openai(key) as client:
        answer = client.responses.create(
            model="m", instructions=SYSTEM, input="Where is the mill?", max_output_tokens=16, store=False
        )
    assert answer.usage is not None
    return answer.usage.input_tokens_details.cached_tokens


def message(deployed: Deployed, key: str) -> int:
    with deployed.anthropic(key) as client:
        answer = client.messages.create(
            model="m", system=SYSTEM, messages=[{"role": "user", "content": "Where is the inn?"}], max_tokens=2
        )
    return answer.usage.cache_read_input_tokens or 0


ASKING: Mapping[str, Callable[[Deployed, str], int]] = {"chat": chat, "responses": response, "messages": message}


@pytest.mark.parametrize("protocol", ASKING)
def test_a_key_that_nobody_has_is_an_authentication_error(deployed: Deployed, protocol: str) -> None:
    """In both SDKs; a known one, and the operator's, are served."""
    for key in ("wrong", ANNA + "x"):
        with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)) as raised:
            ASKING[protocol](deployed, key)
        assert isinstance(raised.value, anthropic.APIError) is (protocol == "messages")
        if isinstance(raised.value, openai.APIError):
            assert raised.value.code == "invalid_api_key"
    for key in (ANNA, OTTO, BOSS, API_KEY):
        ASKING[protocol](deployed, key)


@pytest.mark.parametrize("protocol", ASKING)
def test_a_reached_limit_is_a_rate_limit_error(deployed: Deployed, protocol: str) -> None:
    """While one of anna's streams runs, whichever protocol asks for a second one; others are served meanwhile, and anna
    again once that client has left."""
    deployed.holders(rows_at_once=1)
    with (
        deployed.openai(ANNA) as client,
        client.chat.completions.create(model="m", messages=SAID, stream=True, **SLOW) as running,
    ):
        next(iter(running))
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as raised:
            ASKING[protocol](deployed, ANNAS_SECOND)
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        error = raised.value.response.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert protocol == "messages" or error["code"] == "rate_limit_exceeded"
        ASKING[protocol](deployed, OTTO)
    wait_until(lambda: _is_admitted(deployed, protocol), 20, lambda: "the row of a client that left is taken")
    deployed.server.wait_for(num_running=0)


def _is_admitted(deployed: Deployed, protocol: str) -> bool:
    try:
        ASKING[protocol](deployed, ANNA)
    except (openai.RateLimitError, anthropic.RateLimitError):
        return False
    return True


BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 100_000},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 100_000},
    "/v1/messages": {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 100_000},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_frees_its_row(deployed: Deployed, path: str, stream: bool) -> None:
    """Streamed or not, three times in a row; and the server computes nothing for it any more."""
    deployed.holders(rows_at_once=1)
    raw = json.dumps({**BODIES[path], "model": "m", "logit_bias": ENDLESS, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {ANNA}\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", deployed.server.port_of("litellm")), timeout=60) as client:
            client.sendall(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            deployed.server.wait_for(num_running=1)
        wait_until(lambda: _is_admitted(deployed, "chat"), 20, lambda: "the row of a client that left is taken")
        deployed.server.wait_for(num_running=0)


def test_a_minutes_requests_are_counted(deployed: Deployed) -> None:
    """Over all protocols and both keys; counting tokens and reading are free."""
    deployed.holders(requests_per_minute=2)
    chat(deployed, ANNA)
    message(deployed, ANNAS_SECOND)
    with pytest.raises(openai.RateLimitError) as raised:
        chat(deployed, ANNA)
    assert "2 requests in a minute" in raised.value.message
    with deployed.anthropic(ANNA) as client:
        counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hello"}])
    assert counted.input_tokens > 0
    with deployed.openai(ANNA) as models:
        assert models.models.list().data
    deployed.holders()
    chat(deployed, ANNA)


@pytest.mark.parametrize("protocol", ASKING)
def test_another_principal_finds_nothing_of_a_prompt(deployed: Deployed, protocol: str) -> None:
    """0 cached tokens; a key of the same principal, the control, finds nearly all."""
    deployed.holders()
    assert deployed.ask(API_KEY, "DELETE", "/v1/cache")[0] == 200
    first, others, own = (ASKING[protocol](deployed, key) for key in (ANNA, OTTO, ANNAS_SECOND))
    assert (first, others) == (0, 0) and own > len(SYSTEM.split())


LONG: list[Any] = [{"role": "user", "content": "Go on to the next house. " * 600}]
"""Read in some seconds where reading is slow, so that another request comes meanwhile."""


@pytest.fixture(scope="module")
def reading_slowly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder, script = tmp_path_factory.mktemp("slow"), ROOT / "tests" / "e2e" / "slow_prefill.py"
    settings = {"API_KEY": API_KEY, "API_KEYS_FILE": write_keys(folder / "keys.toml"), "TENANT_ISOLATION": "true"}
    with serving(folder / "server", "--demo=tiny", script=script, PREFILL_STEP_SIZE=64, **settings) as server:
        yield Deployed(server.wait_until_proxy_ready(), folder / "keys.toml")


@pytest.mark.parametrize(("key", "waits"), [(OTTO, False), (ANNAS_SECOND, True)], ids=["another", "its own"])
def test_a_tenant_waits_for_no_row_of_another(reading_slowly: Deployed, key: str, waits: bool) -> None:
    """The same prompt while it is being read for the first one: another principal reads it itself from the start; a key
    of the same principal, the control, waits and finds it."""
    assert reading_slowly.ask(API_KEY, "DELETE", "/v1/cache")[0] == 200
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chat, reading_slowly, ANNA, LONG)
        reading_slowly.server.wait_for(num_running=1)
        second = pool.submit(chat, reading_slowly, key, LONG)
        reading_slowly.server.wait_for(num_running=2 - waits, num_waiting=int(waits))
        assert not first.done(), "nobody could have waited"
        found = [first.result(), second.result()]
    assert found[0] == 0 and (found[1] > 0) is waits


def test_principals_are_apart(deployed: Deployed) -> None:
    """A response, its conversation, explanations of each protocol, agents: unheard of to another principal."""
    deployed.holders()
    with deployed.openai(ANNA) as anna, deployed.openai(ANNAS_SECOND) as second, deployed.openai(OTTO) as otto:
        kept = anna.responses.create(model="m", input="I am Anna.", max_output_tokens=16)
        assert second.responses.retrieve(kept.id).id == kept.id
        with pytest.raises(openai.NotFoundError):
            otto.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            otto.responses.create(model="m", input="Who am I?", previous_response_id=kept.id, max_output_tokens=16)
        further = second.responses.create(
            model="m", input="Who am I?", previous_response_id=kept.id, max_output_tokens=16
        )
        asked = anna.chat.completions.create(model="m", messages=SAID, max_tokens=2)
    with deployed.anthropic(ANNA) as client:
        said = client.messages.create(model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
    for request_id in (kept.id, further.id, asked.id, said.id):
        path = f"/v1/cache/explain/{request_id}"
        assert [deployed.ask(key, "GET", path)[0] for key in (OTTO, BOSS, ANNA, ANNAS_SECOND)] == [404, 404, 200, 200]
    assert deployed.ask(ANNA, "POST", "/v1/agents", {"agent_id": "one"})[0] == 201
    assert [deployed.ask(key, "GET", "/v1/agents/one")[0] for key in (OTTO, BOSS, ANNAS_SECOND)] == [404, 404, 200]
    assert deployed.ask(OTTO, "GET", "/v1/agents") == (200, {"agents": []})
    assert deployed.ask(OTTO, "DELETE", "/v1/agents/one")[0] == 404
    assert deployed.ask(ANNA, "DELETE", "/v1/agents/one")[0] == 200


def test_operators_alone_reach_what_is_everybodys(deployed: Deployed) -> None:
    """A 403 for others, also on ways round; on port 8080 nobody's key counts but API_KEY."""
    deployed.holders()
    for method, path in (("GET", "/v1/cache"), ("DELETE", "/v1/cache?session=x"), ("GET", "/metrics")):
        assert [deployed.ask(key, method, path)[0] for key in (ANNA, BOSS, API_KEY)] == [403, 200, 200], path
    with deployed.openai(ANNA) as client, pytest.raises(openai.PermissionDeniedError):
        client.get("/cache", cast_to=object)
    for method, path in (
        ("GET", "/v1/responses/../cache"),
        ("DELETE", "/v1/responses/../cache?session=x"),
        ("GET", "/v1/responses/%2e%2e/cache"),
        ("DELETE", "/v1/agents/x/../../cache?session=x"),
        ("GET", "/v1/agents/%2e%2e/%2e%2e/metrics"),
        ("GET", "/v1/responses/%252e%252e/cache"),
        ("GET", "/v1/responses/..%2Fcache"),
        ("GET", "/v1/responses/..%5Ccache"),
        ("GET", "/v1/models/../cache"),
        ("GET", "/dashboard/../metrics"),
        ("GET", "/dashboard/x/../events"),
    ):
        assert deployed.ask(ANNA, method, path)[0] in (400, 403, 404, 405), path
    for key in (ANNA, BOSS):
        connection = http.client.HTTPConnection("127.0.0.1", deployed.server.port, timeout=60)
        connection.request("GET", "/v1/models", headers={"x-api-key": key})
        assert connection.getresponse().status == 401
        connection.close()


@pytest.mark.parametrize("name", ["x_kvserve_key", "x_pass_x_kvserve_key", "X_Pass_X_Kvserve_Key"])
def test_nobody_passes_for_the_operator(deployed: Deployed, name: str) -> None:
    """By no header: LiteLLM's endpoint takes `x-pass-` off a name and puts the rest in the place of what was there."""
    deployed.holders()
    for value in ("x", "-", "0123456789abcdef"):
        for key in (API_KEY, OTTO):
            assert deployed.ask(key, "POST", "/v1/agents", {"agent_id": f"of-{key}"})[0] == 201
        status, listed = deployed.ask(OTTO, "GET", "/v1/agents", **{name: value})
        assert (status, [agent["agent_id"] for agent in listed["agents"]]) == (200, [f"of-{OTTO}"])
        for key in (API_KEY, OTTO):
            assert deployed.ask(key, "DELETE", f"/v1/agents/of-{key}")[0] == 200


def test_litellm_is_told_nothing_by_its_own_headers(deployed: Deployed) -> None:
    """A key of its header would be asked for in the place of the server's."""
    body = {"messages": SAID, "max_tokens": 2}
    headers = {"x_litellm_api_key": "wrong", "x_litellm_timeout": "0.000001", "x_litellm_disable_callbacks": "all"}
    assert deployed.ask(OTTO, "POST", "/v1/chat/completions", body, **headers)[0] == 200


def test_a_key_that_is_taken_out_is_refused_within_a_second(deployed: Deployed) -> None:
    """A stream that runs goes on meanwhile; a broken file changes nothing and is told in the log, once."""
    deployed.holders()
    log = next((deployed.server.folder / "state").glob("litellm-*/litellm.log"))
    with (
        deployed.openai(ANNA) as client,
        client.chat.completions.create(model="m", messages=SAID, stream=True, **SLOW) as running,
    ):
        next(iter(running))
        write_keys(deployed.file, {name: table for name, table in limited().items() if name != "anna"})
        time.sleep(1.0)
        with pytest.raises(openai.AuthenticationError):
            chat(deployed, ANNA)
        assert next(iter(running)).choices
    chat(deployed, OTTO)
    deployed.file.write_text("[otto", "utf-8")
    for _ in range(3):
        time.sleep(1.1)
        chat(deployed, OTTO)
    assert log.read_text("utf-8").count("API_KEYS_FILE cannot be used") == 1
    deployed.holders()
    chat(deployed, ANNA)
