"""Two servers behind two proxies, all of them processes: sessions stay, move where a server is killed, and come back;
an upgrade without an error; who may speak and what a wrong secret means."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, shared_folder
from tests.e2e.cluster import FRONT_KEY, Cluster, Reply, ask, cluster
from tests.e2e.other_version import other_version
from tests.e2e.servers import ROOT, ServerProcess, environment
from tests.e2e.session_loops import Ask, Loop, play, recorded_loops, reuse

NUM_SESSIONS = 40

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shared_folder() is None, reason="needs the recordings in shared/ in or beside the repository"),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def through(port: int, key: str = FRONT_KEY) -> Ask:
    def door(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        return ask(port, "POST", path, body, headers, key)

    return door


def doors(servers: Cluster) -> list[Ask]:
    return [through(proxy.port) for proxy in servers.proxies]


def homes(loops: list[Loop]) -> list[str | None]:
    """Where each session was answered last."""
    return [loop.turns[-1].backend for loop in loops]


def test_sessions_stay_where_their_kv_is_and_reuse_is_that_of_one_server(servers: Cluster) -> None:
    """Every turn through the other proxy, on one server for the whole session."""
    loops, alone = recorded_loops(NUM_SESSIONS, "beside"), recorded_loops(NUM_SESSIONS, "alone")
    began = time.monotonic()
    play(loops, doors(servers), 4)
    seconds = time.monotonic() - began
    play(alone, [through(servers.ports["a"], "key-of-a")], 4)
    moved = [loop.turns for loop in loops if len({turn.backend for turn in loop.turns}) > 1]
    assert moved == []
    counts = {name: homes(loops).count(name) for name in "ab"}
    print(f"{len(loops)} sessions, {counts}, reuse {reuse(loops):.4f}, one server {reuse(alone):.4f}, {seconds:.0f} s")
    assert min(counts.values()) > NUM_SESSIONS // 5
    assert reuse(loops) >= reuse(alone) - 0.01 and reuse(alone) > 0.8


def killed_while_played(servers: Cluster, loops: list[Loop], num_turns: int) -> list[str | None]:
    """SIGKILL for one server in the first of so many turns of all sessions. Returns where each was at home before."""
    before = homes(loops)
    assert {"a", "b"} <= set(before)
    killing = threading.Timer(0.5, partial(servers.servers["b"].end, signal.SIGKILL))
    killing.start()
    play(loops, doors(servers), num_turns)
    killing.join()
    return before


def test_a_killed_server_costs_its_sessions_one_cold_turn(servers: Cluster) -> None:
    """In the middle of their turns; they come back once it runs again."""
    loops = recorded_loops(NUM_SESSIONS, "killed")
    play(loops, doors(servers), 2)
    before = killed_while_played(servers, loops, 3)
    play(loops, doors(servers), 1)
    assert set(homes(loops)) == {"a"}
    for home, loop in zip(before, loops, strict=True):
        cold = [turn for turn in loop.turns[1:] if turn.reuse < 0.3]
        assert len(cold) == (1 if home == "b" else 0), [(turn.backend, turn.reuse) for turn in loop.turns]
        assert all(turn.reuse > 0.7 for turn in loop.turns[1:] if turn not in cold)
    num_moved, num_again = before.count("b"), sum(loop.num_sent_again for loop in loops)
    print(f"{num_moved} of {len(loops)} sessions moved, {num_again} answers broke off and were sent again")
    servers.start_server("b").wait_until_healthy()
    servers.wait_until_seen(b="ready")
    play(loops, doors(servers), 1)
    assert homes(loops) == before


@contextlib.contextmanager
def going_on(loops: list[Loop], servers: Cluster) -> Iterator[None]:
    """Sessions go on within the block, round after round, one at least. Raises what any of their turns raised."""
    is_enough = threading.Event()

    def go_on() -> None:
        play(loops, doors(servers), 1)
        while not is_enough.is_set():
            play(loops, doors(servers), 1)

    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(go_on)
        try:
            yield
        finally:
            is_enough.set()
        playing.result()


def drained(server: ServerProcess, key: str, folder: Path) -> None:
    """As an operator does it: `kvserve drain` waits until it is idle."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "kvserve.cli", "drain", "--json", "--server-url", url]
    own = {**environment(folder, {}), "PYTHONPATH": str(ROOT), "KVSERVE_API_KEY": key}
    done = subprocess.run(command, env=own, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == {"draining": True, "num_running": 0, "num_waiting": 0}


def upgrade(servers: Cluster, name: str, script: Path, folder: Path, loops: list[Loop]) -> list[int]:
    """Drain it, end it, start the other version in its place, and wait until the proxies send it requests. Returns how
    many turns each session had when the one version was gone and the other not there."""
    drained(servers.servers[name], f"key-of-{name}", folder)
    servers.wait_until_seen(**{name: "draining"})
    servers.servers[name].end(signal.SIGTERM)
    num_turns = [len(loop.turns) for loop in loops]
    servers.start_server(name, script).wait_until_healthy()
    servers.wait_until_seen(**{name: "ready"})
    return num_turns


def test_an_upgrade_to_another_version_is_seen_by_nobody(servers: Cluster, tmp_path: Path) -> None:
    """One server after the other while sessions go on: no error, and no answer breaks off. What the new version can
    read is warm when its sessions come back; one that keeps KV in another form has each of them cold once."""
    loops = recorded_loops(9, "upgraded")
    play(loops, doors(servers), 2)
    before, versions = homes(loops), {"a": "0.2.0", "b": "0.3.0"}
    assert {"a", "b"} <= set(before)
    scripts = {
        "a": other_version(tmp_path / "a-next", versions["a"]),
        "b": other_version(tmp_path / "b-next", versions["b"], blob_format="kvserve blob of another version"),
    }
    for name, script in scripts.items():
        with going_on(loops, servers):
            num_turns = upgrade(servers, name, script, tmp_path, loops)
        play(loops, doors(servers), 2)
        assert homes(loops) == before and not any(loop.num_sent_again for loop in loops)
        own = [(loop, count) for loop, home, count in zip(loops, before, num_turns, strict=True) if home == name]
        back = [(_first_back(loop, name, count), loop.turns[-1].reuse) for loop, count in own]
        print(f"{name}: {sum(num_turns)} turns before; first turns back {back}")
        # of what is cold, instructions that another session sent a moment before may be there again
        assert all((first < 0.5) == (name == "b") and later > 0.7 for first, later in back), back
    for proxy in servers.proxies:
        assert proxy.seen("version") == versions


def _first_back(loop: Loop, name: str, num_turns: int) -> float:
    """How much the first turn reused that the new version answered. The session may have gone elsewhere once more, as
    one proxy sees it before the other."""
    return next(turn.reuse for turn in loop.turns[num_turns:] if turn.backend == name)


def test_all_are_seen_through_any_proxy(servers: Cluster) -> None:
    """Metrics, health and the page of both; each server's own below its name; the model once."""
    for proxy in servers.proxies:
        metrics = ask(proxy.port, "GET", "/metrics").raw.decode()
        assert all(f'kvserve_up{{backend="{name}"}} 1.0' in metrics for name in servers.ports)
        page = ask(proxy.port, "GET", "/dashboard").raw.decode()
        assert all(f'href="/backends/{name}/dashboard"' in page for name in servers.ports)
        assert ask(proxy.port, "GET", "/backends/b/dashboard/page.js").status == 200
        assert [each["id"] for each in ask(proxy.port, "GET", "/v1/models").json()["data"]] == [
            "openai/kvserve-demo-qwen3"
        ]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_wrong_key_is_refused_at_both_doors(servers: Cluster, path: str) -> None:
    """The key of a server is none of the proxies', and the other way round."""
    for proxy in servers.proxies:
        assert ask(proxy.port, "POST", path, {"model": "m"}, key="key-of-a").status == 401
    assert ask(servers.ports["a"], "POST", path, {"model": "m"}).status == 401


def test_tenants_are_apart_and_find_their_own_through_any_proxy(servers: Cluster) -> None:
    """A response is its user's alone, whichever proxy asks for it; the same prompt of another user is cold."""
    one, other = (proxy.port for proxy in servers.proxies)
    words = "The same words of both users. " * 20
    for user in ("anna", "bert"):
        made = ask(one, "POST", RESPONSES, {"model": "m", "input": words, "max_output_tokens": 16, "user": user})
        assert made.json()["usage"]["input_tokens_details"]["cached_tokens"] == 0
        on = {"model": "m", "input": "On.", "previous_response_id": made.json()["id"], "max_output_tokens": 16}
        gone_on = ask(other, "POST", RESPONSES, {**on, "user": user})
        assert (gone_on.status, gone_on.backend) == (200, made.backend)
        assert ask(other, "POST", RESPONSES, {**on, "user": "carl"}).status == 404
