"""Several people with keys before two servers: all proxies have one file, and know its holders for the same ones."""

from collections.abc import Iterator

import pytest

from benchmarks.recordings import CHAT, MESSAGES, RESPONSES
from tests.e2e.cluster import FRONT_KEY, Cluster, ask, cluster
from tests.proxy.held import ANNA, ANNAS_SECOND, BOSS, OTTO, write_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WORDS = "The same words of all of them. " * 20


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    file = write_keys(folder / "keys.toml")
    with cluster(folder / "all", of_proxies={"API_KEYS_FILE": file}) as started:
        yield started


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_key_that_nobody_has_is_refused_at_both_doors(servers: Cluster, path: str) -> None:
    """So is that of a server, and a holder's at a server's own door."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 16}
    for proxy in servers.proxies:
        assert [ask(proxy.port, "POST", path, body, key=key).status for key in ("nobody's", "key-of-a")] == [401, 401]
        assert [ask(proxy.port, "GET", "/v1/models", key=key).status for key in (ANNA, OTTO, BOSS)] == [200] * 3
    assert [ask(port, "POST", path, body, key=ANNA).status for port in servers.ports.values()] == [401, 401]


def test_a_holder_is_one_principal_through_any_proxy(servers: Cluster) -> None:
    """What it made through the one is found through the other, with its second key too; another holder finds nothing of
    it, neither the response nor a token of its prompt."""
    one, other = (proxy.port for proxy in servers.proxies)
    asked = {"model": "m", "input": WORDS, "max_output_tokens": 16}
    made = ask(one, "POST", RESPONSES, asked, key=ANNA).json()
    assert made["usage"]["input_tokens_details"]["cached_tokens"] == 0
    going_on = {"model": "m", "input": "On.", "previous_response_id": made["id"], "max_output_tokens": 16}
    for key, status in ((ANNA, 200), (ANNAS_SECOND, 200), (OTTO, 404)):
        for port in (one, other):
            assert ask(port, "GET", f"/v1/responses/{made['id']}", key=key).status == status
            assert ask(port, "POST", RESPONSES, going_on, key=key).status == status
    again = [
        ask(other, "POST", RESPONSES, asked, key=key).json()["usage"]["input_tokens_details"]["cached_tokens"]
        for key in (OTTO, ANNAS_SECOND)
    ]
    assert again[0] == 0 and again[1] > len(WORDS.split())


def test_operators_alone_reach_what_is_everybodys(servers: Cluster) -> None:
    """Each server's own, and draining, is for operators."""
    for proxy in servers.proxies:
        for path in ("/metrics", "/backends/a/v1/cache"):
            statuses = [ask(proxy.port, "GET", path, key=key).status for key in (ANNA, BOSS, FRONT_KEY)]
            assert statuses == [403, 200, 200], path
        assert ask(proxy.port, "POST", "/backends/a/v1/drain", {}, key=ANNA).status == 403
