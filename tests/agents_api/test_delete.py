"""What a deleted agent leaves of its KV, in RAM and on disk: nothing but what others use too."""

from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.model_files import MEMORY_FILE
from tests.agents_api.test_http import GREEDY, create, delete, get, told
from tests.engine.visions import data_url, picture
from tests.laws import TWO_KINDS, sampled
from tests.serving import CHAT_PATH, AppUnderTest, eventually, serving_app
from tests.weights import digest_held_back

SYSTEM = "You look at places and say what is there, one thing after the other. " * 6
ALONE: dict[str, Any] = {"max_kv_size": 4096, "warm_next_turn": False, "prewarm_prefixes": 0}
"""Nothing is computed ahead, which could come after the deletion."""
STORY = "{name}: the quick brown fox jumps over the lazy dog and reads the file again. "


def talk(app: AppUnderTest, name: str) -> list[dict[str, Any]]:
    """Two turns of an agent; its history, as a chat would send it."""
    create(app, name, system_prompt=SYSTEM)
    for number in range(2):
        told(app, name, STORY.format(name=name) * 6 + str(number))
    return [dict(message) for message in get(app, name)["messages"]]


def num_cached(app: AppUnderTest, name: str, history: list[dict[str, Any]]) -> tuple[int, int]:
    """How many tokens are known of an agent's conversation that goes on, and of how many; asking keeps none. Whoever
    asks is not the agent: its answers are known up to the first that the model wrote in other tokens than its text's.
    """
    messages = [*history, {"role": "user", "content": "?"}]
    body = {"messages": messages, **GREEDY, "max_tokens": 1, "ttl": 0, "session_id": f"agent:{name}"}
    usage: Any = app.post(CHAT_PATH, body).json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"]), int(usage["prompt_tokens"])


def stored(app: AppUnderTest) -> tuple[int, int]:
    """Bytes in RAM and on disk, once all is written."""
    report: Any = {}

    def is_settled() -> bool:
        report.update(app.get("/v1/cache").json)
        return not report["disk"]["num_queued_bytes"]

    assert eventually(is_settled)
    return int(report["ram_bytes"]), int(report["disk_bytes"])


@pytest.mark.long
@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_the_kv_of_a_deleted_agent_leaves_at_once(family: str, tmp_path: Path) -> None:
    """Its own part only: the system prompt that both agents have stays, and so does all of the other one."""
    with serving_app(tmp_path, family, **ALONE) as app:
        other, one = talk(app, "other"), talk(app, "one")
        known = num_cached(app, "other", other)
        before, begun = num_cached(app, "one", one), stored(app)
        assert before[0] > 0.5 * before[1] and known[0] > 0.5 * known[1]
        assert delete(app, "one").status == 200
        assert eventually(lambda: stored(app)[0] < 0.8 * begun[0] and stored(app)[1] < 0.8 * begun[1]), stored(app)
        system, _ = num_cached(app, "one", one[:1])
        assert num_cached(app, "one", one)[0] <= system + 32 < 0.5 * before[0]
        assert system > 100 and num_cached(app, "other", other) == known
    with serving_app(tmp_path, family, **ALONE) as app:
        assert num_cached(app, "one", one)[0] <= system + 32, "the disk has it no more"
        assert num_cached(app, "other", other)[0] >= known[0] - 32, "and all of the other one"


def test_without_a_disk_the_order_does_not_matter(tmp_path: Path) -> None:
    """A file of KV may begin with what others use and stay for that; RAM is cut where they part."""
    with serving_app(tmp_path, disk_cache="off", **ALONE) as app:
        one, other = talk(app, "one"), talk(app, "other")
        known = num_cached(app, "other", other)
        assert delete(app, "one").status == 200
        system, _ = num_cached(app, "one", one[:1])
        assert 100 < num_cached(app, "one", one)[0] <= system + 32
        assert num_cached(app, "other", other) == known


@pytest.mark.long
def test_without_deletion_a_restart_finds_it(tmp_path: Path) -> None:
    """The control: the disk would have had it."""
    with serving_app(tmp_path, **ALONE) as app:
        one = talk(app, "one")
        known = num_cached(app, "one", one)
    with serving_app(tmp_path, **ALONE) as app:
        assert num_cached(app, "one", one)[0] >= known[0] - 32


def test_after_a_restart_only_the_disk_has_it(tmp_path: Path) -> None:
    """Deleted by a server that never computed it, it is gone for the next one."""
    with serving_app(tmp_path, **ALONE) as app:
        one = talk(app, "one")
    with serving_app(tmp_path, **ALONE) as app:
        assert delete(app, "one").status == 200
    with serving_app(tmp_path, **ALONE) as app:
        cached, num_tokens = num_cached(app, "one", one)
        assert cached < 0.5 * num_tokens


def test_what_is_deleted_before_the_model_is_known_by_name_leaves_the_disk_too(tmp_path: Path) -> None:
    """Until all files of the model are read no prefix can be found on disk, but its owner's files can."""
    with serving_app(tmp_path, **ALONE) as app:
        one = talk(app, "one")
    (tmp_path / "kv" / MEMORY_FILE).unlink()  # which model it was must be found out again
    with digest_held_back(), serving_app(tmp_path, **ALONE) as app:
        assert app.health()["weights"]["state"] == "reading"
        assert delete(app, "one").status == 200
    with serving_app(tmp_path, **ALONE) as app:
        assert eventually(lambda: app.health()["weights"]["state"] == "known")
        cached, num_tokens = num_cached(app, "one", one)
        assert cached < 0.5 * num_tokens


def looks(app: AppUnderTest, name: str) -> list[dict[str, Any]]:
    """The same of an agent that was shown a picture."""
    create(app, name, system_prompt=SYSTEM)
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(1, 160, 160))}}
    told(app, name, [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]}])
    told(app, name, STORY.format(name=name))
    return [dict(message) for message in get(app, name)["messages"]]


def test_a_picture_that_only_the_disk_has_leaves_with_its_agent(tmp_path: Path) -> None:
    """Its KV is in RAM: hot; after a restart on disk: warm. An image's tokens are told by what it shows. Deleted by a
    server that never computed it, the picture's KV is gone for the next one."""
    with serving_app(tmp_path, "qwen3_vl", **ALONE) as app:
        one = looks(app, "one")
        assert eventually(lambda: get(app, "one")["status"] == "hot")
        known = num_cached(app, "one", one)
        assert known[0] > 0.5 * known[1]
    with serving_app(tmp_path, "qwen3_vl", **ALONE) as app:
        assert get(app, "one")["status"] == "warm"
        before = stored(app)[1]
        assert delete(app, "one").status == 200
        assert eventually(lambda: stored(app)[1] < 0.6 * before), (before, stored(app))
    with serving_app(tmp_path, "qwen3_vl", **ALONE) as app:
        cached, num_tokens = num_cached(app, "one", one)
        assert cached < 0.5 * num_tokens
