"""Why was it computed again? Thirteen causes, each planted in a conversation with a real server and named over HTTP:
the cause, and the message and the character where the prompts part."""

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agents import CARRIER, TELLING, TOOL, Asked, Conversation, EchoStyle, send
from tests.engine.engines import held
from tests.laws import sampled_cells
from tests.models import tiny_model
from tests.serving import (
    CHAT_PATH,
    AppUnderTest,
    chat_body,
    encode_request,
    eventually,
    serving_app,
    slow_prefill,
    writing,
)

LONG = f"Places are looked at one after the other, the near ones first and the far ones last of all. {TELLING}"
SETTINGS: dict[str, Any] = {
    "prompt_cache_max_entries_global": 1000,
    "prompt_cache_max_entries_per_session": 100,
    "max_kv_size": 32768,
}
KEPT = EchoStyle("kept")


@pytest.fixture(scope="module")
def slow_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """The same with a prefill that takes its time."""
    with serving_app(tmp_path_factory.mktemp("slow"), "qwen3", prefill_step_size=16, **SETTINGS) as app:
        yield app


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A dense model whose template drops old thinking."""
    with serving_app(tmp_path_factory.mktemp("qwen3"), "qwen3", **SETTINGS) as app:
        yield app


def start(
    app: AppUnderTest,
    *,
    family: str = "qwen3",
    style: EchoStyle = KEPT,
    thinking: bool = False,
    session: str | None = "one",
) -> Conversation:
    """A conversation of two turns: the system's words, a question with its answer, and a second one."""
    app.clear_cache()
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": f"Look at the hill. {LONG}"}]
    talk = Conversation(app, family, style, thinking, messages, {"session_id": session})
    talk.ask("A hill is high.", f"It is a hill. {LONG}" if thinking or session is None else "It is a hill.")
    talk.say(f"And the lake? {LONG}")
    return talk


def last(app: AppUnderTest) -> dict[str, Any]:
    """The explanation of the newest request."""
    response = app.get("/v1/cache/explain?last")
    assert response.status == 200, response.body
    return dict(response.json)


def place(asked: Asked) -> tuple[Any, Any, Any]:
    """Message, role and character of the first difference."""
    difference = asked.explanation["first_difference"]
    assert difference is not None, asked.explanation
    assert len(difference["before"]) <= 80 and len(difference["after"]) <= 80
    return difference["message_index"], difference["role"], difference["char"]


@sampled_cells(lambda session: session is None)
@pytest.mark.parametrize("session", ["one", None])
def test_an_edited_message(app: AppUnderTest, session: str | None) -> None:
    """The client changed one word of an old message; without a session its answers show whose history it is."""
    talk = start(app, session=session)
    talk.ask("", f"It is a lake, as far as I can see. {TELLING}")
    talk.say("Thanks.")
    talk.messages[1] = {"role": "user", "content": f"Look at the hall. {LONG}"}
    asked = talk.ask("", "Gladly.")
    assert asked.explanation["cause"] == "message changed"
    assert place(asked) == (1, "user", len("Look at the h"))
    assert "hill" in asked.explanation["first_difference"]["before"]
    assert "hall" in asked.explanation["first_difference"]["after"]
    assert "Append" in asked.explanation["remedy"]
    assert last(app)["request_id"] == asked.explanation["request_id"]
    assert "message changed (message 1, character 13)" in app.line_of(asked.body["id"])


def test_an_edited_system_prompt_without_any_session(app: AppUnderTest) -> None:
    """Not even the first message is known, and the conversation is recognised by what was said in it."""
    talk = start(app, session=None)
    talk.messages[0] = {"role": "system", "content": LONG.replace("nothing", "anything", 1)}
    asked = talk.ask("", "It is a lake.")
    assert asked.explanation["cause"] == "message changed"
    assert place(asked) == (0, "system", LONG.index("nothing"))


def test_thinking_that_the_template_drops(app: AppUnderTest) -> None:
    """Once the user goes on, the template writes the answer without what was thought before it."""
    talk = start(app, thinking=True)
    asked = talk.ask("A lake is deep.", "It is a lake.")
    assert asked.explanation["cause"] == "thinking dropped"
    assert place(asked) == (2, "assistant", len("<|im_start|>assistant\n"))
    assert "think" in asked.explanation["first_difference"]["before"]
    assert "think" not in asked.explanation["first_difference"]["after"]
    assert "PRESERVE_THINKING" in asked.explanation["remedy"]


def test_thinking_that_the_client_drops_costs_nothing(tmp_path: Path) -> None:
    """The model reads its own thinking again, and the rule is named with its policy; switched off, the setting is."""
    stripped = EchoStyle("stripped", None)
    with serving_app(tmp_path / "on", "qwen3_5", **SETTINGS) as app:
        asked = start(app, family="qwen3_5", style=stripped, thinking=True).ask("A lake is deep.", "It is a lake.")
        assert asked.explanation["cause"] == "nothing lost", asked.explanation
        assert asked.explanation["policies"]["thinking"] == "always"
    with serving_app(tmp_path / "off", "qwen3_5", cache_rule_policies=("thinking=off",), **SETTINGS) as app:
        asked = start(app, family="qwen3_5", style=stripped, thinking=True).ask("A lake is deep.", "It is a lake.")
        assert asked.explanation["cause"] == "setting", asked.explanation
        assert asked.explanation["decided_by"] == "CACHE_RULE_POLICIES (thinking=off)"
        assert place(asked)[:2] == (2, "assistant")


def test_a_new_date(app: AppUnderTest) -> None:
    """A clock in the history moved: the rule is named, the model reads the new time."""
    talk = start(app)
    talk.messages[1] = {"role": "user", "content": f"Look. Current time is 10:15. {LONG}"}
    talk.ask("", "I look.")
    talk.say("And now?")
    talk.messages[1] = {"role": "user", "content": f"Look. Current time is 10:16. {LONG}"}
    asked = talk.ask("", "I look again.")
    assert asked.explanation["cause"] == "volatile value"
    assert asked.explanation["rules"] == ["current_time"]
    assert asked.explanation["policies"] == {"current_time": "never"}
    assert place(asked) == (1, "user", len("Look. Current time is 10:1"))


def test_a_changed_tool_schema(app: AppUnderTest) -> None:
    """The tool is named, and the character of its definition."""
    talk = start(app)
    changed = copy.deepcopy(TOOL)
    changed["function"]["parameters"]["properties"]["depth"]["type"] = "string"  # type: ignore[index]
    asked = talk.ask("", "It is a lake.", tools=[changed])
    assert asked.explanation["cause"] == "tools changed"
    difference = asked.explanation["first_difference"]
    assert (difference["message_index"], difference["role"], difference["tool"]) == (None, "tools", "look")
    assert "integer" in difference["before"] and "string" in difference["after"]
    assert difference["char"] == json.dumps({**TOOL["function"], "strict": False}).index("integer")  # type: ignore[dict-item]


def test_reordered_tools_are_harmless(app: AppUnderTest) -> None:
    """Another order of the same tools: everything is reused, and the rule that saw to it is named."""
    other = copy.deepcopy(TOOL)
    other["function"]["name"] = "walk"  # type: ignore[index]
    talk = start(app)
    talk.fields = {"tools": [TOOL, other], "session_id": "one"}
    talk.ask("", "It is a lake.")
    talk.say("And the wood?")
    talk.fields = {"tools": [other, TOOL], "session_id": "one"}
    asked = talk.ask("", "It is a wood.")
    assert asked.explanation["cause"] == "nothing lost"
    assert "tools_order" in asked.explanation["rules"]
    assert asked.num_cached_tokens >= talk.turns[-2].num_tokens - 8


def test_an_evicted_conversation(tmp_path: Path) -> None:
    """Another conversation took its place in a cache that has room for one."""
    with serving_app(tmp_path, "qwen3", disk_cache="off", **SETTINGS) as app:
        start(app)
        num_bytes = app.get("/v1/cache").json["ram_bytes"]
    settings = {**SETTINGS, "prompt_cache_max_bytes": int(1.2 * num_bytes)}
    with serving_app(tmp_path, "qwen3", disk_cache="off", **settings) as app:
        talk = start(app)
        app.chat(f"Something else altogether. {LONG} {LONG}", max_tokens=2, enable_thinking=False)
        assert eventually(lambda: app.get("/v1/cache").json["num_evicted_tokens"] > talk.turns[0].num_tokens / 2)
        asked = talk.ask("", "It is a lake.")
        assert asked.explanation["cause"] == "evicted", asked.explanation
        assert asked.explanation["tier"] == "nothing" or asked.num_cached_tokens < talk.turns[0].num_tokens - 64
        assert asked.explanation["first_difference"] is None, "the client changed nothing"
        assert "PROMPT_CACHE_MAX_BYTES" in asked.explanation["remedy"]


def test_switched_thinking(tmp_path: Path) -> None:
    """This template says at its very beginning how much the model is to think."""
    with serving_app(tmp_path, "gpt_oss", **SETTINGS) as app:
        messages = [{"role": "user", "content": LONG}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "session_id": "one"}
        said = send(app, {**body, "reasoning_effort": "low"}).body["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said or "."}, {"role": "user", "content": "Go on."}]
        asked = send(app, {**body, "reasoning_effort": "high"})
        assert asked.explanation["cause"] == "thinking switched", asked.explanation
        difference = asked.explanation["first_difference"]
        assert (difference["message_index"], difference["role"]) == (None, "template"), "no message differs"
        shown = min(difference["char"], 24)  # characters before the place
        assert difference["before"][shown:].startswith("low") and difference["after"][shown:].startswith("high")


def test_an_answer_that_is_not_replayed(tmp_path: Path) -> None:
    """A template without tokens that begin a message: each answer is computed again, and the request says why."""
    file = tmp_path / "plain.jinja"
    file.write_text(
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with serving_app(tmp_path, "qwen3", chat_template=file, **SETTINGS) as app:
        assert (why := app.served.stitcher.unreplayed) is not None
        messages = [{"role": "user", "content": f"Look at the hill. {LONG}"}]
        with writing(app, "It is a hill.", in_letters=True) as fields:
            answer = app.chat(messages, session_id="one", **fields)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And the lake?"}]
        again = app.chat(messages, session_id="one", max_tokens=2)
        told = last(app)
    assert answer.usage is not None and answer.content == "It is a hill."
    assert again.num_cached_tokens is not None and again.num_cached_tokens <= answer.usage["prompt_tokens"] + 1
    assert (told["cause"], told["decided_by"]) == ("not replayed", why) and why in told["summary"]


def test_a_carrier(app: AppUnderTest) -> None:
    """A message that stood at the end of one request only takes the answer to it along."""
    talk = start(app, style=EchoStyle("carried", carries=True))
    asked = talk.ask("", "It is a lake.")
    assert asked.explanation["cause"] == "volatile value"
    assert asked.explanation["rules"] == ["openclaw_carrier"]
    assert place(asked) == (2, "assistant", 0), "the answer stands where it stood"
    assert asked.explanation["first_difference"]["before"].startswith(CARRIER["content"][0]["text"][:20])  # type: ignore[index]


def test_an_abort(slow_app: AppUnderTest) -> None:
    """The client left in the middle of the prefill: what it had computed is there, the rest is not."""
    app, talk = slow_app, start(slow_app)
    talk.messages[-1] = {"role": "user", "content": f"And the lake? {LONG * 10}"}
    before = app.num_forward_calls
    with slow_prefill():
        with app.connect() as client:
            client.send(encode_request("POST", CHAT_PATH, {**talk.request(), "stream": True}))
            assert eventually(lambda: app.num_forward_calls > before + 3)
        assert eventually(app.is_idle)
    assert eventually(lambda: any("cancelled" in line for line in app.lines()))
    asked = talk.ask("", "It is a lake.")
    assert asked.explanation["cause"] == "aborted", asked.explanation
    assert asked.explanation["first_difference"] is None, "the same is asked again"
    assert asked.num_cached_tokens > talk.turns[0].num_tokens, "what was computed is reused"


def test_a_conversation_from_before_the_start(tmp_path: Path) -> None:
    """A restart with a cache that does not outlive it: the history is nobody's."""
    with serving_app(tmp_path, "qwen3", disk_cache="ephemeral", **SETTINGS) as app:
        talk = start(app)
    with serving_app(tmp_path, "qwen3", disk_cache="ephemeral", **SETTINGS) as app:
        talk.app = app
        asked = talk.ask("", "It is a lake.")
        assert asked.explanation["cause"] == "not seen since the start"
        assert asked.explanation["first_difference"] is None
        assert "restart" in asked.explanation["summary"] and "--ephemeral-cache" in asked.explanation["remedy"]


@pytest.mark.long
def test_a_conversation_that_comes_back_from_disk(tmp_path: Path) -> None:
    """The control: with a cache that outlives the restart nothing is lost, and the disk is named."""
    with serving_app(tmp_path, "qwen3", **SETTINGS) as app:
        talk = start(app)
    with serving_app(tmp_path, "qwen3", **SETTINGS) as app:
        talk.app = app
        asked = talk.ask("", "It is a lake.")
        assert (asked.explanation["cause"], asked.explanation["tier"]) == ("nothing lost", "disk"), asked.explanation


def test_a_cache_that_was_emptied(app: AppUnderTest) -> None:
    """DELETE /v1/cache in the middle of a conversation."""
    talk = start(app)
    app.clear_cache()
    assert talk.ask("", "It is a lake.").explanation["cause"] == "cache cleared"


@pytest.mark.long
def test_another_model(tmp_path: Path) -> None:
    """The conversation goes on with another model, which has never read it; the one that has is named."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path, "qwen3", model_folders=(str(folders),), **SETTINGS) as app:
        talk = start(app)
        first = app.served.name
        asked = send(app, {**talk.request(), "model": "small", "max_tokens": 4})
        assert asked.body["model"] == "small"
        assert asked.explanation["cause"] == "other model", asked.explanation
        assert asked.explanation["decided_by"] == first
        assert asked.explanation["first_difference"] is None, "the client changed nothing"


@pytest.mark.long
def test_another_model_without_a_session(tmp_path: Path) -> None:
    """Clients without a session share their records: who sends back what a model answered was there, who only begins as
    another did is not told what that one asked."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path, "qwen3", model_folders=(str(folders),), **SETTINGS) as app:
        talk = start(app, session=None)
        first = app.served.name
        system, question, answer, *rest = talk.request()["messages"]
        brought = {"role": "assistant", "content": "Some other server once said so, in as many words as these."}
        for said, told in ((brought, ("no session", None)), (answer, ("other model", first))):
            body = {**talk.request(), "model": "small", "max_tokens": 4, "messages": [system, question, said, *rest]}
            explanation = send(app, body).explanation
            assert (explanation["cause"], explanation["decided_by"]) == told, explanation


def test_a_new_conversation(app: AppUnderTest) -> None:
    """Other words under a known system prompt: that is shared, and nothing is said to be lost."""
    talk = start(app)
    messages = [talk.messages[0], {"role": "user", "content": "Something new."}]
    asked = send(app, {**talk.request(), "messages": messages, "max_tokens": 4})
    assert asked.explanation["cause"] == "new conversation"
    assert asked.explanation["first_difference"] is None and asked.explanation["remedy"] is None
    assert asked.num_cached_tokens > 100
    assert "why:" not in app.line_of(asked.body["id"])


def test_a_request_that_wants_no_records(app: AppUnderTest) -> None:
    """`cache_mode: prefix` is named as what it is."""
    talk = start(app, thinking=True)
    asked = talk.ask("A lake is deep.", "It is a lake.", cache_mode="prefix")
    assert (asked.explanation["cause"], asked.explanation["decided_by"]) == ("setting", "cache_mode")


def test_a_raw_prompt_is_explained_too(app: AppUnderTest) -> None:
    """It has no messages: what it was reused from is told, the same question twice (`test_planted_raw_causes.py`)."""
    body = {"prompt": LONG, "max_tokens": 2, "temperature": 0, "session_id": "raw"}
    app.post("/v1/completions", body)
    answer = app.post("/v1/completions", body).json
    told = app.get(f"/v1/cache/explain/{answer['id']}").json
    assert (told["cause"], told["tier"]) == ("nothing lost", "ram")
    assert told["cached_tokens"] == told["num_prompt_tokens"] - 1


def test_a_row_that_another_one_computes_for_it(slow_app: AppUnderTest) -> None:
    """Two questions at once on one new system prompt: one of them starts from what the other is just computing."""
    app = slow_app
    app.clear_cache()
    system = {"role": "system", "content": "Live rows share what they compute. " * 60}
    with ThreadPoolExecutor(2) as pool:
        with held(app.served.engine):
            asks = [
                pool.submit(
                    app.post, CHAT_PATH, {"messages": [system, {"role": "user", "content": word}], "max_tokens": 2}
                )
                for word in ("One.", "Two.")
            ]
            assert eventually(lambda: app.app.health()[1]["num_waiting"] == 2)
        answers = [ask.result().json for ask in asks]
    tiers = {app.get(f"/v1/cache/explain/{answer['id']}").json["tier"] for answer in answers}
    assert tiers == {"nothing", "live row"}


def test_what_is_not_known_is_a_404(tmp_path: Path) -> None:
    """No request is over yet; an unknown id; only as many are kept as the setting says."""
    with serving_app(tmp_path, explanations_kept=1) as app:
        assert app.get("/v1/cache/explain").status == 404
        first = app.post(CHAT_PATH, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).json["id"]
        assert app.get(f"/v1/cache/explain/{first}").status == 200
        app.chat("b", max_tokens=1)
        assert app.get(f"/v1/cache/explain/{first}").status == 404


def test_the_id_that_the_terminal_shows_can_be_looked_up(tmp_path: Path) -> None:
    """Its twelve characters, alone or behind a protocol's prefix; what several requests of the same key begin with is
    a 409 that names them, and another key's requests are neither found nor counted."""
    with serving_app(tmp_path) as app:
        answers = [app.post(CHAT_PATH, chat_body("a", max_tokens=1)).json["id"]]
        shown = app.line_of(answers[0]).split()[1]
        assert len(shown) == 12
        for name in (shown, f"chatcmpl-{shown}", f"msg_{shown}", f"resp_{shown}"):
            assert f"chatcmpl-{app.get(f'/v1/cache/explain/{name}').json['request_id']}" == answers[0]
        theirs = {"Authorization": "Bearer theirs"}
        assert app.post(CHAT_PATH, chat_body("b", max_tokens=1), theirs).status == 200
        assert app.get("/v1/cache/explain/req").status == 200, "theirs does not count"
        assert app.get(f"/v1/cache/explain/{shown}", theirs).status == 404
        answers.append(app.post(CHAT_PATH, chat_body("c", max_tokens=1)).json["id"])
        several = app.get("/v1/cache/explain/req")
        assert several.status == 409 and several.error["param"] == "request_id"
        assert all(answer.removeprefix("chatcmpl-") in several.error["message"] for answer in answers)
