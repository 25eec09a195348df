"""Several models behind one server, over HTTP: swaps, waiting, grouping, failing loads, memory."""

import gc
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvserve.app.model_swap
import kvserve.engine.engine_start
from tests.engine.engines import held
from tests.laws import sampled_cells
from tests.models import tiny_model
from tests.serving import (
    CHAT_PATH,
    AppUnderTest,
    Chat,
    chat_body,
    chunks_of,
    encode_request,
    eventually,
    joined,
    no_tokens,
    serving_app,
    whole,
)

FAMILIES = {"a": "qwen3", "b": "gemma3"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and three that cannot be loaded: one whose weights are cut, one whose weights do not fit its config,
    one whose config is none."""
    root = tmp_path_factory.mktemp("models")
    for name, family in FAMILIES.items():
        (root / name).symlink_to(tiny_model(family))
    shutil.copytree(tiny_model("qwen3"), root / "cut")
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(tiny_model("qwen3"), root / "misfit")
    config = root / "misfit" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 12}))
    shutil.copytree(tiny_model("qwen3"), root / "unreadable")
    (root / "unreadable" / "config.json").write_text("{")
    return root


@pytest.fixture
def app(tmp_path: Path, models: Path) -> Iterator[AppUnderTest]:
    """A server whose default model is `a`."""
    with serving_app(tmp_path, model_path=str(models / "a"), model_folders=(str(models),)) as app:
        yield app


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    """What each model answers on a server of its own."""
    answers = {}
    for name, family in FAMILIES.items():
        with serving_app(tmp_path_factory.mktemp(name), family) as app:
            answers[name] = app.chat("Tell me something.")
    return answers


def ask(app: AppUnderTest, model: str, said: str = "Tell me something.", **fields: Any) -> tuple[str, Chat]:
    """The name that the answer carries, and the answer."""
    response = app.post(CHAT_PATH, chat_body(said, model=model, **fields))
    assert response.status == 200, response.body
    return str(response.json["model"]), whole(response.json)


def name_of(app: AppUnderTest, model: str) -> str:
    return app.app.resolve_model(model).name


def test_a_request_that_names_another_model_has_it_loaded(
    app: AppUnderTest, alone: dict[str, Chat], models: Path
) -> None:
    """a -> b -> a: each answers as on a server of its own, the list and /health follow."""
    for number, name in enumerate(("a", "b", "a", "a")):
        answered_by, answer = ask(app, name)
        assert answered_by == name_of(app, name) and answer == alone[name]
        health = app.health()
        assert (health["status"], health["model"]) == ("ok", answered_by)
        assert health["num_swaps"] == min(number, 2)
        assert app.get("/v1/models").json["data"][0]["id"] == answered_by
    last = app.health()["last_swap"]
    assert (last["left"], last["entered"], last["error"]) == ("b", str(models / "a"), None)
    assert 0 < last["load_seconds"] <= last["seconds"] and last["num_freed_bytes"] > 500_000
    assert any("took the place of" in line for line in app.lines())


def test_the_list_has_every_model_that_can_be_served(app: AppUnderTest) -> None:
    """Loaded first, each with its context limit; each is found under its name."""
    cards: Any = app.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == [name_of(app, "a"), "b", "cut", "misfit"]
    assert all(card["max_model_len"] == 131072 for card in cards)
    assert app.get("/v1/models/b").json == cards[1] and app.get("/v1/models/c").status == 404


def test_running_answers_end_before_the_swap(app: AppUnderTest) -> None:
    """A stream of the old model is not cut; a request for the other one has its headers at once and then its answer."""
    with app.connect() as running, app.connect() as waiting:
        with no_tokens():
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            waiting.send(encode_request("POST", CHAT_PATH, chat_body(model="b", stream=True, max_tokens=4)))
            status, headers = waiting.read_head()
            assert status == 200 and headers["content-type"].startswith("text/event-stream")
            assert b'"role":"assistant"' in waiting.read_chunk()
            health = app.app.health()[1]
            assert (health["num_waiting"], health["num_waiting_for_model"]) == (1, 1), "a proxy sees who waits so too"
        answer = joined(chunks_of(running.read_response()))
        assert answer.finish_reason == "length" and app.health()["num_swaps"] in (0, 1)
        rest = b"".join(iter(waiting.read_chunk, b""))
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest and b'"model":"b"' in rest


def test_requests_for_both_are_all_answered_and_grouped(app: AppUnderTest, alone: dict[str, Chat]) -> None:
    """Twelve requests at once, every second one for the other model: right answers from the right model, few swaps."""
    names = ["a", "b"] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        with held(app.served.engine):
            asking = pool.map(lambda name: ask(app, name), names)
            assert eventually(lambda: app.app.health()[1]["num_waiting"] == len(names))
        answers = list(asking)
    for name, (answered_by, answer) in zip(names, answers, strict=True):
        assert answered_by == name_of(app, name) and answer == alone[name]
    assert app.health()["num_swaps"] <= 4


@pytest.fixture
def short_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that others wait for leaves soon after it was loaded."""
    monkeypatch.setattr(kvserve.app.model_swap, "MIN_STAY_SECONDS", 0.1)
    monkeypatch.setattr(kvserve.app.model_swap, "STAY_PER_LOAD", 0.0)


def test_a_model_that_others_wait_for_stays_only_for_a_while(short_stay: None, app: AppUnderTest) -> None:
    """Requests without a pause do not keep the other model's request waiting for ever."""
    over = threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            ask(app, "a", max_tokens=40)

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(keep_busy) for _ in range(2)]
        assert eventually(lambda: app.app.health()[1]["num_decoding"] > 0)
        try:
            answered_by, _ = ask(app, "b")
        finally:
            over.set()
        assert answered_by == "b"
        for each in busy:
            each.result(60)


def test_a_client_that_leaves_while_it_waits_causes_no_swap(app: AppUnderTest) -> None:
    """Its place is free again, and the loaded model stays."""
    with app.connect() as running:
        with no_tokens():
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            for stream in (True, False):
                with app.connect() as waiting:
                    waiting.send(encode_request("POST", CHAT_PATH, chat_body(model="b", stream=stream)))
                    assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 1)
                assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 0)
        assert joined(chunks_of(running.read_response())).finish_reason == "length"
    assert app.health()["num_swaps"] == 0 and app.health()["model"] == name_of(app, "a")


def test_only_so_many_may_wait_for_another_model(tmp_path: Path, models: Path) -> None:
    """Beyond MAX_QUEUED_REQUESTS it is a 429 that says when to come back; those that wait are served."""
    settings = {"model_path": str(models / "a"), "model_folders": (str(models),), "max_queued_requests": 1}
    with serving_app(tmp_path, **settings) as app, app.connect() as running, app.connect() as waiting:
        with no_tokens():
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            waiting.send(encode_request("POST", CHAT_PATH, chat_body(model="b", max_tokens=2)))
            assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 1)
            refused = app.post(CHAT_PATH, chat_body(model="b"))
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error") and refused.headers["retry-after"]
        assert running.read_response().status == waiting.read_response().status == 200


def test_who_waits_for_another_model_is_listed(app: AppUnderTest) -> None:
    """On the dashboard, in the order of their queue, with model, session, prompt and time; then as requests that run,
    and gone once they are over or their client is."""

    hello = [{"role": "user", "content": "Hello."}]

    def waiting() -> list[dict[str, Any]]:
        body: Any = app.app.observability.dashboard()
        return [each for each in body["running"] if each["stage"] == "waiting for model"]

    with app.connect() as running, app.connect() as first, app.connect() as second:
        with no_tokens():
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            assert waiting() == []
            first.send(encode_request("POST", CHAT_PATH, chat_body(model="b", max_tokens=2, session_id="build-7")))
            assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 1)
            with app.connect() as leaves:
                leaves.send(encode_request("POST", CHAT_PATH, chat_body(model="b", max_tokens=2)))
                assert eventually(lambda: len(waiting()) == 2)
            second.send(encode_request("POST", "/v1/messages", {"model": "b", "max_tokens": 2, "messages": hello}))
            assert eventually(lambda: [each["protocol"] for each in waiting()] == ["openai_chat", "anthropic_messages"])
            one, two = waiting()
            assert (
                one["model"] == two["model"] == "b" and one["session"].startswith("build-7") and two["session"] is None
            )
            assert one["seconds"] > 0 and one["num_prompt_tokens"] > 0 and one["num_done_tokens"] == 0
            assert one["request_id"] != two["request_id"]
            running.close()
        assert first.read_response().status == second.read_response().status == 200
    assert eventually(lambda: app.app.observability.dashboard()["running"] == [])
    assert app.line_of(str(one["request_id"])), "it is the request that was answered then"


@pytest.mark.long
def test_a_model_can_be_loaded_without_a_question(
    app: AppUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name; one that is there already is answered at once, and one that cannot be loaded says why."""
    load = "/v1/models/load"
    with monkeypatch.context() as patch:
        patch.setattr(app.app._pool, "_max_waiting", 0)
        assert app.post(load, {"model": app.served.name}).status == 200, "it needs no place in the queue"
        assert app.post(load, {"model": "b"}).status == 429
    unread = [each["id"] for each in app.get("/v1/models").json["data"]]  # type: ignore[union-attr, index]
    assert "unreadable" not in unread
    broken = app.post(load, {"model": "unreadable"})
    assert broken.status == 500 and broken.error["code"] == "model_load_failed", broken.body
    for name in (app.served.name, "b", "b"):
        assert app.post(load, {"model": name}).json == {"model": name, "status": "loaded"}
        assert app.app.health()[1]["model"] == name and app.app.health()[1]["num_waiting_for_model"] == 0
    refused = app.post(load, {"model": "cut"})
    assert refused.status >= 400 and refused.error["param"] == "model"
    assert app.post(load, {"model": "nobody's"}).status == 404
    assert ask(app, "b")[0] == "b"


@sampled_cells(lambda stream: stream)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_be_refused_without_loading_is_refused_at_once(app: AppUnderTest, stream: bool) -> None:
    """Cut weights, absent weights and a prompt over the context are plain errors; the loaded model never leaves."""
    cases = {
        "cut": (500, "model_load_failed", "model.safetensors"),
        "gemma-3": (404, "model_not_found", "hf download mlx-community/gemma-3-12b-it-4bit"),
        "mlx-community/None-4bit": (404, "model_not_found", "hf download mlx-community/None-4bit"),
    }
    for model, (status, code, words) in cases.items():
        refused = app.post(CHAT_PATH, chat_body(model=model, stream=stream))
        assert (refused.status, refused.error["code"]) == (status, code)
        assert words in str(refused.error["message"]) and refused.error["param"] == "model"
    too_long = app.post(CHAT_PATH, chat_body("word " * 140_000, model="b", stream=stream))
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")
    assert app.health()["num_swaps"] == 0 and app.health()["active_memory_bytes"] > 0
    assert ask(app, "a")[0] == name_of(app, "a")


def test_a_model_that_cannot_be_loaded_lets_the_old_one_come_back(app: AppUnderTest, alone: dict[str, Chat]) -> None:
    """Whoever waited hears why, streamed or not; the old model answers, and nobody tries again in vain."""
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(app.post, CHAT_PATH, chat_body(model="misfit", stream=True))
        plain = pool.submit(app.post, CHAT_PATH, chat_body(model="misfit"))
        refused = plain.result(60)
        last_events = streamed.result(60).body.decode()
    assert (refused.status, refused.error["code"]) == (500, "model_load_failed")
    assert "could not be loaded" in str(refused.error["message"])
    assert "model_load_failed" in last_events
    assert eventually(lambda: app.health()["status"] == "ok")
    assert app.health()["last_swap"]["error"] and app.health()["num_swaps"] == 0
    assert ask(app, "a") == (name_of(app, "a"), alone["a"])
    engine = app.served.engine
    assert app.post(CHAT_PATH, chat_body(model="misfit")).status == 500
    assert app.served.engine is engine, "it was not unloaded for a model that failed just now"
    assert any("comes back" in line for line in app.lines())


def test_a_model_that_was_mended_is_loaded(tmp_path: Path, models: Path) -> None:
    """A failure counts as long as the files are the same. (Model `a` has open the records of what is mended here.)"""
    folder = tmp_path / "models"
    shutil.copytree(models / "misfit", folder / "mended")
    with serving_app(tmp_path, model_path=str(models / "b"), model_folders=(str(folder),)) as app:
        assert app.post(CHAT_PATH, chat_body(model="mended")).status == 500
        shutil.copy(tiny_model("qwen3") / "config.json", folder / "mended" / "config.json")
        assert ask(app, "mended")[0] == "mended"


def test_a_model_that_comes_back_is_warm_from_disk(app: AppUnderTest) -> None:
    """a -> b -> a: what the first a computed was flushed when it left, and nothing of it is computed again."""
    history = [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": "Hello."}]
    body = chat_body(history, model="a")
    first: Any = app.post(CHAT_PATH, body).json
    ask(app, "b")
    history += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second: Any = app.post(CHAT_PATH, chat_body(history, model="a")).json
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.97 * first["usage"]["total_tokens"], (first["usage"], second["usage"])
    told: Any = app.get(f"/v1/cache/explain/{second['id']}").json
    assert told["source"] == "disk" or told.get("tier") == "disk", told


def test_each_model_keeps_what_it_has_read_and_written(tmp_path: Path, models: Path) -> None:
    """After two swaps the records of the first model are as they were; the other one's are its own. What drafts came
    from, for which a model has memory while it is loaded only, left with it."""
    path, folders = str(models / "a"), (str(models),)
    with serving_app(tmp_path, model_path=path, model_folders=folders, speculation="auto") as app:
        ask(app, "a", "First.", session_id="one")
        first = app.app.resolve_model("a")
        kept, drafts = first.conversations.totals(), first.drafts
        assert drafts is not None and drafts.num_bytes > 0
        ask(app, "b", "Second.", session_id="one")
        assert eventually(lambda: drafts.num_bytes == 0)
        ask(app, "a", "Third.", session_id="two")
        assert app.app.resolve_model("a").conversations.totals().num_messages == kept.num_messages + 2
        assert app.app.resolve_model("b").conversations.totals().num_messages == 2
        app.clear_cache()
        assert all(app.app.resolve_model(name).conversations.totals().num_messages == 0 for name in FAMILIES)


def test_a_strict_server_serves_models_and_aliases_only(tmp_path: Path, models: Path) -> None:
    """Unknown names are a 404, also Claude's, unless an alias lets them in."""
    settings = {"model_strict": True, "model_aliases": ("other=b", "claude-*=default")}
    with serving_app(tmp_path, model_path=str(models / "a"), model_folders=(str(models),), **settings) as app:
        for name in ("gpt-5", "local", "../a"):
            refused = app.post(CHAT_PATH, chat_body(model=name))
            assert (refused.status, refused.error["param"]) == (404, "model")
        assert ask(app, "claude-opus-4-5")[0] == str(models / "a")
        assert ask(app, "other")[0] == "b"
        cards: Any = app.get("/v1/models").json["data"]
        assert [(card["id"], card.get("root")) for card in cards if card["id"] in ("b", "other")] == [
            ("b", None),
            ("other", "b"),
        ]


def test_a_server_that_stops_while_requests_wait_ends_them_well(tmp_path: Path, models: Path) -> None:
    """A stream gets its error and [DONE], a plain request a 503; no thread is left."""
    with serving_app(tmp_path, model_path=str(models / "a"), model_folders=(str(models),)) as app:
        with app.connect() as running, app.connect() as stream, app.connect() as plain:
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=50_000)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            stream.send(encode_request("POST", CHAT_PATH, chat_body(model="b", stream=True)))
            plain.send(encode_request("POST", CHAT_PATH, chat_body(model="b")))
            assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 2)
            app.app.stop()
            ended = stream.read_response()
            refused = plain.read_response()
        assert ended.events[-1] == "[DONE]" and "not_ready" in ended.events[-2]
        assert refused.status == 503 and refused.error["code"] == "not_ready"


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loads wait for this event."""
    go_on = threading.Event()
    real = kvserve.engine.engine_start.load

    def load(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return real(*arguments)

    go_on.set()
    monkeypatch.setattr(kvserve.engine.engine_start, "load", load)
    yield go_on
    go_on.set()


def test_while_a_model_loads_the_server_says_so_and_takes_requests(
    slow_load: threading.Event, app: AppUnderTest
) -> None:
    """/health is 200 and `swapping`, the list has the coming model first, requests for either wait and are served."""
    slow_load.clear()
    before = app.app.health()[1]["active_memory_bytes"]  # the process may hold other models than this server's
    weight_bytes = sum(path.stat().st_size for path in tiny_model(FAMILIES["a"]).glob("*.safetensors"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, app, "b")
        assert eventually(lambda: app.app.health()[1]["status"] == "swapping")
        assert eventually(lambda: app.app.health()[1]["active_memory_bytes"] < before - 0.9 * weight_bytes), (
            "the old one has left"
        )
        health = app.get("/health")
        assert health.status == 200 and health.json["model"] == "b"
        assert app.get("/v1/models").json["data"][0]["id"] == "b"  # type: ignore[index]
        assert app.get("/v1/cache").status == 503
        second = pool.submit(ask, app, "a")
        assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 2)
        slow_load.set()
        assert first.result(60)[0] == "b" and second.result(60)[0] == name_of(app, "a")


def test_a_server_that_stops_in_the_middle_of_a_swap_leaves_nothing(
    slow_load: threading.Event, tmp_path: Path, models: Path
) -> None:
    """Whoever waits is told; the engine that was loading ends too."""
    with serving_app(tmp_path, model_path=str(models / "a"), model_folders=(str(models),)) as app:
        slow_load.clear()
        with app.connect() as waiting:
            waiting.send(encode_request("POST", CHAT_PATH, chat_body(model="b")))
            assert eventually(lambda: app.app.health()[1]["status"] == "swapping")
            loads_soon = threading.Timer(0.3, slow_load.set)
            loads_soon.start()
            app.app.stop()
            assert waiting.read_response().status == 503
            loads_soon.join()


def settled_active_bytes() -> int:
    """MLX's active memory once it stands still: an answer is out a little before the engine has let go of its row."""
    readings = [mx.get_active_memory()]

    def stands_still() -> bool:
        time.sleep(0.05)
        readings.append(mx.get_active_memory())
        return len(set(readings[-3:])) == 1 and len(readings) > 2

    assert eventually(stands_still)
    return readings[-1]


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("num_swaps", [4, pytest.param(10, marks=pytest.mark.long)])
def test_memory_after_many_swaps_is_flat(tmp_path: Path, models: Path, num_swaps: int) -> None:
    """Resident memory and MLX's own are at most 5 % above what they were after two swaps, with the same model loaded;
    MLX's own, which is exact, by as much less as there are fewer than eight swaps in between.

    Nothing is computed ahead: a row that comes and goes by itself would be in one reading and not in the other.
    """
    nothing_ahead: dict[str, Any] = {"warm_next_turn": False, "prewarm_prefixes": 0}
    folders = {"model_path": str(models / "a"), "model_folders": (str(models),)}
    with serving_app(tmp_path, **folders, **nothing_ahead) as app:
        readings = []
        for number in range(num_swaps):
            ask(app, "ba"[number % 2], f"Swap number {number}.", max_tokens=4)
            if number in (1, num_swaps - 1):
                assert eventually(app.is_idle)
                gc.collect()
                readings.append((resident_bytes(), settled_active_bytes()))
        assert app.health()["num_swaps"] == num_swaps
    (early_resident, early_active), (resident, active) = readings
    assert resident <= 1.05 * early_resident, readings
    assert active <= (1 + 0.05 * (num_swaps - 2) / 8) * early_active, readings
