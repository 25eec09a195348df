"""What of requests is on disk, who may ask for it, and how it is forgotten, on the whole server and a real model."""

from pathlib import Path
from typing import Any

import pytest

from kvserve.config import DiskMode
from kvserve.core import NOBODY
from kvserve.protocols.responses_store import StoredResponse
from kvserve.wiring import seeing_settings
from tests.serving import CHAT_PATH, COMPLETION_PATH, AppUnderTest, Response, eventually, serving_app, unstarted_app

RESPONSES, MESSAGES, AGENTS, EXPLAIN = "/v1/responses", "/v1/messages", "/v1/agents", "/v1/cache/explain"
WORD = "MARZIPAN"
"""In every prompt, and in nothing that the server says of itself."""

SAID = [{"role": "user", "content": f"{WORD} is what I like."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": SAID, "max_tokens": 2},
    COMPLETION_PATH: {"prompt": SAID[0]["content"], "max_tokens": 2},
    MESSAGES: {"messages": SAID, "max_tokens": 2},
    RESPONSES: {"input": SAID[0]["content"], "max_output_tokens": 2},
    f"{AGENTS}/confectioner/generate": {"messages": SAID, "max_tokens": 2},
}


def ask_everywhere(app: AppUnderTest, **fields: Any) -> dict[str, Response]:
    """The answer of every endpoint that takes prompts; each line of theirs is on the screen."""
    assert app.post(AGENTS, {"agent_id": "confectioner"}).status == 201
    answers = {path: app.post(path, {**body, **fields}) for path, body in BODIES.items()}
    assert {answer.status for answer in answers.values()} == {200}, answers
    assert eventually(
        lambda: all(app.get(f"{EXPLAIN}/{answer.json['id']}").status == 200 for answer in answers.values())
    )
    assert app.served.conversations.flush()
    return answers


def files_with_the_word(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and WORD.encode() in path.read_bytes()]


def kv_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


# --- nothing on disk -------------------------------------------------------------------------------------------------


def test_a_request_with_ttl_0_leaves_no_word_on_disk(tmp_path: Path) -> None:
    """In no file of any kind, whatever the endpoint; a response says that it is not stored, an agent's turn too."""
    with serving_app(tmp_path) as app:
        answers = ask_everywhere(app, ttl=0)
        assert files_with_the_word(tmp_path) == [] and kv_files(tmp_path / "kv") == []
        response = answers[RESPONSES].json
        assert response["store"] is False and app.get(f"{RESPONSES}/{response['id']}").status == 404
        going_on = {"input": "And?", "previous_response_id": response["id"]}
        assert app.post(RESPONSES, going_on).status == 404
        assert answers[f"{AGENTS}/confectioner/generate"].json["agent"]["stored"] is False
        assert app.get(f"{AGENTS}/confectioner").json["num_turns"] == 0
    assert files_with_the_word(tmp_path) == [] and kv_files(tmp_path / "kv") == []


def test_without_a_disk_cache_no_word_reaches_the_disk(tmp_path: Path) -> None:
    """`--no-disk-cache`: responses and agents are in memory only, and say so; there is no trace."""
    with serving_app(tmp_path, disk_cache="off") as app:
        answers = ask_everywhere(app)
        assert files_with_the_word(tmp_path) == []
        going_on = {"input": "And?", "previous_response_id": answers[RESPONSES].json["id"], "max_output_tokens": 2}
        assert app.post(RESPONSES, going_on).status == 200
        agent = app.get(f"{AGENTS}/confectioner").json
        assert (agent["persist"], agent["num_turns"]) == (False, 1)
    assert files_with_the_word(tmp_path) == []


@pytest.mark.parametrize(("disk_cache", "is_written"), [("on", True), ("off", False), ("ephemeral", False)])
def test_where_responses_agents_and_traces_go(tmp_path: Path, disk_cache: DiskMode, is_written: bool) -> None:
    """Each in its file, or all in memory."""
    with unstarted_app(tmp_path, disk_cache=disk_cache) as under_test:
        app = under_test.app
        app.responses.put(StoredResponse({"id": "resp_a", "output": []}, ({"content": WORD},), None))
        assert app.responses.of(NOBODY).get("resp_a").items[0]["content"] == WORD
        names = {path.name.partition("-")[0] for path in files_with_the_word(tmp_path)}
        assert bool(names) == (tmp_path / "state" / "responses.sqlite3").exists() == is_written
        assert seeing_settings(app._settings, disk_cache).writes_traces == is_written
