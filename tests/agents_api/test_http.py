"""Agents over HTTP on a real model: histories, limits, order, failures, restarts."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model
from tests.serving import (
    CHAT_PATH,
    AppUnderTest,
    Chat,
    Response,
    chunks_of,
    encode_request,
    eventually,
    is_error_form,
    joined,
    no_tokens,
    serving_app,
    whole,
)
from tests.test_http_bad_input import BROKEN_BODIES, CHAT_MISTYPED

AGENTS = "/v1/agents"
SYSTEM = "You are a careful assistant who answers in a few words."
GREEDY = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 12}
ISO_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("agents"), max_kv_size=4096) as app:
        yield app


def create(app: AppUnderTest, agent_id: str, **fields: Any) -> dict[str, Any]:
    response = app.post(AGENTS, {"agent_id": agent_id, **fields})
    assert response.status == 201, response.body
    return dict(response.json)


def say(app: AppUnderTest, agent_id: str, said: object, **fields: Any) -> Response:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return app.post(f"{AGENTS}/{agent_id}/generate", {"messages": messages, **GREEDY, **fields})


def told(app: AppUnderTest, agent_id: str, said: object, **fields: Any) -> dict[str, Any]:
    """The body of an answer."""
    response = say(app, agent_id, said, **fields)
    assert response.status == 200, response.body
    return dict(response.json)


def get(app: AppUnderTest, agent_id: str) -> dict[str, Any]:
    response = app.get(f"{AGENTS}/{agent_id}")
    assert response.status == 200, response.body
    return dict(response.json)


def delete(app: AppUnderTest, agent_id: str) -> Response:
    with app.connect() as client:
        return client.request("DELETE", f"{AGENTS}/{agent_id}", None, {"Connection": "close"})


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_agent_is_created_listed_and_deleted(app: AppUnderTest) -> None:
    """Its fields come back, times in ISO 8601 UTC; deleted, it is unknown and its id is free."""
    made = create(app, "first", system_prompt=SYSTEM, max_context=2048)
    assert {name: made[name] for name in ("agent_id", "model", "status", "context_tokens")} == {
        "agent_id": "first",
        "model": app.served.name,
        "status": "cold",
        "context_tokens": 0,
    }
    assert (made["system_prompt"], made["max_context"], made["persist"]) == (SYSTEM, 2048, True)
    assert ISO_UTC.fullmatch(made["last_accessed"]) and ISO_UTC.fullmatch(made["created_at"])
    listed: Any = app.get(AGENTS).json
    assert set(listed) == {"agents"}
    [entry] = [entry for entry in listed["agents"] if entry["agent_id"] == "first"]
    assert set(entry) == {"agent_id", "model", "status", "context_tokens", "last_accessed"}
    assert get(app, "first")["messages"] == [{"role": "system", "content": SYSTEM}]
    assert app.health()["num_agents"] >= 1
    deleted = delete(app, "first")
    assert deleted.status == 200 and deleted.json["deleted"] is True
    assert app.get(f"{AGENTS}/first").status == delete(app, "first").status == 404
    assert get(app, create(app, "first")["agent_id"])["messages"] == []


def test_an_id_is_made_where_none_is_given(app: AppUnderTest) -> None:
    """Two agents without ids are two agents."""
    ids = [str(app.post(AGENTS, {}).json["agent_id"]) for _ in range(2)]
    assert len(set(ids)) == 2 and all(get(app, agent_id)["num_turns"] == 0 for agent_id in ids)


def test_the_status_says_where_the_kv_is(app: AppUnderTest) -> None:
    """Nothing computed: cold; in RAM: hot; forgotten: cold again."""
    create(app, "status", system_prompt=SYSTEM)
    assert get(app, "status")["status"] == "cold"
    answer = told(app, "status", "Hello there.")
    assert eventually(lambda: get(app, "status")["status"] == "hot")
    assert get(app, "status")["context_tokens"] == answer["agent"]["context_tokens"] > 20
    app.clear_cache()
    assert get(app, "status")["status"] == "cold"


# --- turns ------------------------------------------------------------------------------------------------------------


def test_only_new_messages_are_sent_and_all_are_read(app: AppUnderTest) -> None:
    """Three turns: prompt and answer are those of a chat with the whole history, and nothing is computed twice."""
    create(app, "talk", system_prompt=SYSTEM)
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    before = 0
    for number, said in enumerate(("What is a cache?", "And what is a token?", "Thank you, tell me more.")):
        body = told(app, "talk", said)
        history.append({"role": "user", "content": said})
        as_chat = app.post(CHAT_PATH, {"messages": history, **GREEDY, "session_id": "agent:talk"}).json
        assert whole(body) == whole(as_chat)
        assert body["object"] == "chat.completion" and body["model"] == app.served.name
        assert (body["agent"]["num_turns"], body["agent"]["stored"]) == (number + 1, True)
        if number:
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > before - 10, "all of the turn before, but what the template writes anew"
        before = body["usage"]["total_tokens"]
        history.append(body["choices"][0]["message"])
    stored = get(app, "talk")
    assert stored["num_turns"] == 3 and stored["context_tokens"] == before
    assert [message["role"] for message in stored["messages"]] == ["system", *["user", "assistant"] * 3]
    for kept, sent in zip(stored["messages"], history, strict=True):
        assert (kept["content"] or "") == (sent["content"] or "")
        assert kept.get("reasoning_content") == sent.get("reasoning_content")


def test_a_streamed_turn_says_the_same(app: AppUnderTest) -> None:
    """The chunks are those of chat/completions; the one with the finish reason tells of the agent."""
    answers: list[Chat] = []
    for agent_id, stream in (("plain", False), ("streamed", True)):
        create(app, agent_id, system_prompt=SYSTEM)
        told(app, agent_id, "First.")
        response = say(app, agent_id, "Second.", stream=stream, stream_options={"include_usage": True})
        if not stream:
            answers.append(whole(response.json))
            note = dict(response.json["agent"])  # type: ignore[call-overload]
            continue
        chunks = chunks_of(response)
        answers.append(joined(chunks))
        [finish] = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        assert finish["agent"] == {**note, "agent_id": "streamed"}
        assert sum("agent" in chunk for chunk in chunks) == 1
    assert answers[0] == answers[1]


def test_a_tool_loop_goes_through_the_history(app: AppUnderTest) -> None:
    """Calls and results keep their places and ids."""
    create(app, "tools")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}]
    told(app, "tools", [*asked, {"role": "tool", "tool_call_id": "c1", "content": "a cat"}])
    told(app, "tools", [{"role": "tool", "tool_call_id": "c1", "content": "again a cat"}])
    messages = get(app, "tools")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [call]
    assert [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"] == [
        ("c1", "a cat"),
        ("c1", "again a cat"),
    ]


def test_a_system_message_that_opens_the_conversation_is_the_system_prompt(app: AppUnderTest) -> None:
    """It stays in front; a second one at the front is an error as long as nothing was said, later one is a message."""
    create(app, "opened")
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}]
    told(app, "opened", opening)
    assert get(app, "opened")["system_prompt"] == SYSTEM and get(app, "opened")["num_turns"] == 1
    told(app, "opened", [{"role": "system", "content": "Be brief now."}, {"role": "user", "content": "Go on."}])
    roles = [message["role"] for message in get(app, "opened")["messages"]]
    assert roles == ["system", "user", "assistant", "system", "user", "assistant"]


# --- max_context ------------------------------------------------------------------------------------------------------


def test_beyond_max_context_the_oldest_turns_leave_the_rendering_only(app: AppUnderTest) -> None:
    """Prompt and answer stay within it, the system prompt stays in front, storage keeps all, and the answer says so."""
    create(app, "long", system_prompt=SYSTEM, max_context=300)
    dropped = []
    for number in range(10):
        said = f"Question number {number} with a few more words so that it has some length."
        body = told(app, "long", said)
        assert body["usage"]["total_tokens"] <= 300
        note = body["agent"]
        assert (note["num_turns"], note["stored"]) == (number + 1, True)
        dropped.append(note["num_dropped_turns"])
        shown = get(app, "long")["messages"]
        kept = [shown[0], *shown[1 + 2 * note["num_dropped_turns"] : -1]]
        as_chat = {"messages": kept, **GREEDY, "max_tokens": 1, "session_id": "agent:long"}
        assert app.post(CHAT_PATH, as_chat).json["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]  # type: ignore[index]
    assert dropped[0] == 0 and dropped == sorted(dropped) and 0 < dropped[-1] < 9
    assert len(set(dropped)) < 6, "turns leave several at a time"
    stored = get(app, "long")
    assert len(stored["messages"]) == 1 + 2 * 10 and stored["num_dropped_turns"] == dropped[-1]


def test_a_turn_that_does_not_fit_alone_is_refused(app: AppUnderTest) -> None:
    """A 400 with both numbers, streamed or not, and nothing is kept of it."""
    create(app, "small", system_prompt=SYSTEM, max_context=200)
    told(app, "small", "A short one.")
    before = get(app, "small")
    for stream in (False, True):
        refused = say(app, "small", "word " * 600, stream=stream)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert "200" in str(refused.error["message"])
    assert get(app, "small") == before
    told(app, "small", "Another short one.")


def test_without_max_context_it_is_the_models(tmp_path: Path) -> None:
    """An agent never talks itself into a corner: at the model's own limit the oldest turns leave too."""
    with serving_app(tmp_path, max_kv_size=300) as app:
        create(app, "endless")
        for number in range(4):
            note = told(app, "endless", f"{number} " + "word " * 60, max_tokens=2)["agent"]
    assert note["num_dropped_turns"] > 0 and note["num_turns"] == 4


# --- order and failures -----------------------------------------------------------------------------------------------


def test_two_turns_at_once_come_one_after_the_other(app: AppUnderTest) -> None:
    """Each sees all that was finished before it; the history has both whole."""
    create(app, "both")
    with ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(lambda number: told(app, "both", f"Say {number}."), range(4)))
    assert sorted(body["agent"]["num_turns"] for body in bodies) == [1, 2, 3, 4]
    messages = get(app, "both")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 4
    by_turn = {body["agent"]["num_turns"]: body for body in bodies}
    for turn in range(1, 5):
        answer = by_turn[turn]["choices"][0]["message"]
        assert messages[2 * turn - 1].get("reasoning_content") == answer.get("reasoning_content")
    prompts = [by_turn[turn]["usage"]["prompt_tokens"] for turn in range(1, 5)]
    assert prompts == sorted(prompts) and len(set(prompts)) == 4


def test_a_turn_that_waits_for_another_one_has_its_headers(app: AppUnderTest) -> None:
    """A stream opens at once, and a client that leaves meanwhile takes nothing with it."""
    create(app, "queue")
    path = f"{AGENTS}/queue/generate"

    def body(said: str, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": said}], **GREEDY, "stream": True, **fields}

    with app.connect() as first, app.connect() as second, app.connect() as third:
        with no_tokens():
            first.send(encode_request("POST", path, body("First.", max_tokens=100)))
            assert eventually(lambda: app.health()["num_decoding"] == 1)
            second.send(encode_request("POST", path, body("Second.")))
            assert second.read_head()[0] == 200 and b'"role":"assistant"' in second.read_chunk()
            assert eventually(lambda: app.app.health()[1]["num_open_connections"] == 3)
            second.close()
            assert eventually(lambda: app.app.health()[1]["num_open_connections"] == 2), "its leave was noticed"
            third.send(encode_request("POST", path, body("Third.")))
        assert joined(chunks_of(first.read_response())).finish_reason == "length"
        assert joined(chunks_of(third.read_response())).finish_reason == "length"
    said = [message["content"] for message in get(app, "queue")["messages"] if message["role"] == "user"]
    assert said == ["First.", "Third."]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_changes_no_history(app: AppUnderTest, stream: bool) -> None:
    """Whatever the model had written by then; the next turn is served at once."""
    agent_id = f"left-{stream}"
    create(app, agent_id)
    told(app, agent_id, "First.")
    before = get(app, agent_id)
    with app.connect() as client:
        fields = {**GREEDY, "max_tokens": 3_000, "stream": stream}
        body = {"messages": [{"role": "user", "content": "Second."}], **fields}
        client.send(encode_request("POST", f"{AGENTS}/{agent_id}/generate", body))
        assert eventually(lambda: app.health()["num_decoding"] == 1)
    assert eventually(app.is_idle)
    after = get(app, agent_id)
    assert (after["messages"], after["num_turns"]) == (before["messages"], 1)
    assert told(app, agent_id, "Third.")["agent"]["num_turns"] == 2


def test_what_the_watchdog_cuts_is_not_kept(tmp_path: Path) -> None:
    """The answer ends with `length` and says that the history is as it was."""
    with serving_app(tmp_path, generation_watchdog_seconds=0.4) as app:
        create(app, "cut")
        body = told(app, "cut", "Go on for ever.", max_tokens=50_000)
        assert body["choices"][0]["finish_reason"] == "length"
        assert (body["agent"]["stored"], body["agent"]["num_turns"]) == (False, 0)
        assert get(app, "cut")["messages"] == []


def test_the_servers_end_leaves_no_half_turn(tmp_path: Path) -> None:
    """A stream that the stop cuts short ends well-formed, and the history has no part of it."""
    with serving_app(tmp_path) as app:
        create(app, "stopped")
        told(app, "stopped", "First.")
        with app.connect() as client:
            body = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "max_tokens": 50_000, "stream": True}
            client.send(encode_request("POST", f"{AGENTS}/stopped/generate", body))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            app.app.stop()
            events = client.read_response().events
            assert events[-1] == "[DONE]" and "not_ready" in events[-2]
    with serving_app(tmp_path) as again:
        assert get(again, "stopped")["num_turns"] == 1


def test_an_agent_that_is_deleted_while_it_answers(app: AppUnderTest) -> None:
    """The client is told, and an agent that has taken the id meanwhile gets nothing of it."""
    create(app, "gone")
    with app.connect() as client:
        body = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "max_tokens": 100}
        with no_tokens():
            client.send(encode_request("POST", f"{AGENTS}/gone/generate", body))
            assert eventually(lambda: app.health()["num_decoding"] == 1)
            assert delete(app, "gone").status == 200
            create(app, "gone")
        assert client.read_response().status == 404
    assert get(app, "gone")["num_turns"] == 0


def test_a_file_that_cannot_be_written_fails_the_turn_and_nothing_else(
    app: AppUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 that names the file; the history is as it was, and the next turn is kept."""
    create(app, "full")
    told(app, "full", "First.")
    store = app.app._agent_store

    def refuse(*_: object) -> None:
        raise store._persistent._failure(OSError("disk full"))

    with monkeypatch.context() as patch:
        patch.setattr(store._persistent, "append", refuse)
        failed = say(app, "full", "Second.")
    assert (failed.status, failed.error["code"]) == (500, "storage_failure")
    assert told(app, "full", "Third.")["agent"]["num_turns"] == 2


# --- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_agents", [5, pytest.param(20, marks=pytest.mark.long)])
def test_many_agents_keep_their_own_histories(app: AppUnderTest, num_agents: int) -> None:
    """Three turns each, all at once: every prompt has its own agent's words and nobody else's."""
    names = [f"many-{num_agents}-{number}" for number in range(num_agents)]

    def live(name: str) -> None:
        create(app, name, system_prompt=f"You are {name}.")
        for number in range(3):
            assert told(app, name, f"{name} says {number}.", max_tokens=4)["agent"]["num_turns"] == number + 1

    with ThreadPoolExecutor(num_agents) as pool:
        list(pool.map(live, names))
    for name in names:
        texts = [message["content"] for message in get(app, name)["messages"] if message["role"] != "assistant"]
        assert texts == [f"You are {name}.", *(f"{name} says {number}." for number in range(3))]


def test_a_switch_of_the_model_keeps_the_history(tmp_path: Path) -> None:
    """An agent has a model of its own; a turn that names another one goes on there with all that was said."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "other").symlink_to(tiny_model("gemma3"))
    with serving_app(tmp_path, model_folders=(str(folder),)) as app:
        assert create(app, "own", model="other")["model"] == "other"
        create(app, "moving")
        first = told(app, "moving", "First.")
        assert told(app, "own", "Hello.")["model"] == "other"
        second = told(app, "moving", "Second.", model="other")
        assert (first["model"], second["model"]) == (app.app.resolve_model(None).name, "other")
        assert get(app, "moving")["model"] == "other" and get(app, "moving")["num_turns"] == 2
        assert told(app, "moving", "Third.")["model"] == "other"
        assert app.health()["num_swaps"] == 1


def test_agents_survive_a_restart(tmp_path: Path) -> None:
    """With their history and their next turn as if nothing had been; those that do not persist are gone."""
    with serving_app(tmp_path) as app:
        create(app, "kept", system_prompt=SYSTEM)
        create(app, "passing", persist=False)
        told(app, "passing", "First.")
        told(app, "kept", "First.")
        before = get(app, "kept")
    with serving_app(tmp_path) as app:
        after = get(app, "kept")
        assert {**after, "status": None} == {**before, "status": None}
        assert app.get(f"{AGENTS}/passing").status == 404
        assert told(app, "kept", "Second.")["agent"]["num_turns"] == 2


# --- wrong calls ------------------------------------------------------------------------------------------------------

CREATE_MISTYPED: dict[str, list[Any]] = {
    "agent_id": [5, True, [], {}, "", " ", "a/b", "../x", "a b", "é", "x" * 129, "-x"],
    "model": [5, True, [], {}],
    "system_prompt": [5, True, {}, [5], [{"type": "smell"}], [{"type": "image_url", "image_url": "data:x"}]],
    "system": [5, True, {}, [5]],
    "max_context": [0, -1, 15, 1.5, "10", True, [], {}, 10**30],
    "persist": ["yes", 1, [], {}],
}


def test_a_wrong_field_of_a_new_agent_is_named(app: AppUnderTest) -> None:
    """A 400 in OpenAI's form; no agent is made."""
    before = app.get(AGENTS).json
    for field, values in CREATE_MISTYPED.items():
        for value in values:
            refused = app.post(AGENTS, {"agent_id": "wrong", field: value})
            assert refused.status == 400 and is_error_form(refused), (field, value)
            assert str(refused.error["param"]).startswith(field), (field, value, refused.error)
    both = app.post(AGENTS, {"agent_id": "wrong", "system_prompt": "a", "system": "b"})
    assert (both.status, both.error["param"]) == (400, "system")
    assert app.get(AGENTS).json == before


def test_wrong_calls_have_their_errors(app: AppUnderTest) -> None:
    """Unknown id, taken id, nothing to answer, both system forms, an answer that the client wrote, absent models."""
    create(app, "taken", system_prompt=SYSTEM)
    told(app, "taken", "First.")
    create(app, "fresh", system_prompt=SYSTEM)
    user = {"role": "user", "content": "x"}
    system = {"role": "system", "content": "y"}
    generate = [
        ("nobody", {"messages": [user]}, 404, "agent_id"),
        ("taken", {"messages": []}, 400, "messages"),
        ("taken", {}, 400, "messages"),
        ("fresh", {"messages": [system, user]}, 400, "messages[0]"),
        ("taken", {"messages": [user], "system_prompt": "z"}, 400, "system_prompt"),
        ("taken", {"messages": [user], "system": "z"}, 400, "system"),
        ("taken", {"messages": [user, {"role": "assistant", "content": "I"}]}, 400, "messages[1]"),
        ("taken", {"messages": [user], "model": "gemma-3"}, 404, "model"),
        ("taken", {"messages": [user], "max_tokens": 0}, 400, "max_tokens"),
    ]
    before, num_calls = get(app, "taken"), app.num_forward_calls
    for agent_id, body, status, param in generate:
        for stream in (False, True):
            refused = app.post(f"{AGENTS}/{agent_id}/generate", {**body, "stream": stream})
            assert refused.status == status and is_error_form(refused), (body, refused.body)
            assert refused.error["param"] == param, (body, refused.error)
    taken = app.post(AGENTS, {"agent_id": "taken"})
    assert (taken.status, taken.error["param"]) == (409, "agent_id") and is_error_form(taken)
    absent = app.post(AGENTS, {"agent_id": "absent", "model": "qwen2.5"})
    assert absent.status == 404 and "hf download" in str(absent.error["message"])
    assert app.get(f"{AGENTS}/absent").status == app.get(f"{AGENTS}/nobody").status == 404
    opening = create(app, "no-words")
    alone = app.post(f"{AGENTS}/{opening['agent_id']}/generate", {"messages": [system]})
    assert (alone.status, alone.error["param"]) == (400, "messages")
    assert get(app, "taken") == before and app.num_forward_calls == num_calls


@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_a_body_that_is_no_json_object_is_a_400(app: AppUnderTest, body: bytes) -> None:
    """On both endpoints that take one; nothing computes."""
    if app.get(f"{AGENTS}/bodies").status == 404:
        create(app, "bodies")
    before = app.num_forward_calls
    for path in (AGENTS, f"{AGENTS}/bodies/generate"):
        response = app.post(path, body)
        assert response.status == 400 and is_error_form(response), response.body
    assert app.num_forward_calls == before and get(app, "bodies")["num_turns"] == 0


def test_a_wrong_field_of_a_turn_is_named(app: AppUnderTest) -> None:
    """As in chat/completions, and the history is as it was."""
    create(app, "fields")
    before = app.num_forward_calls
    with app.connect() as client:
        for field, values in CHAT_MISTYPED.items():
            for value in values:
                name = field.partition("[")[0]
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: value}
                response = client.request("POST", f"{AGENTS}/fields/generate", body)
                assert response.status == 400 and is_error_form(response), (field, value)
    assert app.num_forward_calls == before and get(app, "fields")["num_turns"] == 0


def test_paths_and_methods_of_agents(app: AppUnderTest) -> None:
    """What is no endpoint is a 404, what is no method a 405 with those that are."""
    create(app, "paths")
    with app.connect() as client:
        for method, path, status, allowed in (
            ("GET", f"{AGENTS}/paths/generate", 405, "OPTIONS, POST"),
            ("PUT", f"{AGENTS}/paths", 405, "DELETE, GET, HEAD, OPTIONS"),
            ("DELETE", AGENTS, 405, "GET, HEAD, OPTIONS, POST"),
            ("GET", f"{AGENTS}/", 404, None),
            ("GET", f"{AGENTS}/a/b", 404, None),
            ("GET", f"{AGENTS}/paths%2Fgenerate%00", 404, None),
        ):
            response = client.request(method, path)
            assert response.status == status, (method, path, response.body)
            assert allowed is None or response.headers["allow"] == allowed


def test_agents_are_for_the_owners_eyes(tmp_path: Path) -> None:
    """The history is private text: its file is nobody else's to read."""
    with serving_app(tmp_path) as app:
        create(app, "private")
        files = list((tmp_path / "state").glob("agents.sqlite3*"))
        assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)
        assert not threading.current_thread().daemon and json.dumps(get(app, "private"))
