"""Agents after `kill -9`: from the files as they stand in the middle of a turn, and with a whole server process."""

import http.client
import json
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.agents_api.test_http import create, encode_request, get, told
from tests.e2e.servers import serving, wait_until
from tests.models import tiny_model
from tests.serving import AppUnderTest, eventually, serving_app

GREEDY = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 16}


def call(port: int, method: str, path: str, body: object = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status in (200, 201), answer
        return dict(answer)
    finally:
        connection.close()


def say(port: int, said: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": said}], **GREEDY, **fields}
    return call(port, "POST", "/v1/agents/durable/generate", body)


def copy_if_there(source: str, target: str) -> None:
    """A file that a living server renames or removes while its folder is copied is missing, as after a kill."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def is_written(app: AppUnderTest) -> bool:
    """Whether the disk has all that it took."""
    body: Any = app.get("/v1/cache").json
    return bool(body.get("disk_bytes")) and not body["disk"]["num_queued_bytes"]


def test_files_from_the_middle_of_a_turn_have_all_turns_before_it(tmp_path: Path) -> None:
    """What `kill -9` leaves is what the files hold just then: two turns, from which a server on a copy of them goes on,
    its KV from disk."""
    alive, killed = tmp_path / "alive", tmp_path / "killed"
    with serving_app(alive) as app, app.connect() as third:
        create(app, "durable", system_prompt="Be brief. " * 20)
        told(app, "durable", "First.")
        second = told(app, "durable", "Second.")
        before = get(app, "durable")
        assert eventually(lambda: is_written(app))
        body = {"messages": [{"role": "user", "content": "Third."}], **GREEDY, "max_tokens": 100_000, "stream": True}
        third.send(encode_request("POST", "/v1/agents/durable/generate", body))
        assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
        shutil.copytree(alive, killed, copy_function=copy_if_there)
    with serving_app(killed) as app:
        after = get(app, "durable")
        assert (after["messages"], after["num_turns"]) == (before["messages"], 2)
        assert after["status"] == "warm"
        body = told(app, "durable", "Third.")
        assert body["agent"]["num_turns"] == 3
        reused = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reused >= 0.9 * second["usage"]["prompt_tokens"], (body["usage"], second["usage"])
        assert get(app, "durable")["status"] == "hot"


@pytest.mark.slow
@pytest.mark.long
def test_a_history_is_whole_up_to_the_last_finished_turn(tmp_path: Path) -> None:
    """Killed in the middle of a third turn: two turns are there, the next one goes on from them, its KV from disk."""
    flags = (f"--model={tiny_model('qwen3')}", f"--disk-cache={tmp_path / 'kv'}")
    with serving(tmp_path, *flags, with_proxy=False) as server:
        server.wait_until_healthy()
        call(server.port, "POST", "/v1/agents", {"agent_id": "durable", "system_prompt": "Be brief. " * 40})
        say(server.port, "First.")
        second = say(server.port, "Second.")
        before = call(server.port, "GET", "/v1/agents/durable")
        wait_until(lambda: _is_on_disk(server.port), 60, lambda: "nothing came to the disk")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        third = {"messages": [{"role": "user", "content": "Third."}], **GREEDY, "max_tokens": 100_000, "stream": True}
        connection.request("POST", "/v1/agents/durable/generate", json.dumps(third))
        assert connection.getresponse().read(200)
        server.end(signal.SIGKILL)
        connection.close()
    with serving(tmp_path, *flags, with_proxy=False) as server:
        server.wait_until_healthy()
        after = call(server.port, "GET", "/v1/agents/durable")
        assert (after["messages"], after["num_turns"]) == (before["messages"], 2)
        assert after["status"] in ("warm", "hot"), "hot where the server has already read learned prefixes from disk"
        body = say(server.port, "Third.")
        assert body["agent"]["num_turns"] == 3
        reused = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reused >= 0.9 * second["usage"]["prompt_tokens"], (body["usage"], second["usage"])
        assert call(server.port, "GET", "/v1/agents/durable")["status"] == "hot"


def _is_on_disk(port: int) -> bool:
    """Whether the status of a server whose RAM forgot would be `warm`: the disk has written all that it took."""
    body = call(port, "GET", "/v1/cache")
    return bool(body.get("disk_bytes")) and not body["disk"]["num_queued_bytes"]
