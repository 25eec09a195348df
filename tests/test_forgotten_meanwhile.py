"""A request that runs, waits or is being guessed from while its session or its principal is forgotten is answered, and
leaves nothing: on the whole server and real models, searched for by its bytes."""

import json
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvserve.app.server
from kvserve.app.model_pool import ModelPool
from kvserve.app.server import Server
from kvserve.canonical import message_layout as layout
from kvserve.core.keeping import Scope
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.worker import Engine
from kvserve.identity.conversations import Conversations
from kvserve.observe.trace import TraceLog
from kvserve.warming.next_turn_predictor import NextTurnPredictor
from tests.laws import sampled_cells
from tests.models import tiny_model
from tests.serving import (
    CHAT_PATH,
    AppUnderTest,
    Response,
    chat_body,
    encode_request,
    eventually,
    no_tokens,
    serving_app,
)
from tests.words_held import files_with, values_with

RESPONSES, AGENTS, EXPLAIN = "/v1/responses", "/v1/agents", "/v1/cache/explain"
GONE, KEPT = "GOOSEBERRY jelly", "RASPBERRY jelly"
"""What the forgotten one says, and what another one says at the same time."""

KEY: Mapping[str, dict[str, str]] = {GONE: {"x-api-key": "gone"}, KEPT: {"x-api-key": "kept"}}
SESSION: Mapping[str, str] = {GONE: "gone", KEPT: "kept"}


def said(word: str) -> str:
    return f"{word}. " * 16


def body(word: str, path: str = CHAT_PATH, **fields: Any) -> dict[str, Any]:
    session = {"session_id": SESSION[word]}
    if path == RESPONSES:
        return {"input": said(word), "max_output_tokens": 4, "temperature": 0, "stream": True, **session, **fields}
    return chat_body(said(word), max_tokens=4, stream=True, **session, **fields)


def principal_of(app: AppUnderTest, word: str) -> str:
    """The name by which what this one says is forgotten: it has asked something before."""
    asked: Any = app.post(CHAT_PATH, chat_body("Hi.", max_tokens=1), KEY[word]).json
    assert eventually(lambda: app.get(f"{EXPLAIN}/{asked['id']}", KEY[word]).status == 200)
    return str(app.get(f"{EXPLAIN}/{asked['id']}", KEY[word]).json["principal"])


def forget(app: AppUnderTest, query: str) -> dict[str, Any]:
    with app.connect() as client:
        response = client.request("DELETE", f"/v1/cache?{query}", None, {"Connection": "close"})
    assert response.status == 200, response.body
    return dict(response.json)


def id_of(response: Response) -> str:
    """The id of a streamed answer that came to its own end."""
    lines = response.body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if "choices" in events[0]:
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), events[-1]
        return str(events[0]["id"])
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    return str(events[0]["response"]["id"])


def settled(app: AppUnderTest) -> None:
    """Every request is over, what was guessed is computed, and the disk has all that it is to have."""

    def is_through() -> bool:
        guesses, cache = app.app._next_turns, app.get("/v1/cache").json
        is_guessing = guesses is not None and (guesses._running or guesses.num_pending)
        return app.is_idle() and not is_guessing and not cache["warming"]["num_jobs_waiting"]

    assert eventually(is_through)
    assert eventually(lambda: not app.get("/v1/cache").json["disk"]["num_queued_bytes"])
    assert app.served.conversations.flush()


def ids_of(app: AppUnderTest, word: str) -> bytes:
    return array("I", app.served.tokenizer.encode(f" {word}. {word}.")).tobytes()


def held(app: AppUnderTest, folder: Path, word: str) -> tuple[list[str], list[Path]]:
    """Where the words are, as text in what the server holds, as text or tokens in files."""
    return values_with(app.app, word), files_with(folder, word.encode(), ids_of(app, word))


def assert_gone(app: AppUnderTest, folder: Path) -> None:
    """Of the forgotten one there is nothing, of the other one everything."""
    settled(app)
    assert held(app, folder, GONE) == ([], [])
    assert all(held(app, folder, KEPT))
    for word, is_kept in ((GONE, False), (KEPT, True)):
        ids = app.served.tokenizer.encode(said(word))
        assert in_cache(app.served.engine, ids[16:32]) is is_kept, word
        assert app.served.drafts is None or in_drafts(app.served.drafts, ids[16:32]) is is_kept, word


def in_cache(engine: Engine, ids: Sequence[int]) -> bool:
    """Whether a node of the tree, or a prompt that it has looked up last, has these ids."""
    packed = array("I", ids).tobytes()

    def look(scheduler: Any) -> bool:
        cache = scheduler.cache
        nodes = [node.tokens.ids for path in cache._tree.sequences() for node in path]
        names = [named.run.ids for named in cache._tree._names._kept]
        return any(packed in each for each in (*nodes, *names))

    return engine._ask(look)


def in_drafts(drafts: DraftTexts, ids: Sequence[int]) -> bool:
    """Whether a text that next tokens are drafted from has these ids."""
    packed = array("i", ids).tobytes()
    kept = (index for text in drafts._used for index in (text.index, text.offcut))
    return any(packed in index.tokens.tobytes() for index in kept)


def while_running(
    app: AppUnderTest, act: Callable[[], None], path: str = CHAT_PATH, **fields: Any
) -> dict[str, Response]:
    """The answers to the forgotten one and to the other one, which stand still and are not over while `act` runs."""
    with app.connect() as gone, app.connect() as kept:
        clients = {GONE: gone, KEPT: kept}
        with no_tokens():
            for word, client in clients.items():
                client.send(encode_request("POST", path, body(word, path, **fields), KEY[word]))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 2)
            act()
        return {word: client.read_response() for word, client in clients.items()}


@pytest.mark.parametrize("path", [CHAT_PATH, RESPONSES])
@pytest.mark.parametrize("by", ["session", "principal"])
@sampled_cells(lambda by, path: (by == "session") is (path == CHAT_PATH))
def test_a_request_that_runs_meanwhile_leaves_nothing(tmp_path: Path, by: str, path: str) -> None:
    """No record, KV, trace, explanation or response, nothing to draft from, and nothing is computed ahead for it; its
    answer is whole."""
    with serving_app(tmp_path, max_kv_size=2048, warm_next_turn=True, prewarm_prefixes=0, speculation="auto") as app:
        name = "gone" if by == "session" else principal_of(app, GONE)
        answers = while_running(app, lambda: assert_done(forget(app, f"{by}={name}")), path)
        ids = {word: id_of(answer) for word, answer in answers.items()}
        assert eventually(lambda: app.get(f"{EXPLAIN}/{ids[KEPT]}", KEY[KEPT]).status == 200)
        assert_gone(app, tmp_path)
        assert app.get(f"{EXPLAIN}/{ids[GONE]}", KEY[GONE]).status == 404
        if path == RESPONSES:
            found = [app.get(f"{RESPONSES}/{ids[word]}", KEY[word]).status for word in (GONE, KEPT)]
            assert found == [404, 200]
        again = app.post(CHAT_PATH, {**body(GONE), "stream": False}, KEY[GONE])
        settled(app)
        assert again.status == 200 and all(held(app, tmp_path, GONE)), "who asks once more is kept again"


def assert_done(told: Mapping[str, Any]) -> None:
    assert told["is_done"] and told["status"] == "ok"


def test_a_request_that_waits_for_its_row_leaves_nothing(tmp_path: Path) -> None:
    """It stands behind the other one's in the engine's queue."""
    with (
        serving_app(tmp_path, max_kv_size=2048, max_concurrent_requests=1) as app,
        app.connect() as gone,
        app.connect() as kept,
    ):
        with no_tokens():
            kept.send(encode_request("POST", CHAT_PATH, body(KEPT), KEY[KEPT]))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            gone.send(encode_request("POST", CHAT_PATH, body(GONE), KEY[GONE]))
            assert eventually(lambda: app.app.health()[1]["num_waiting"] == 1)
            assert_done(forget(app, "session=gone"))
        assert id_of(gone.read_response()) and id_of(kept.read_response())
        assert_gone(app, tmp_path)


def test_a_request_that_waits_for_its_model_leaves_nothing(tmp_path: Path) -> None:
    """It was not submitted when its session was forgotten: it is rendered, computed and answered later."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "other").symlink_to(tiny_model("gemma3"))
    with (
        serving_app(tmp_path, max_kv_size=2048, model_folders=(str(models),)) as app,
        app.connect() as gone,
        app.connect() as kept,
    ):
        with no_tokens():
            kept.send(encode_request("POST", CHAT_PATH, body(KEPT), KEY[KEPT]))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            gone.send(encode_request("POST", CHAT_PATH, body(GONE, model="other"), KEY[GONE]))
            assert eventually(lambda: len(app.app._pool.waiting()) == 1)
            assert_done(forget(app, "session=gone"))
        assert id_of(gone.read_response()) and id_of(kept.read_response())
        other = app.app.resolve_model("other")
        assert eventually(app.is_idle) and other.conversations.flush()
        assert not in_cache(other.engine, other.tokenizer.encode(said(GONE))[16:32])
        ids = array("I", other.tokenizer.encode(f" {GONE}. {GONE}.")).tobytes()
        assert eventually(lambda: files_with(tmp_path, GONE.encode(), ids) == [])
        assert values_with(app.app, GONE) == []


def test_a_request_that_comes_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when its session is being forgotten and its records are still there: what is put back from them into its
    prompt goes into no record, no KV and no trace of its own."""
    real = ModelPool.forget_records
    asked = {"max_tokens": 4, "session_id": "gone", "temperature": 0}
    before = [{"role": "user", "content": f"<system-reminder>\n{said(GONE)}\n</system-reminder>\nhello"}]
    with serving_app(tmp_path, max_kv_size=4096) as app, app.connect() as client:
        answer: Any = app.post(CHAT_PATH, {"messages": before, **asked}, KEY[GONE]).json
        settled(app)
        assert all(held(app, tmp_path, GONE))
        later = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And now?"},
        ]

        def meanwhile(self: ModelPool, scope: Scope) -> Any:
            body = {"messages": later, "stream": True, **asked}
            client.send(encode_request("POST", CHAT_PATH, body, KEY[GONE]))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            return real(self, scope)

        with no_tokens(), monkeypatch.context() as patch:
            patch.setattr(ModelPool, "forget_records", meanwhile)
            assert_done(forget(app, "session=gone"))
        assert id_of(client.read_response())
        settled(app)
        assert held(app, tmp_path, GONE) == ([], [])


def test_what_a_forgotten_request_is_compared_with_stays_in_no_memo(tmp_path: Path) -> None:
    """It is explained when it is over: its messages beside those of the request before, by every rule there is."""

    def asked(argument: str, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
        call = {"name": "cook", "arguments": json.dumps({"what": argument})}
        said = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "It is done. " * 20}
        messages = [{"role": "user", "content": "Cook something. " * 20}, said, result, *more]
        return {"messages": messages, "max_tokens": 4, "temperature": 0, "session_id": "gone", **fields}

    with serving_app(tmp_path, max_kv_size=4096) as app, app.connect() as client:
        assert app.post(CHAT_PATH, asked(GONE), KEY[GONE]).status == 200
        again = {"role": "user", "content": "And now?"}
        with no_tokens():
            client.send(encode_request("POST", CHAT_PATH, asked(f"{GONE}, sweet", again, stream=True), KEY[GONE]))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            assert values_with(layout._memoised, GONE)
            assert_done(forget(app, "session=gone"))
            assert values_with(layout._memoised, GONE) == []
        assert id_of(client.read_response())
        settled(app)
        assert "message changed" in app.screen.getvalue()
        assert values_with(layout._memoised, GONE) == held(app, tmp_path, GONE)[0] == []


def test_a_request_whose_model_is_being_looked_for_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the response that it goes on from, and nothing else: what it has copied goes nowhere."""
    real = Server.resolve_model
    with serving_app(tmp_path, max_kv_size=4096) as app:
        before: Any = app.post(RESPONSES, {**body(GONE, RESPONSES), "stream": False}, KEY[GONE]).json
        settled(app)
        forgetting = Forgetting(app)

        def meanwhile(self: Server, name: str | None) -> Any:
            forgetting.begin()
            return real(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(Server, "resolve_model", meanwhile)
            later = {**body(GONE, RESPONSES, previous_response_id=before["id"]), "input": "And now?"}
            assert id_of(app.post(RESPONSES, later, KEY[GONE]))
            forgetting.end()
        settled(app)
        del before
        assert held(app, tmp_path, GONE) == ([], [])


@sampled_cells(lambda is_queued: is_queued)
@pytest.mark.parametrize("is_queued", [False, True])
def test_an_agents_turn_leaves_its_history_only(tmp_path: Path, is_queued: bool) -> None:
    """An agent's session is its own; what it said is in its history, which goes with the agent. `is_queued`: the turn
    waits for another one of the agent."""
    with serving_app(tmp_path, max_kv_size=2048) as app:
        assert app.post(AGENTS, {"agent_id": "cook"}).status == 201
        path = f"{AGENTS}/cook/generate"
        asked = {**chat_body("Hello.", max_tokens=4, stream=True)}
        with app.connect() as first, app.connect() as second:
            with no_tokens():
                sent = (first, second) if is_queued else (first,)
                for client in sent:
                    client.send(encode_request("POST", path, {**asked, "messages": said_once(client is sent[-1])}))
                    assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
                assert eventually(lambda: len(app.app.agents._queues["cook"]) == len(sent))
                assert_done(forget(app, "session=agent:cook"))
            for client in sent:
                assert id_of(client.read_response())
        assert app.get(f"{AGENTS}/cook").json["num_turns"] == len(sent)
        settled(app)
        ids = ids_of(app, GONE)
        assert {path.name.partition("-")[0] for path in files_with(tmp_path, GONE.encode(), ids)} == {"agents.sqlite3"}
        assert not list(app.log_root.rglob("*.log"))


def said_once(is_last: bool) -> list[dict[str, str]]:
    return [{"role": "user", "content": said(GONE) if is_last else "Hello."}]


class Forgetting:
    """Forgets the one from a thread of its own, once, while something of its request is being done."""

    def __init__(self, app: AppUnderTest) -> None:
        self._thread = threading.Thread(target=lambda: self._told.append(forget(app, "session=gone")))
        self._told: list[dict[str, Any]] = []
        self._has_begun = threading.Event()

    def begin(self) -> None:
        """It has a moment, so that it would be over if nothing kept it waiting."""
        if not self._thread.ident:
            self._thread.start()
            self._thread.join(0.5)
            self._has_begun.set()

    def end(self) -> None:
        assert self._has_begun.wait(60)
        self._thread.join(60)
        assert_done(self._told[0])


@sampled_cells(lambda kept_by: kept_by[0] is Conversations)
@pytest.mark.parametrize(
    "kept_by", [(Conversations, "remember"), (TraceLog, "write")], ids=lambda pair: str(pair[0].__name__)
)
def test_what_is_just_being_kept_is_forgotten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_by: tuple[type, str]
) -> None:
    """Whoever forgets while a request is written down, which was to be kept, waits for it and takes that too."""
    real = getattr(*kept_by)
    with serving_app(tmp_path, max_kv_size=2048) as app:
        forgetting = Forgetting(app)

        def meanwhile(self: Any, *args: Any, **kwargs: Any) -> Any:
            forgetting.begin()
            return real(self, *args, **kwargs)

        monkeypatch.setattr(*kept_by, meanwhile)
        assert app.post(CHAT_PATH, {**body(GONE), "stream": False}, KEY[GONE]).status == 200
        forgetting.end()
        settled(app)
        assert held(app, tmp_path, GONE) == ([], [])


def test_a_guess_of_the_next_turn_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is being rendered when its session is forgotten: nothing is computed for it, and no habit is remembered."""
    real = NextTurnPredictor.job_after
    with serving_app(tmp_path, max_kv_size=2048, warm_next_turn=True) as app:
        forgetting = Forgetting(app)

        def meanwhile(self: NextTurnPredictor, *args: Any) -> Any:
            forgetting.begin()
            return real(self, *args)

        monkeypatch.setattr(NextTurnPredictor, "job_after", meanwhile)
        assert app.post(CHAT_PATH, {**body(GONE), "stream": False}, KEY[GONE]).status == 200
        forgetting.end()
        settled(app)
        assert held(app, tmp_path, GONE) == ([], [])
        guesses = app.app._next_turns
        assert guesses is not None and not guesses._predictor._lines and not guesses._predictor._clients


def test_what_a_client_has_prewarmed_meanwhile_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wish is being rendered when its session is forgotten: it is told that nothing was computed."""
    real = kvserve.app.server.prewarm
    with serving_app(tmp_path, max_kv_size=2048) as app:
        forgetting = Forgetting(app)

        def meanwhile(*args: Any) -> Any:
            forgetting.begin()
            return real(*args)

        monkeypatch.setattr(kvserve.app.server, "prewarm", meanwhile)
        asked = {"messages": [{"role": "user", "content": said(GONE)}], "session_id": "gone"}
        told: Any = app.post("/v1/cache/prewarm", asked, KEY[GONE])
        assert told.status == 200, told.body
        forgetting.end()
        settled(app)
        assert held(app, tmp_path, GONE) == ([], [])
