"""Prefixes that are computed before anybody asks: over HTTP because a client says so, and at a start because they were
used most."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.app.wiring import engine_settings
from kvserve.config import Settings
from kvserve.engine.prefill import Prefill
from kvserve.engine.warming import WarmSettings
from kvserve.warming.prewarming import warm_learned
from tests.engine.visions import QUICK, data_url, picture
from tests.laws import THREE_KINDS, TWO_KINDS, sampled, sampled_cells
from tests.serving import AppUnderTest, chat_body, eventually, serving_app
from tests.web.fakes import encode_request

WORDS = "You read files, list them and say what is in them, in short and friendly words. "
SYSTEM = WORDS * 8
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS = [{"name": "read", "description": "Reads.", "input_schema": PARAMETERS}]
PATH = "/v1/cache/prewarm"


@pytest.fixture(scope="module")
def started_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("app"), max_kv_size=1024) as app:
        yield app


@pytest.fixture
def app(started_app: AppUnderTest) -> AppUnderTest:
    """A server that knows nothing, with a context of 1,024 tokens."""
    started_app.clear_cache()
    return started_app


def system_message(text: str = SYSTEM) -> dict[str, str]:
    return {"role": "system", "content": text}


def ask(app: AppUnderTest, said: str, system: str = SYSTEM, **fields: Any) -> Any:
    messages = [system_message(system), {"role": "user", "content": said}]
    return app.chat(messages, **({"max_tokens": 4} | fields))


def warming(app: AppUnderTest) -> dict[str, Any]:
    return dict(app.get("/v1/cache").json["warming"])


@sampled_cells(lambda family, **_: family == "qwen3_5")
@pytest.mark.parametrize("family", sampled(THREE_KINDS, TWO_KINDS))
def test_the_request_after_it_computes_its_user_turn_only(tmp_path: Path, family: str) -> None:
    """System and tools are there; the text is that of a server that knows nothing."""
    tools = {} if family == "gemma3" else {"tools": TOOLS}
    with serving_app(tmp_path, family) as app:
        expected = ask(app, "List the files.", **tools)
        app.clear_cache()
        answer = app.post(PATH, {"messages": [system_message()], **tools}).json
        assert (answer["state"], answer["reason"], answer["cached"]) == ("done", None, 0)
        assert answer["tokens"] == answer["computed"] > len(SYSTEM.split()) and answer["seconds"] > 0
        chat = ask(app, "List the files.", **tools)
        assert chat == expected
        assert chat.num_cached_tokens == answer["tokens"], "it starts where the user's words begin"
        told = app.get("/v1/cache/explain?last").json
        assert (told["tier"], told["source"]) == ("warmed", "what was computed ahead"), told
        after = warming(app)
        assert (after["num_used_tokens"], after["num_unused_tokens"]) == (answer["tokens"], 0)
        again = app.post(PATH, {"messages": [system_message()], **tools}).json
        assert (again["cached"], again["computed"]) == (answer["tokens"], 0)


@pytest.mark.long
def test_anthropics_form_is_the_same_prefix(app: AppUnderTest) -> None:
    """System beside the messages, tools with their own field names: what one form warmed serves the other."""
    warmed = app.post(PATH, {"system": SYSTEM, "tools": ANTHROPIC_TOOLS}).json
    assert warmed["state"] == "done" and warmed["computed"] > 0
    same = app.post(PATH, {"messages": [system_message()], "tools": TOOLS}).json
    assert (same["tokens"], same["computed"]) == (warmed["tokens"], 0)
    body = {
        "max_tokens": 4,
        "system": SYSTEM,
        "tools": ANTHROPIC_TOOLS,
        "messages": [{"role": "user", "content": "List the files."}],
    }
    usage = app.post("/v1/messages", body).json["usage"]
    assert usage["cache_read_input_tokens"] == warmed["tokens"]


def test_messages_up_to_a_users_are_warmed_to_their_end(tmp_path: Path) -> None:
    """Behind a user's words only the generation tail is left, and the last token."""
    with serving_app(tmp_path, "qwen3_5") as app:
        messages = [system_message(), {"role": "user", "content": "List the files." + WORDS}]
        warmed = app.post(PATH, {"messages": messages}).json
        response = app.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0})
        usage = response.json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
        assert usage["prompt_tokens"] - warmed["tokens"] < 16


@pytest.mark.parametrize("comes_last", sampled(["user", "assistant"], ("assistant",)))
def test_pictures_are_looked_at_once(tmp_path: Path, comes_last: str) -> None:
    """A prefix with a picture in it: the request after it finds it, and its vision tower has nothing to do."""
    with serving_app(tmp_path, QUICK[0]) as app:
        shows = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?" + WORDS}, shows]}]
        if comes_last == "assistant":
            messages.append({"role": "assistant", "content": "A hill with a tree, in the evening. " * 4})
        warmed = app.post(PATH, {"messages": messages, "enable_thinking": False}).json
        num_calls = app.get("/v1/cache").json["num_tower_calls"]
        assert (warmed["state"], num_calls) == ("done", 1)
        if comes_last == "assistant":
            messages.append({"role": "user", "content": "And behind it?"})
        chat = app.chat(messages, max_tokens=2, enable_thinking=False)
        assert chat.num_cached_tokens is not None and chat.num_cached_tokens >= warmed["tokens"] - 8
        assert app.get("/v1/cache").json["num_tower_calls"] == num_calls


def test_tools_alone_are_a_prefix(app: AppUnderTest) -> None:
    """A client without a system prompt."""
    warmed = app.post(PATH, {"tools": TOOLS}).json
    chat = app.chat("List the files.", tools=TOOLS, max_tokens=2, cache_mode="prefix")
    assert chat.num_cached_tokens == warmed["tokens"] > 0


@pytest.mark.parametrize(
    ("body", "is_anthropic", "status"),
    [
        ({}, False, 400),
        ({"messages": "hello"}, False, 400),
        ({"system": 3, "messages": []}, True, 400),
        ({"system": WORDS * 400}, True, 400),
        ({"messages": [{"role": "system", "content": WORDS * 400}]}, False, 400),
    ],
    ids=["nothing", "no messages", "anthropic: no system", "anthropic: too long", "too long"],
)
def test_errors_have_the_form_of_their_protocol(
    app: AppUnderTest, body: dict[str, Any], is_anthropic: bool, status: int
) -> None:
    """Each API's clients read their own."""
    response = app.post(PATH, body)
    assert response.status == status
    assert (response.json.get("type") == "error") is is_anthropic
    assert response.json["error"]["message"]


def test_a_prefix_that_fails_is_told_once_and_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 to whoever wanted it, one attempt, and the next request is answered."""
    attempts: list[int] = []
    real = Prefill.step

    def broken(self: Prefill, *arguments: Any) -> int:
        if self.row.request.request_id.startswith("warming"):
            attempts.append(1)
            raise MemoryError("no room")
        return real(self, *arguments)

    with serving_app(tmp_path) as app:
        monkeypatch.setattr(Prefill, "step", broken)
        response = app.post(PATH, {"messages": [system_message()]})
        assert (response.status, "no room" in response.json["error"]["message"]) == (500, True)
        assert ask(app, "List the files.").num_completion_tokens == 4
        assert (attempts, warming(app)["num_jobs_failed"], warming(app)["num_jobs_waiting"]) == ([1], 1, 0)


def test_it_is_counted_for_prometheus(tmp_path: Path) -> None:
    """Warmed, used and wasted tokens stand in /metrics."""
    with serving_app(tmp_path) as app:
        warmed = app.post(PATH, {"messages": [system_message()]}).json["tokens"]
        ask(app, "List the files.")
        text = app.get("/metrics").body.decode()
        assert f"kvserve_warmed_tokens_total {float(warmed)}" in text
        assert f"kvserve_warmed_used_tokens_total {float(warmed)}" in text
        assert "kvserve_warmed_wasted_tokens_total 0.0" in text
        assert app.get("/v1/cache").json["num_warmed_tokens"] == warmed


def is_cancelled(app: AppUnderTest) -> bool:
    """Whether nobody wants the one job that waits any more."""
    [task] = app.served.engine._ask(lambda scheduler: scheduler.warmer._waiting)
    return bool(task.warming.is_cancelled)


def test_a_client_that_leaves_wants_nothing_any_more(tmp_path: Path) -> None:
    """It leaves while others compute: nothing is computed for it, and they lose nothing."""
    with serving_app(tmp_path) as app, app.connect() as busy:
        long = chat_body("Tell me more.", max_tokens=60_000, stream=True)
        busy.send(encode_request("POST", "/v1/chat/completions", long))
        assert eventually(lambda: app.health()["num_decoding"] == 1)
        with app.connect() as client:
            client.send(encode_request("POST", PATH, {"messages": [system_message()]}))
            assert eventually(lambda: warming(app)["num_jobs_waiting"] == 1)
        assert eventually(lambda: is_cancelled(app)), "its leave was noticed"
        busy.close()
        assert eventually(lambda: warming(app)["num_jobs_dropped"] == 1)
        assert (warming(app)["num_warmed_tokens"], warming(app)["num_jobs_waiting"]) == (0, 0)


def test_the_settings_reach_the_engine() -> None:
    """What an operator allows is what binds it."""
    settings = Settings(_env_file=None, warm_max_tokens=77, warm_max_time_share=0.125)  # type: ignore[call-arg]
    assert engine_settings(settings).warming == WarmSettings(max_tokens=77, time_share=0.125)


# --- learned ----------------------------------------------------------------------------------------------------------


@sampled_cells(lambda family, **_: family == "qwen3_5")
@pytest.mark.parametrize(
    ("family", "has_lost_its_kv"),
    [
        ("qwen3", False),
        ("qwen3_5", True),
        pytest.param("qwen3", True, marks=pytest.mark.long),
        pytest.param("qwen3_5", False, marks=pytest.mark.long),
    ],
)
def test_after_a_restart_the_most_used_prefix_is_warm_before_anybody_asks(
    tmp_path: Path, family: str, has_lost_its_kv: bool
) -> None:
    """Read from the disk or, where that has lost it, computed; a prefix that was used once is not."""
    with serving_app(tmp_path, family) as app:
        for said in ("List the files.", "Count them."):
            ask(app, said)
        ask(app, "And these?", system="Another one. " * 30)
        expected = ask(app, "What is new?")
    if has_lost_its_kv:
        for blob in (tmp_path / "kv").rglob("*.safetensors"):
            blob.unlink()
        for index in (tmp_path / "kv").rglob("index*"):
            index.unlink()
    with serving_app(tmp_path, family, prewarm_prefixes=4) as app:
        assert eventually(lambda: warming(app)["num_jobs_done"] == 1)
        report = app.get("/v1/cache").json
        assert report["ram_bytes"] > 0 and report["num_prompt_tokens"] == 0
        assert (report["num_warmed_tokens"] > 0) is has_lost_its_kv
        num_hits = report["disk"]["num_hits"]
        chat = ask(app, "What is new?", session_id="another")
        assert chat == expected
        assert chat.num_cached_tokens is not None and chat.num_cached_tokens > len(SYSTEM.split())
        after = app.get("/v1/cache").json
        assert not has_lost_its_kv or after["disk"]["num_hits"] == num_hits == 0
        assert after["warming"]["num_jobs_failed"] == 0


def test_another_model_never_gets_them(tmp_path: Path) -> None:
    """They are kept with the records of one model, its tokenizer and its template."""
    with serving_app(tmp_path) as app:
        for said in ("List the files.", "Count them."):
            ask(app, said)
        assert len(app.served.conversations.most_used_prefixes(9)) == 1
    with serving_app(tmp_path, "llama", prewarm_prefixes=4) as app:
        assert app.served.conversations.most_used_prefixes(9) == ()
    with serving_app(tmp_path, prewarm_prefixes=0) as app:
        assert len(app.served.conversations.most_used_prefixes(9)) == 1
        assert warming(app)["num_jobs_done"] + warming(app)["num_jobs_waiting"] == 0


def test_what_is_not_to_last_is_not_learned(tmp_path: Path) -> None:
    """A request that wants nothing kept, and everything once it is cleared."""
    with serving_app(tmp_path) as app:
        for said in ("List the files.", "Count them."):
            ask(app, said, ttl=0)
        assert app.served.conversations.most_used_prefixes(9) == ()
        for said in ("List the files.", "Count them."):
            ask(app, said)
        assert len(app.served.conversations.most_used_prefixes(9)) == 1
        app.clear_cache()
        assert app.served.conversations.most_used_prefixes(9) == ()


def test_a_beginning_with_a_token_that_the_model_has_no_row_for_is_not_computed(app: AppUnderTest) -> None:
    """Records of before such prompts were refused may hold one; a beginning of tokens with rows is computed."""
    for said in ("List the files.", "Count them."):
        ask(app, said)
    [beginning] = app.served.conversations.most_used_prefixes(9)
    for num_rows, state in ((max(beginning.ids), "dropped"), (max(beginning.ids) + 1, "done")):
        [warmed] = warm_learned(replace(app.served, vocab_size=num_rows), 4)
        result = warmed.wait(60)
        assert result is not None and result.state == state, num_rows


def test_a_model_that_is_not_ready_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing raises where nothing computes any more."""
    with serving_app(tmp_path) as app:
        for said in ("List the files.", "Count them."):
            ask(app, said)
        served = app.served
    [late] = warm_learned(served, 4)
    assert late.result is not None and late.result.state == "dropped"
    shutil.rmtree(tmp_path / "kv")
