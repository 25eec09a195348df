"""Models by name and agents, on both ports of a whole server, with the openai SDK where it knows the endpoint."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, NotFoundError, OpenAI

from kvserve.core import KEY_HEADER, Principal, key_digest
from tests.e2e.servers import ServerProcess, serving
from tests.models import tiny_model

pytestmark = pytest.mark.e2e

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models-and-agents")
    models = folder / "models"
    models.mkdir()
    (models / "small").symlink_to(tiny_model("qwen3"))
    (models / "other").symlink_to(tiny_model("gemma3"))
    settings = {"MODEL_FOLDERS": str(models), "MODEL_ALIASES": "quick=other"}
    with serving(folder, f"--model={models / 'small'}", f"--disk-cache={folder / 'kv'}", **settings) as server:
        yield server.wait_until_proxy_ready()


@pytest.mark.parametrize("front", ["kvserve", "litellm"])
def test_the_name_decides_which_model_answers(server: ServerProcess, front: str) -> None:
    """Through both ports: its own name, an alias, Claude's names for the default model, and errors as exceptions."""
    with OpenAI(base_url=f"http://127.0.0.1:{server.port_of(front)}/v1", api_key="none", max_retries=0) as client:

        def answered_by(model: str) -> str:
            with client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], stream=True, **GREEDY
            ) as stream:
                assert any([chunk.choices and chunk.choices[0].finish_reason for chunk in stream])
            health = server.health()
            assert health is not None
            return str(health[1]["model"])

        for model, name in (("claude-opus-4-5", "small"), ("other", "other"), ("gpt-5", "small"), ("quick", "other")):
            assert Path(answered_by(model)).name == name
        with pytest.raises((NotFoundError, InternalServerError), match="hf download mlx-community/gemma-3-12b-it-4bit"):
            answered_by("gemma-3")


@pytest.mark.parametrize("front", ["kvserve", "litellm"])
def test_a_request_is_its_keys_on_either_port(server: ServerProcess, front: str) -> None:
    """The proxy's word is believed: the explanation is there for the client's own key. A client's word is not."""

    def status(key: str, **headers: str) -> int:
        url = f"http://127.0.0.1:{server.port}/v1/cache/explain/{asked.id}"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.loads(response.read())["principal"] == name
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    key = f"the-key-of-{front}"
    digest = key_digest({"x-api-key": key})
    name = str(Principal(digest))
    with OpenAI(base_url=f"http://127.0.0.1:{server.port_of(front)}/v1", api_key=key, max_retries=0) as client:
        asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}], **GREEDY)
    assert status(key) == 200
    assert status("another") == status("another", **{KEY_HEADER: digest}) == 404


@pytest.mark.parametrize("front", ["kvserve", "litellm"])
def test_an_agent_keeps_its_history(server: ServerProcess, front: str) -> None:
    """Created, asked twice (streamed the second time), listed and deleted on either port."""
    base = f"http://127.0.0.1:{server.port_of(front)}/v1/agents"

    def call(method: str, path: str = "", body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    call("POST", "", {"agent_id": front, "system_prompt": "Be brief."})
    first = json.loads(
        call("POST", f"/{front}/generate", {"messages": [{"role": "user", "content": "First."}], **GREEDY})
    )
    assert first["agent"]["num_turns"] == 1
    again = {"messages": [{"role": "user", "content": "Second."}], **GREEDY, "stream": True}
    events = call("POST", f"/{front}/generate", again)
    assert events.endswith("data: [DONE]\n\n") and '"num_turns":2' in events
    assert [message["role"] for message in json.loads(call("GET", f"/{front}"))["messages"]] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    listed = [agent for agent in json.loads(call("GET"))["agents"] if agent["agent_id"] == front]
    assert len(listed) == 1 and listed[0]["status"] in ("hot", "warm")
    assert json.loads(call("DELETE", f"/{front}"))["deleted"] is True
