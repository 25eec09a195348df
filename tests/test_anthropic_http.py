"""/v1/messages and count_tokens on the whole server with a real model: text, thinking, tools, counts, caching."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.anthropic_serving import (
    COUNT_PATH,
    MESSAGES_PATH,
    ask,
    ask_both,
    count,
    events_of,
    messages_body,
    num_prompt_tokens,
    text_of,
)
from tests.laws import sampled_cells
from tests.serving import AppUnderTest, eventually, serving_app, writing

WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. "
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}, "required": ["a"]}
TOOLS = [{"name": name, "description": f"{name}s", "input_schema": PARAMETERS} for name in ("look", "read")]
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "read", "arguments": {"a": 2}}\n</tool_call>'
MARK = {"type": "ephemeral"}
OFF = {"type": "disabled"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A server on a dense model."""
    with serving_app(tmp_path_factory.mktemp("messages")) as app:
        yield app


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_streamed_answer_says_what_a_whole_one_says(app: AppUnderTest) -> None:
    """Of a model that writes at random, with thinking and without."""
    for thinking in (OFF, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        message = ask_both(app, WORDS, thinking=thinking, max_tokens=12)
        assert (message["type"], message["role"], message["model"]) == ("message", "assistant", app.served.name)
        assert message["stop_reason"] in ("end_turn", "max_tokens")
        assert 0 < message["usage"]["output_tokens"] <= 12


def test_who_does_not_ask_for_thinking_gets_none(app: AppUnderTest) -> None:
    """Code from a quick start reads `content[0].text`: the prompt is that of a request that switches thinking off."""
    with writing(app, "Hello.") as fields:
        message = ask_both(app, **fields)
    assert message["content"] == [{"type": "text", "text": "Hello."}]
    assert count(app) == count(app, thinking=OFF) == count(app, output_config={"effort": "high"})
    assert count(app) != count(app, thinking={"type": "adaptive"}) == count(app, enable_thinking=True)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_and_text(app: AppUnderTest, display: str) -> None:
    """Two blocks; with `omitted` the first one's text is only in its signature."""
    with writing(app, "<think>\nI see.\n</think>\n\nHello.") as fields:
        message = ask_both(app, thinking={"type": "adaptive", "display": display}, **fields)
    thinking, text = message["content"]
    assert text == {"type": "text", "text": text["text"]} and text["text"].strip() == "Hello."
    assert thinking["type"] == "thinking" and thinking["signature"]
    assert thinking["thinking"].strip() == ("" if display == "omitted" else "I see.")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_one_tool_call_and_two(app: AppUnderTest) -> None:
    """Text before the call stays text, and each call is a block; with parallel use disabled only the first is made."""
    cases: list[tuple[str, dict[str, Any], list[tuple[str, int]]]] = [
        (CALL, {}, [("look", 1)]),
        (f"{CALL}\n{OTHER_CALL}", {}, [("look", 1), ("read", 2)]),
        (f"{CALL}\n{OTHER_CALL}", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [("look", 1)]),
    ]
    for written, choice, expected in cases:
        with writing(app, f"I look.\n{written}") as fields:
            message = ask_both(app, tools=TOOLS, thinking=OFF, max_tokens=200, **choice, **fields)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert [(call["name"], call["input"]["a"]) for call in calls] == expected
        assert all(call["id"].isalnum() for call in calls)
        assert text_of(message).strip() == "I look." and kinds(message)[0] == "text"
        assert message["stop_reason"] == "tool_use"


@sampled_cells(lambda choice, **_: choice["type"] == "tool")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_call_can_be_demanded(app: AppUnderTest, choice: dict[str, Any]) -> None:
    """A model that writes at random calls a tool because it must."""
    message = ask(app, tools=TOOLS, tool_choice=choice, thinking=OFF, max_tokens=400)
    call = next(block for block in message["content"] if block["type"] == "tool_use")
    assert call["name"] in ("look", "read") and call["name"] == choice.get("name", call["name"])


def test_a_stop_sequence_is_named_and_a_limit_too(app: AppUnderTest) -> None:
    """What ended the answer stands beside it."""
    with writing(app, "one two three four") as fields:
        stopped = ask_both(app, thinking=OFF, stop_sequences=["zero", "three"], **fields)
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
        assert text_of(stopped) == "one two "
        cut = ask_both(app, thinking=OFF, max_tokens=2, **fields)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 2


def test_a_limit_beyond_the_context_is_clamped(app: AppUnderTest) -> None:
    """Agents ask for 128,000 tokens of everybody."""
    with writing(app, "Hello.") as fields:
        assert text_of(ask(app, thinking=OFF, max_tokens=2**31 - 1, **fields)) == "Hello."


def test_a_transcript_of_anthropics_servers_goes_on(app: AppUnderTest) -> None:
    """What they did is in the prompt, and from turn to turn the same, though ids and seals move."""

    def history(seal: str) -> list[dict[str, Any]]:
        found = {"type": "web_search_result", "url": "https://a.org", "title": WORDS * 4, "encrypted_content": seal}
        return [
            {"role": "user", "content": "What is new?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": f"s{seal}", "name": "web_search", "input": {"query": "news"}},
                    {"type": "web_search_tool_result", "tool_use_id": f"s{seal}", "content": [found]},
                    {"type": "text", "text": "Nothing."},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "url", "url": "https://a.org/r.pdf"}}],
            },
        ]

    assert count(app, history("a")) > count(app, WORDS * 4) + 20
    first = ask_both(app, history("a"))
    again = ask(app, [*history("b"), {"role": "assistant", "content": first["content"]}, history("b")[0]])
    assert again["usage"]["cache_read_input_tokens"] >= num_prompt_tokens(first) - 14


# --- counts ----------------------------------------------------------------------------------------------------------


def test_the_counts_of_a_stream(app: AppUnderTest) -> None:
    """What was cached is known at the first event, and the last one says the same of the prompt."""
    ask(app, WORDS * 5)
    events = events_of(app.post(MESSAGES_PATH, messages_body(WORDS * 5, stream=True)))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    begun, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun["cache_read_input_tokens"] > 50 and begun["output_tokens"] == 0 < end["output_tokens"]
    assert end.pop("output_tokens_details") == {"thinking_tokens": 0}
    assert {**begun, "output_tokens": 0} == {**end, "output_tokens": 0}


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": [{"type": "text", "text": WORDS}, {"type": "text", "text": "Be brief."}]},
    "tools": {"tools": TOOLS, "system": "s"},
    "tools that are not offered": {"tools": TOOLS, "tool_choice": {"type": "none"}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "no thinking": {"thinking": OFF},
    "conversation": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "a note in the middle"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True}],
            },
            {"role": "assistant", "content": "Well"},
        ],
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_are_counted_without_the_engine(app: AppUnderTest, name: str) -> None:
    """Equal to the token with the prompt of the same request; the model computes nothing, and no request is queued."""
    fields = REQUESTS[name]
    assert eventually(app.is_idle)
    before = app.num_forward_calls, app.get("/v1/cache").json["num_prompt_tokens"]
    counted = count(app, **fields)
    assert (app.num_forward_calls, app.get("/v1/cache").json["num_prompt_tokens"]) == before
    assert counted == num_prompt_tokens(ask(app, **fields))


def test_what_is_counted_before_each_request_changes_nothing(app: AppUnderTest) -> None:
    """Reuse and text are those of a server that was never asked to count."""
    runs = []
    for counts in (False, True):
        app.clear_cache()
        messages: list[Any] = [{"role": "user", "content": WORDS * 4}]
        reuse = []
        for turn in range(3):
            if counts:
                count(app, messages, thinking=OFF)
            answer = ask(app, messages, thinking=OFF)
            reuse.append((answer["usage"]["cache_read_input_tokens"], text_of(answer)))
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": f"{turn} on"}]
        runs.append(reuse)
    assert runs[0] == runs[1] and runs[0][2][0] > runs[0][1][0] > 50


MARKS: dict[str, tuple[dict[str, Any], range]] = {
    "system": ({"system": [{"type": "text", "text": WORDS, "cache_control": MARK}]}, range(70, 100)),
    "everything": ({"system": WORDS, "cache_control": MARK}, range(3, 12)),
}


@pytest.mark.parametrize("name", MARKS)
def test_created_tokens_are_those_up_to_the_mark(app: AppUnderTest, name: str) -> None:
    """Marked and not cached is created, what stands behind the mark is input; once cached it is read."""
    mark, rest = MARKS[name]
    app.clear_cache()
    first, second = (ask(app, "word " * 30, thinking=OFF, **mark)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0 and first["cache_creation_input_tokens"] > 15
    assert first["input_tokens"] in rest
    assert second["cache_creation_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]


def test_without_a_mark_nothing_is_created(app: AppUnderTest) -> None:
    """What is not read is input."""
    app.clear_cache()
    usages = [ask(app, "word " * 30, thinking=OFF)["usage"] for _ in range(2)]
    assert [usage["cache_creation_input_tokens"] for usage in usages] == [0, 0]
    assert usages[0]["cache_read_input_tokens"] == 0 < usages[1]["cache_read_input_tokens"]


def test_lifetimes_of_requests(app: AppUnderTest) -> None:
    """0 keeps nothing at all; a short one leaves RAM when it is over, and what asked for nothing stays."""
    app.clear_cache()
    for _ in range(2):
        assert ask(app, WORDS * 3, thinking=OFF, ttl=0)["usage"]["cache_read_input_tokens"] == 0
    assert app.get("/v1/cache").json["num_segments"] == 0
    ask(app, "One " + WORDS * 3, thinking=OFF, ttl=100)
    ask(app, "Two " + WORDS * 3, thinking=OFF, cache_control=MARK)
    ask(app, "Three " + WORDS * 3, thinking=OFF)
    assert eventually(lambda: app.is_idle() and app.get("/v1/cache").json["num_entries"] == 3)
    app.served.engine._ask(lambda scheduler: setattr(scheduler.cache._tree, "_clock", lambda: time.monotonic() + 150))
    ask(app, "Four " + WORDS * 3, thinking=OFF)
    assert eventually(lambda: app.is_idle() and app.get("/v1/cache").json["num_entries"] == 3)


def test_the_engine_is_told_how_long_to_keep(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lifetime of the marks; one that the request names itself counts more."""
    asked: list[float | None] = []
    submit = app.served.engine.submit
    monkeypatch.setattr(
        app.served.engine, "submit", lambda request: asked.append(request.ttl_seconds) or submit(request)
    )
    for fields in (
        {},
        {"cache_control": MARK},
        {"cache_control": {**MARK, "ttl": "1h"}},
        {"ttl": "24h", "cache_control": MARK},
    ):
        ask(app, thinking=OFF, max_tokens=1, **fields)
    assert asked == [None, 300, 3_600, 86_400]


# --- one conversation ------------------------------------------------------------------------------------------------


@sampled_cells(lambda family, **_: family == "qwen3_5")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_thinking_that_was_omitted_comes_back(tmp_path: Any, family: str) -> None:
    """Echoed with its signature alone the model reads what it thought, even when everything was forgotten."""
    with serving_app(tmp_path, family=family) as app:
        question = {"role": "user", "content": "Look at it."}
        call = (
            CALL
            if family == "qwen3"
            else "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        )
        opened = "<think>\n" if family == "qwen3" else ""
        end = "<|im_end|>"  # as the template has it: behind another token there is no state to come back to
        with writing(app, f"{opened}{WORDS}\n</think>\n\n{call}{end}", ends=False) as fields:
            ask_for: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"}}
            answer = ask(app, [question], max_tokens=200, **ask_for, **fields)
        assert kinds(answer) == ["thinking", "tool_use"] and answer["content"][0]["thinking"] == ""
        result = {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": "3"}
        echoed = [question, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        warm = ask(app, echoed, **ask_for)["usage"]
        assert warm["cache_read_input_tokens"] >= num_prompt_tokens(answer) + answer["usage"]["output_tokens"] - 2
        app.clear_cache()
        whole = count(app, echoed, **ask_for)
        app.clear_cache()
        echoed[1]["content"] = answer["content"][1:]
        assert whole >= count(app, echoed, **ask_for) + 15


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_the_protocols_share_their_kv(tmp_path: Any, family: str) -> None:
    """Chat, messages and chat again in one conversation: next to nothing is computed at the changes."""
    with serving_app(tmp_path, family=family) as app:
        talk: list[Any] = [{"role": "user", "content": WORDS * 20}]
        system = {"role": "system", "content": WORDS * 5}
        first = app.chat([system, *talk], enable_thinking=False, session_id="one")
        talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And on."}]
        second = ask(app, talk, system=system["content"], thinking=OFF, session_id="one")
        assert second["usage"]["cache_read_input_tokens"] >= 0.97 * num_prompt_tokens(second)
        talk += [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": "And on."}]
        chat = [
            {**message, "content": text_of(message) if isinstance(message["content"], list) else message["content"]}
            for message in talk
        ]
        third = app.chat([system, *chat], enable_thinking=False, session_id="one")
        assert third.usage is not None and third.num_cached_tokens is not None
        assert third.num_cached_tokens >= 0.97 * third.usage["prompt_tokens"]


# --- explanations ----------------------------------------------------------------------------------------------------


def test_an_answers_id_leads_to_its_explanation(app: AppUnderTest) -> None:
    """Under the body's id and under the header's."""
    response = app.post(MESSAGES_PATH, messages_body())
    for name in (response.json["id"], response.headers["x-request-id"]):
        assert app.get(f"/v1/cache/explain/{name}").json["cause"]
    assert app.post(COUNT_PATH, messages_body()).status == 200
