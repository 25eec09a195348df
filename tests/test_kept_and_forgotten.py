"""What of requests is on disk, who may ask for it, and how it is forgotten, on the whole server and a real model."""

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.app.wiring import observability_settings
from kvserve.config import DiskMode
from kvserve.core import NOBODY
from kvserve.observe.history_file import HistoryFile
from kvserve.protocols.responses_store import ResponseStore, StoredResponse
from tests.laws import sampled_cells
from tests.serving import CHAT_PATH, COMPLETION_PATH, AppUnderTest, Response, eventually, serving_app, unstarted_app
from tests.words_held import files_with, values_with

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
ALICE, BOB = {"authorization": "Bearer alice"}, {"x-api-key": "bob"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("app"), max_kv_size=2048) as app:
        yield app


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


def delete(app: AppUnderTest, path: str) -> Response:
    with app.connect() as client:
        return client.request("DELETE", path, None, {"Connection": "close"})


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
        assert observability_settings(app._settings, disk_cache).writes_traces == is_written


@pytest.mark.parametrize(("disk_cache", "is_written"), [("on", True), ("off", False), ("ephemeral", False)])
def test_what_the_dashboard_keeps_is_on_disk_where_kv_is(
    tmp_path: Path, disk_cache: DiskMode, is_written: bool
) -> None:
    """In one folder, or in none; of a request with `ttl: 0` its id is in no file and its session in none of the
    server's own, also after the end (the catalog of KV names the readers of what others have left)."""
    with serving_app(tmp_path, disk_cache=disk_cache, enable_request_logging=False) as app:
        kept = app.post(CHAT_PATH, {**BODIES[CHAT_PATH], "session_id": "session-kept"}).json
        other = {"messages": [{"role": "user", "content": "Another one."}], "max_tokens": 2, "ttl": 0}
        gone = app.post(CHAT_PATH, {**other, "session_id": "session-gone"}).json
        ids = [str(each["id"]).rpartition("-")[2].encode() for each in (kept, gone)]
        assert eventually(lambda: len(app.app.observability.dashboard()["last"]) == 2)  # type: ignore[arg-type]
    assert (tmp_path / "state" / "dashboard").exists() == is_written
    assert [bool(files_with(tmp_path, name)) for name in ids] == [is_written, False]
    assert bool(files_with(tmp_path, b"session-kept")) is is_written
    assert files_with(tmp_path / "state", b"session-gone") == []


def test_a_row_of_the_dashboard_has_no_word(tmp_path: Path) -> None:
    """Of a conversation whose tool changed: neither what was said nor the tool's name is in its row on disk; the first
    words are in no event, the name is shown as long as the server runs."""
    tool = {"type": "function", "function": {"name": "gooseberry", "description": "One.", "parameters": {}}}
    changed = {"type": "function", "function": {**tool["function"], "description": "Two."}}  # type: ignore[dict-item]
    settings: dict[str, Any] = {"enable_request_logging": False, "speculation": "off"}
    with serving_app(tmp_path, max_kv_size=4096, **settings) as app:
        first = app.chat(f"{WORD} is what I like. " * 40, tools=[tool], session_id="one", max_tokens=2)
        asked = {"role": "user", "content": f"{WORD} is what I like. " * 40}
        answer = {"role": "assistant", "content": first.content}
        said = [asked, answer, {"role": "user", "content": "And then?"}]
        app.chat(said, tools=[changed], session_id="one", max_tokens=2)
        told: Any = {}

        def is_told() -> bool:
            told.update(app.app.observability.dashboard())
            return len(told["last"]) == 2

        assert eventually(is_told)
        [group] = told["losses"]["groups"]
        assert group["cause"] == "tools changed" and "gooseberry" in group["summary"]
        assert WORD not in str(told) and told["conversations"][0]["words"] == ""
        turns: Any = app.get(f"/dashboard/sessions/{told['conversations'][0]['id']}").json["turns"]
        assert len(turns) == 2 and "gooseberry" in str(turns) and WORD not in str(turns)
    row = b"".join(file.read_bytes() for file in (tmp_path / "state" / "dashboard").iterdir())
    assert b"tools changed" in row and b"gooseberry" not in row and WORD.encode() not in row


def test_raw_prompts_of_two_principals_are_two_conversations(app: AppUnderTest) -> None:
    """However alike they are."""
    for name in ("one", "two", "one"):
        app.post(COMPLETION_PATH, {"prompt": f"{WORD} alike " * 80, "max_tokens": 2}, {"x-api-key": f"raw-{name}"})

    def turns() -> list[int]:
        rows = [each for each in app.app.observability._history.newest() if each.num_prompt_tokens > 80]
        raw = [each for each in rows if each.protocol == "openai_completions"]
        return sorted(Counter(each.conversation for each in raw).values())

    assert eventually(lambda: sum(turns()) == 3), app.app.observability._history.newest()
    assert turns() == [1, 2]


def test_old_responses_leave_at_a_start_and_while_others_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RESPONSES_KEEP_DAYS` holds where nobody asks for a response any more."""
    file = tmp_path / "state" / "responses.sqlite3"
    kept = StoredResponse({"id": "resp_a", "output": []}, ({"content": WORD},), None)
    before = ResponseStore(file, pytest.fail, wall_clock=lambda: time.time() - 3 * 86_400)
    before.put(kept)
    before.close()
    assert files_with_the_word(tmp_path)
    with serving_app(tmp_path, responses_keep_days=2) as app:
        assert files_with_the_word(tmp_path) == []
        app.app.responses.put(kept)
        assert files_with_the_word(tmp_path)
        monkeypatch.setattr(app.app.responses, "_wall_clock", lambda: time.time() + 3 * 86_400)
        app.chat(max_tokens=2)
        assert files_with_the_word(tmp_path) == []


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_an_explanation_is_shown_to_the_key_that_asked(app: AppUnderTest) -> None:
    """To another one, and to nobody, it is as unknown as one that never was; so is the newest one."""
    answer = app.post(CHAT_PATH, BODIES[CHAT_PATH], ALICE).json
    path = f"{EXPLAIN}/{answer['id']}"
    assert eventually(lambda: app.get(path, ALICE).status == 200)
    assert app.get(f"{EXPLAIN}?last", ALICE).json["request_id"] in str(answer["id"])
    unknown = f"{EXPLAIN}/chatcmpl-req{'0' * 24}"
    for other in (BOB, {}):
        refused, never_was = app.get(path, other), app.get(unknown, other)
        assert (refused.status, never_was.status) == (404, 404)
        said = str(refused.error["message"]).replace(str(answer["id"]), "ID")
        assert said == str(never_was.error["message"]).replace(unknown.rpartition("/")[2], "ID")
    assert app.get(EXPLAIN, BOB).status == 404


# --- forgetting ------------------------------------------------------------------------------------------------------


def traces(app: AppUnderTest) -> int:
    return len(list(app.log_root.rglob("*.log")))


@pytest.mark.parametrize("by", ["session", "principal"])
def test_what_was_said_can_be_forgotten(app: AppUnderTest, by: str) -> None:
    """Response, explanation and trace of one session, or of one principal; those of others stay."""
    kept, gone = (
        app.post(RESPONSES, {**BODIES[RESPONSES], "session_id": f"by-{by}-{name}"}, {"x-api-key": f"{by}-{name}"}).json
        for name in ("kept", "gone")
    )
    own = {"x-api-key": f"{by}-gone"}
    assert eventually(lambda: app.get(f"{EXPLAIN}/{gone['id']}", own).status == 200)
    assert eventually(lambda: len(list(app.log_root.rglob(f"*by-{by}-*.log"))) == 2)
    name = app.get(f"{EXPLAIN}/{gone['id']}", own).json["principal"] if by == "principal" else f"by-{by}-gone"
    before = traces(app)
    told = delete(app, f"/v1/cache?{by}={name}")
    assert told.status == 200, told.body
    assert (
        told.json.items() >= {"status": "ok", "num_responses": 1, "num_explanations": 1, "num_trace_files": 1}.items()
    )
    assert traces(app) == before - 1
    assert app.get(f"{RESPONSES}/{gone['id']}", own).status == app.get(f"{EXPLAIN}/{gone['id']}", own).status == 404
    others = {"x-api-key": f"{by}-kept"}
    assert (
        app.get(f"{RESPONSES}/{kept['id']}", others).status == app.get(f"{EXPLAIN}/{kept['id']}", others).status == 200
    )
    again = delete(app, f"/v1/cache?{by}={name}").json
    assert [again[each] for each in ("num_responses", "num_explanations", "num_trace_files")] == [0, 0, 0]


def test_who_forgets_is_told_where_the_dashboards_file_stays(
    app: AppUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_done` is false, whoever is meant, if what requests were is still in a file."""
    paths = ("/v1/cache?principal=0123456789abcdef.-", "/v1/cache")
    assert [delete(app, path).json["is_done"] for path in paths] == [True, True]
    monkeypatch.setattr(HistoryFile, "erase", lambda self: False)
    assert [delete(app, path).json["is_done"] for path in paths] == [False, False]


@sampled_cells(lambda by: by == "principal")
@pytest.mark.parametrize("by", ["session", "principal"])
def test_what_is_forgotten_is_held_nowhere(tmp_path: Path, by: str) -> None:
    """Searched for by its bytes: as text in all that the server holds and in every file, as tokens in every file and in
    the cache. What another client said is all there, and is reused."""
    words = {"gone": "GOOSEBERRY jelly", "kept": "RASPBERRY jelly"}
    with serving_app(tmp_path, max_kv_size=2048, warm_next_turn=False) as app:
        ids, names = {}, {}
        for who, word in words.items():
            key = {"x-api-key": who}
            body = {"messages": [{"role": "user", "content": f"{word}. " * 40}], "max_tokens": 4, "session_id": who}
            answer: Any = app.post(CHAT_PATH, body, key).json
            app.post(RESPONSES, {"input": f"{word}. " * 40, "max_output_tokens": 4, "session_id": who}, key)
            app.post(COMPLETION_PATH, {"prompt": f"{word}. " * 40, "max_tokens": 4, "session_id": who}, key)
            assert eventually(lambda key=key, answer=answer: app.get(f"{EXPLAIN}/{answer['id']}", key).status == 200)
            names[who] = app.get(f"{EXPLAIN}/{answer['id']}", key).json["principal"]
            ids[who] = array("I", app.served.tokenizer.encode(f" {word}. {word}.")).tobytes()
        assert eventually(lambda: not app.get("/v1/cache").json["disk"]["num_queued_bytes"])
        assert app.served.conversations.flush()
        for who, word in words.items():
            assert values_with(app.app, word) and files_with(tmp_path, word.encode()), who
            assert files_with(tmp_path, ids[who]), who
        told = delete(app, f"/v1/cache?{by}={'gone' if by == 'session' else names['gone']}").json
        assert told["num_tokens"] > 100 and told["num_messages"] and told["disk_bytes"] and told["is_done"], told
        del answer, told
        assert files_with(tmp_path, words["gone"].encode(), ids["gone"]) == []
        assert values_with(app.app, words["gone"]) == []
        assert values_with(app.app, words["kept"]) and files_with(tmp_path, ids["kept"])
        again: Any = app.post(
            CHAT_PATH, {**body, "messages": [{"role": "user", "content": f"{words['kept']}. " * 40}]}, key
        ).json
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16


@sampled_cells(lambda num_kept: num_kept > 1)
@pytest.mark.parametrize("num_kept", [1, 100])
def test_nobody_who_watches_is_shown_what_was_forgotten(tmp_path: Path, num_kept: int) -> None:
    """The words around a difference: neither in what the dashboard has just shown, nor beside the branch, also where
    the explanation itself has left as one too many."""
    word = "GOOSEBERRY jelly"
    settings: dict[str, Any] = {"explanations_kept": num_kept, "dashboard_show_text": num_kept > 1}
    with serving_app(tmp_path, max_kv_size=2048, enable_request_logging=False, **settings) as app:

        def said(words: str, *more: dict[str, str], session: str = "gone") -> dict[str, Any]:
            asked = {"max_tokens": 4, "temperature": 0, "session_id": session}
            told: Any = app.post(CHAT_PATH, {"messages": [{"role": "user", "content": words}, *more], **asked}).json
            assert eventually(lambda: app.get(f"{EXPLAIN}/{told['id']}").status == 200)
            return dict(told)

        first = said(f"{'hello ' * 50}{word}")["choices"][0]["message"]
        answer, again = {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And then?"}
        second = said(f"{'hello ' * 50}{word}, edited", answer, again)
        assert word in app.get(f"{EXPLAIN}/{second['id']}").body.decode()
        said("Somebody else's.", session="kept")
        assert (word in str(app.app.observability.dashboard())) is (num_kept > 1)
        past: Any = app.app.observability.dashboard()
        assert [(each["session"][:4], each["num_turns"]) for each in past["conversations"]] == [
            ("kept", 1),
            ("gone", 2),
        ]
        assert past["losses"]["groups"][0]["cause"] == "message changed" and len(past["last"]) == 3
        assert len(app.get(f"/dashboard/sessions/{past['conversations'][1]['id']}").json["turns"]) == 2  # type: ignore[arg-type]
        told = delete(app, "/v1/cache?session=gone").json
        assert told["is_done"] and told["num_explanations"] == (2 if num_kept > 1 else 0)
        del first, answer, second
        assert values_with(app.app, word) == []
        shown = app.app.observability.dashboard()["sessions"]
        assert [each["name"][:4] for each in shown] == ["kept"] and shown[0]["branches"][0]["last"]
        left: Any = app.app.observability.dashboard()
        assert [each["session"][:4] for each in left["conversations"]] == ["kept"] and len(left["last"]) == 1
        assert left["losses"]["groups"] == [] and sum(each[1] for each in left["activity"]["hour"]) == 3
        assert app.get(f"/dashboard/sessions/{past['conversations'][1]['id']}").status == 404


class Talk:
    """A conversation, with a session or without."""

    def __init__(self, app: AppUnderTest, session: str | None, key: dict[str, str] = ALICE) -> None:
        self._app = app
        self._key = key
        self._fields = {"max_tokens": 8, "temperature": 0, **({} if session is None else {"session_id": session})}
        self._messages: list[dict[str, str]] = []
        self.principal = ""

    def cause(self) -> str:
        """Why its next turn reused no more."""
        text = "And then?" if self._messages else f"{self._fields.get('session_id')} jelly. " * 40
        self._messages.append({"role": "user", "content": text})
        answer: Any = self._app.post(CHAT_PATH, {"messages": self._messages, **self._fields}, self._key).json
        self._messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert eventually(lambda: self._app.get(f"{EXPLAIN}/{answer['id']}", self._key).status == 200)
        told = self._app.get(f"{EXPLAIN}/{answer['id']}", self._key).json
        self.principal = str(told["principal"])
        return str(told["cause"])


@sampled_cells(lambda by: by == "session")
@pytest.mark.parametrize("by", ["session", "principal"])
def test_whoever_was_forgotten_is_told_so(tmp_path: Path, by: str) -> None:
    """The next turn of a session says why nothing of it is known, and that of one that is still known does not."""
    with serving_app(tmp_path, max_kv_size=4096) as app:
        gone, kept = Talk(app, "gone"), Talk(app, "kept")
        for talk in (gone, kept):
            assert [talk.cause(), talk.cause()] == ["new conversation", "nothing lost"]
        assert delete(app, f"/v1/cache?session=gone&principal={'a' * 16}.-").status == 200
        assert gone.cause() == "nothing lost", "it was another one's of this name"
        told = delete(app, f"/v1/cache?{by}={'gone' if by == 'session' else gone.principal}").json
        assert told["is_done"] and told["num_messages"]
        assert gone.cause() == "cache cleared"
        assert kept.cause() == ("nothing lost" if by == "session" else "cache cleared")
        assert [gone.cause(), kept.cause()] == ["nothing lost"] * 2


@sampled_cells(lambda key: not key)
@pytest.mark.parametrize("key", [{}, ALICE])
def test_who_names_no_session_is_told_to(tmp_path: Path, key: dict[str, str]) -> None:
    """Also after somebody was forgotten: it is what helps from then on."""
    with serving_app(tmp_path, max_kv_size=4096) as app:
        talk = Talk(app, None, key)
        assert talk.cause() == "new conversation" and (talk.principal == str(NOBODY)) is (not key)
        assert delete(app, f"/v1/cache?principal={talk.principal}").json["is_done"]
        assert talk.cause() == "no session"


def test_without_sessions_in_records_none_can_be_forgotten(tmp_path: Path) -> None:
    """It is refused with what to do instead, and costs nobody anything; a principal can be."""
    with serving_app(tmp_path, max_kv_size=2048, cache_session_partitioning=False) as app:
        answer: Any = app.post(RESPONSES, {**BODIES[RESPONSES], "session_id": "one"}, ALICE).json
        assert eventually(lambda: app.get(f"{EXPLAIN}/{answer['id']}", ALICE).status == 200)
        principal = app.get(f"{EXPLAIN}/{answer['id']}", ALICE).json["principal"]
        for query in ("session=one", f"session=one&principal={principal}"):
            refused = delete(app, f"/v1/cache?{query}")
            assert refused.status == 400 and refused.error["param"] == "session"
            assert "CACHE_SESSION_PARTITIONING" in str(refused.error["message"])
            assert "?principal=" in str(refused.error["message"])
        assert app.get(f"{RESPONSES}/{answer['id']}", ALICE).status == 200 and traces(app) == 1
        told = delete(app, f"/v1/cache?principal={principal}").json
        assert told["num_responses"] == told["num_trace_files"] == 1 and told["num_messages"] and told["is_done"]
        assert files_with_the_word(tmp_path) == []
