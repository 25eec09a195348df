"""What several backends say, put together, and where a thing is that one of them keeps."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserve.core import KEY_HEADER
from kvserve.proxy.all_backends import merged_metrics, page_of_all
from kvserve.proxy.asgi import App, Message
from kvserve.proxy.backend_health import Fleet, PlainAnswer
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.kept_where import named_thing
from tests.proxy.test_backend_health import WELL
from tests.proxy.test_guard import piece, scope_of, unasked

ONE, TWO = BackendAddress("one", "http://one"), BackendAddress("two", "http://two")
RULES = GuardRules("127.0.0.1", "openai/m", backends=(ONE, TWO), secret="shared", api_key="front")

METRICS = """# HELP kv_up Whether it is.
# TYPE kv_up gauge
kv_up 1.0
# HELP kv_seconds How long.
# TYPE kv_seconds histogram
kv_seconds_bucket{le="0.5",path="a}b \\"c"} 3.0
kv_seconds_count 4.0
kv_seconds_sum 1.5
"""


@dataclass
class Servers:
    """The backends past LiteLLM: what each says by method and path; None breaks the connection."""

    said: dict[str, dict[str, PlainAnswer]]
    asked: list[tuple[str, str, str, Mapping[str, str], bytes]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    refusing: tuple[str, ...] = ()
    keys: list[bytes | None] = field(default_factory=list)

    def of(self, backend: BackendAddress) -> App:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.passed.append(f"{backend.name} {scope['method']} {scope['path']}")
            self.keys.append(dict(scope["headers"]).get(b"authorization"))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"own"})

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
        self.asked.append((backend.name, method, target, headers, body))
        if backend.name not in self.said:
            raise httpx.ConnectError("gone")
        return self.said[backend.name].get(f"{method} {target}", PlainAnswer(404, {}, b"{}"))


def plain(body: object, status: int = 200) -> PlainAnswer:
    return PlainAnswer(status, {}, body.encode() if isinstance(body, str) else json.dumps(body).encode())


def call(
    servers: Servers, method: str, path: str, body: bytes = b"", query: bytes = b"", rules: GuardRules = RULES
) -> tuple[int, bytes]:
    """Status and body of what the guard answers; LiteLLM is not to be asked."""
    sent: list[Message] = []

    async def run() -> None:
        pending = [piece(body)]

        async def receive() -> Message:
            return pending.pop() if pending else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = scope_of(method, path, authorization="Bearer front") | {"query_string": query}
        guard = Guard(unasked, servers, rules)
        for name in servers.refusing:
            guard._fleet.note_answer(next(each for each in rules.backends if each.name == name), 200, {})
        await asyncio.wait_for(guard(scope, receive, send), 20)

    asyncio.run(run())
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


def fleet(**bodies: Any) -> Fleet:
    known = Fleet((ONE, TWO), 8)
    for backend in known.backends:
        if backend.name in bodies:
            known.note_answer(backend, 200, bodies[backend.name])
    return known


def test_metrics_of_all_are_one_text_that_can_be_read() -> None:
    """Each family once, each sample with its backend; what one does not answer is missing, not zero."""
    text = merged_metrics({"one": plain(METRICS), 't"wo': plain(METRICS), "gone": None}, fleet(one=WELL))
    assert text.count("# TYPE kv_up gauge") == 1
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert [(sample.labels, sample.value) for sample in families["kv_up"]] == [
        ({"backend": "one"}, 1.0),
        ({"backend": 't"wo'}, 1.0),
    ]
    bucket = next(sample for sample in families["kv_seconds"] if sample.name.endswith("bucket"))
    assert (bucket.labels, bucket.value) == ({"backend": "one", "le": "0.5", "path": 'a}b "c'}, 3.0)
    ready = {sample.labels["backend"]: sample.value for sample in families["kvserve_proxy_backend_ready"]}
    assert ready == {"one": 1.0, "two": 0.0}


def test_what_is_deleted_is_deleted_everywhere_or_said_not_to_be() -> None:
    """One that gives no answer makes it a 503 that names it: its words are still there."""
    done = plain({"status": "ok"})
    servers = Servers({name: {"DELETE /v1/cache?session=a%20b": done} for name in ("one", "two")})
    status, body = call(servers, "DELETE", "/v1/cache", query=b"session=a%20b")
    assert (status, json.loads(body)["backends"]) == (200, {name: {"status": "ok"} for name in ("one", "two")})
    assert {each[3][KEY_HEADER].partition(" ")[0] for each in servers.asked} == {"shared"}
    del servers.said["two"]
    status, body = call(servers, "DELETE", "/v1/cache", query=b"session=a%20b")
    said = json.loads(body)["backends"]
    assert status == 503 and said["one"] == {"status": "ok"} and "no answer" in said["two"]["error"]["message"]


def test_what_a_server_that_refuses_has_is_not_said_to_be_deleted() -> None:
    """It is not asked, since it would know nobody, and its words are there all the same."""
    servers = Servers({"one": {"DELETE /v1/cache": plain({"status": "ok"})}, "two": {}}, refusing=("two",))
    status, body = call(servers, "DELETE", "/v1/cache")
    assert status == 503 and "error" in json.loads(body)["backends"]["two"]
    assert [each[0] for each in servers.asked] == ["one"]


def test_the_only_server_is_asked_by_its_own_name_and_only_if_it_believes_the_proxy() -> None:
    """As any of several is."""
    alone = GuardRules("127.0.0.1", "openai/m", backends=(ONE,), secret="shared", api_key="front")
    servers = Servers({"one": {}})
    assert call(servers, "DELETE", "/v1/cache", rules=alone)[0] == 200
    assert call(servers, "DELETE", "/backends/typo/v1/cache", rules=alone)[0] == 404
    servers.refusing = ("one",)
    for path in ("/v1/cache", "/backends/one/v1/cache"):
        assert call(servers, "DELETE", path, rules=alone)[0] in (404, 503)
    assert servers.passed == ["one DELETE /v1/cache"]


def test_no_key_goes_to_a_server_but_its_own() -> None:
    """Neither a client's nor the proxy's, whether the path needs one or not."""
    two = replace(TWO, api_key="key-of-two")
    rules = replace(RULES, backends=(ONE, two))
    servers = Servers({"one": {}, "two": {}})
    for path in ("/dashboard/page.js", "/v1/cache/explain", "/v1/models"):
        for name in ("one", "two"):
            assert call(servers, "GET", f"/backends/{name}{path}", rules=rules) == (200, b"own")
    assert servers.keys == [None, None, None, b"Bearer key-of-two", None, b"Bearer key-of-two"]


def test_a_name_of_any_letters_is_looked_up() -> None:
    """Percent-encoded, as it came."""
    servers = Servers({"one": {"HEAD /v1/cache/explain/%C3%A9": plain({})}, "two": {}})
    assert call(servers, "GET", "/v1/cache/explain/é") == (200, b"own")
    assert servers.passed == ["one GET /v1/cache/explain/é"]


def test_the_newest_explanation_is_that_of_all_servers() -> None:
    """For whoever asks, holders too, by how long ago each server says that it was; one that has none of this key does
    not count. Where none has one its words are passed on, and where one gives no answer it may be there."""
    path = "GET /v1/cache/explain"
    old, new = ({"request_id": name, "ended_seconds_ago": ago} for name, ago in (("old", 7.5), ("new", 0.25)))
    servers = Servers({"one": {path: plain(old)}, "two": {path: plain(new)}})
    status, body = call(servers, "GET", "/v1/cache/explain")
    assert (status, json.loads(body)) == (200, {**new, "backend": "two"})
    servers.said["two"] = {path: plain({"request_id": "of a version that does not say when"})}
    assert json.loads(call(servers, "GET", "/v1/cache/explain")[1])["request_id"] == "old"
    none = plain({"error": {"message": "No request of this key is over yet."}}, 404)
    servers.said = {"one": {path: none}, "two": {path: plain(new)}}
    assert json.loads(call(servers, "GET", "/v1/cache/explain")[1])["backend"] == "two"
    servers.said = {"one": {path: none}, "two": {path: none}}
    status, body = call(servers, "GET", "/v1/cache/explain")
    assert status == 404 and b"No request of this key" in body
    del servers.said["two"]
    assert call(servers, "GET", "/v1/cache/explain")[0] == 503


def test_what_is_read_of_all_is_there_while_one_answers() -> None:
    """A report of one server, and that the other gave none."""
    servers = Servers({"two": {"GET /v1/cache": plain({"num_tokens": 7})}})
    status, body = call(servers, "GET", "/v1/cache")
    said = json.loads(body)["backends"]
    assert (status, said["two"]) == (200, {"num_tokens": 7}) and "error" in said["one"]
    assert call(Servers({}), "GET", "/v1/cache")[0] == 503


def test_agents_of_all_are_one_list() -> None:
    """A client sees them as of one server."""
    servers = Servers({name: {"GET /v1/agents": plain({"agents": [{"agent_id": name}]})} for name in ("one", "two")})
    assert json.loads(call(servers, "GET", "/v1/agents")[1]) == {"agents": [{"agent_id": "one"}, {"agent_id": "two"}]}
    del servers.said["one"]
    less = {"agents": [{"agent_id": "two"}], "missing_backends": ["one"]}
    assert json.loads(call(servers, "GET", "/v1/agents")[1]) == less


@pytest.mark.parametrize("holder", ["one", "two"])
def test_a_thing_is_found_where_it_is(holder: str) -> None:
    """Whoever keeps it is asked, and nobody else."""
    servers = Servers({"one": {}, "two": {}})
    servers.said[holder]["HEAD /v1/cache/explain/req1"] = plain({})
    assert call(servers, "GET", "/v1/cache/explain/req1") == (200, b"own")
    assert servers.passed == [f"{holder} GET /v1/cache/explain/req1"]


def test_what_may_be_on_a_server_that_is_silent_is_not_said_to_be_nowhere() -> None:
    """A 404 would have a client give it up."""
    status, body = call(Servers({"one": {}}), "GET", "/v1/cache/explain/req1")
    assert status == 503 and b"two gives no answer" in body
    assert call(Servers({"one": {}, "two": {}}), "GET", "/v1/cache/explain/req1")[0] == 200, "one of them says it"


@pytest.mark.parametrize(
    ("path", "body", "thing"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "/v1/responses/resp_1"),
        ("/v1/responses", {"previous_response_id": "../x"}, None),
        ("/v1/responses", {"previous_response_id": 5}, None),
        ("/v1/responses", {}, None),
        ("/v1/responses/resp_1/input_items", {}, "/v1/responses/resp_1"),
        ("/v1/agents/a-1/generate", {}, "/v1/agents/a-1"),
        ("/v1/agents/0123456789abcdef/a-1", {}, "/v1/agents/0123456789abcdef/a-1"),
        ("/v1/agents", {"agent_id": "a-1"}, "/v1/agents/a-1"),
        ("/v1/cache/explain/req1", {}, "/v1/cache/explain/req1"),
        ("/v1/chat/completions", {"previous_response_id": "resp_1"}, None),
    ],
)
def test_what_a_request_is_about(path: str, body: dict[str, Any], thing: str | None) -> None:
    """By its path, or by the name in its body; what is no name is the backend's to refuse."""
    assert named_thing(path, body) == thing


def test_one_server_is_asked_by_its_name() -> None:
    """What each has of its own is nowhere else; LiteLLM's paths and names that nobody has are refused."""
    servers = Servers({})
    assert call(servers, "GET", "/backends/two/dashboard/page.js") == (200, b"own")
    assert call(servers, "POST", "/backends/one/v1/drain")[0] == 200
    assert servers.passed == ["two GET /dashboard/page.js", "one POST /v1/drain"]
    for method, path in (
        ("GET", "/backends/three/health"),
        ("POST", "/backends/one/v1/chat/completions"),
        ("GET", "/backends/one"),
        ("GET", "/backends/one/backends/two/health"),
        ("GET", "/dashboard/events"),
    ):
        status, body = call(servers, method, path)
        assert status == 404, path
    assert b"/backends/NAME/dashboard/events" in body and len(servers.passed) == 2


def test_the_health_of_all_is_what_was_seen() -> None:
    """It asks nobody; without one that is ready it is a 503."""
    status, body = call(Servers({}), "GET", "/health")
    assert status == 503 and {each["state"] for each in json.loads(body)["backends"].values()} == {"starting"}


def test_the_page_of_all_links_to_each_and_escapes_what_they_say() -> None:
    """It has no script, and a server's words cannot become one."""
    page = page_of_all(fleet(one={**WELL, "model": "<script>", "ram_bytes": 2**30}))
    assert '<a href="/backends/one/dashboard">one</a>' in page and "1.00 GiB" in page
    assert "<script" not in page and "&lt;script&gt;" in page
