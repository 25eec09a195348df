"""Tools that come in the middle of a conversation, on the whole server: their KV, their calls, what is told of them.

And tools that nobody runs here."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.protocols.anthropic_answers import whole_message
from tests.anthropic_serving import (
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
from tests.serving import AppUnderTest, serving_app, writing

OFF = {"type": "disabled"}
WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. " * 4
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}, "required": ["a"]}


def tool(name: str, description: str = "does it", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": description, "input_schema": PARAMETERS, **fields}


SEARCH = tool("ToolSearch")
PLACEHOLDER = tool("DeferredToolPlaceholder", "Nobody reads this.", defer_loading=True)
CREATE, OTHER = tool("TaskCreate", "makes a task", defer_loading=True), tool("Other", defer_loading=True)
BEFORE, BEHIND = [SEARCH, PLACEHOLDER], [CREATE, SEARCH, OTHER, PLACEHOLDER]
SEARCHED = '<tool_call>\n{"name": "ToolSearch", "arguments": {"a": 1}}\n</tool_call>'
CALL = {
    "qwen3": '<tool_call>\n{"name": "TaskCreate", "arguments": {"a": 2}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=TaskCreate>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
}
REMOVAL = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "TaskCreate"}}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def app(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A dense model and a hybrid."""
    with serving_app(tmp_path_factory.mktemp(family), family, max_kv_size=16384) as app:
        yield app


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def searched(app: AppUnderTest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation in which the model has called for a search, and that answer."""
    app.clear_cache()
    messages = [user({"type": "text", "text": WORDS})]
    with writing(app, SEARCHED) as fields:
        answer = ask(app, messages, tools=BEFORE, thinking=OFF, session_id="s", max_tokens=200, **fields)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    return [*messages, {"role": "assistant", "content": answer["content"]}], answer


def found(messages: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The same with what the client found."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    call_id = messages[-1]["content"][0]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": references}
    return [*messages, user(result, {"type": "text", "text": "Tool loaded."})]


def last(app: AppUnderTest) -> dict[str, Any]:
    """The explanation of the newest request."""
    return dict(app.get("/v1/cache/explain?last").json)


# --- deferred tools --------------------------------------------------------------------------------------------------


@sampled_cells(lambda family, **_: family == "qwen3_5")
def test_tools_that_were_found_cost_the_conversation_nothing(app: AppUnderTest) -> None:
    """All that was read and written before is reused, in this turn and in the next one; the count is the prompt's."""
    messages, first = searched(app)
    messages = found(messages, "TaskCreate")
    second = ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
    known = num_prompt_tokens(first) + first["usage"]["output_tokens"]
    assert second["usage"]["cache_read_input_tokens"] >= known - 1
    assert last(app)["cause"] == "nothing lost"
    assert count(app, messages, tools=BEHIND, thinking=OFF, session_id="s") == num_prompt_tokens(second)
    messages = [*messages, {"role": "assistant", "content": second["content"]}, user({"type": "text", "text": "On."})]
    third = ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
    assert third["usage"]["cache_read_input_tokens"] >= num_prompt_tokens(second)
    assert last(app)["cause"] == "nothing lost"


def test_a_tool_that_was_found_is_read_once_and_the_others_are_not(app: AppUnderTest) -> None:
    """The placeholder and the tools that nobody referred to are in no prompt."""
    messages, _ = searched(app)
    sizes = [count(app, found(messages, *names), tools=BEHIND) for names in ((), ("TaskCreate",), ("TaskCreate",) * 2)]
    assert sizes[1] - sizes[0] > 20 and sizes[2] - sizes[1] > 20
    assert count(app, messages, tools=BEHIND) == count(app, messages, tools=[SEARCH])


@sampled_cells(lambda family, **_: family == "qwen3")
def test_the_model_can_call_what_was_found(app: AppUnderTest, family: str) -> None:
    """What it writes comes back as a call, streamed and not, and its history keeps its KV."""
    messages, _ = searched(app)
    messages = found(messages, "TaskCreate")
    with writing(app, f"I do.\n{CALL[family]}") as fields:
        message = ask_both(app, messages, tools=BEHIND, thinking=OFF, session_id="s", max_tokens=200, **fields)
    call = message["content"][-1]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "TaskCreate", {"a": 2})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "made"}
    messages = [*messages, {"role": "assistant", "content": message["content"]}, user(result)]
    ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
    assert last(app)["cause"] == "nothing lost"


@sampled_cells(lambda family, choice: family == "qwen3" and choice["type"] == "tool")
@pytest.mark.parametrize("choice", [{"type": "tool", "name": "TaskCreate"}, {"type": "any"}])
def test_what_was_found_can_be_demanded(app: AppUnderTest, choice: dict[str, Any]) -> None:
    """A model that writes at random calls it because it must; before it was found, or once it is gone, it cannot."""
    messages, _ = searched(app)
    before = app.post(
        MESSAGES_PATH, messages_body(messages[:1], tools=BEHIND, tool_choice=choice, thinking=OFF, session_id="s")
    )
    assert before.status == (400 if "name" in choice else 200)
    messages = found(messages, "TaskCreate")
    message = ask(app, messages, tools=[CREATE], tool_choice=choice, thinking=OFF, session_id="s", max_tokens=400)
    assert {block["name"] for block in message["content"] if block["type"] == "tool_use"} == {"TaskCreate"}
    gone = [*messages, {"role": "system", "content": [REMOVAL]}]
    response = app.post(
        MESSAGES_PATH, messages_body(gone, tools=[CREATE], tool_choice=choice, thinking=OFF, session_id="s")
    )
    assert response.status == 400 and "tool_choice" in response.error["message"]


@sampled_cells(lambda family, **_: family == "qwen3_5")
def test_an_edited_definition_costs_what_stands_behind_its_reference(app: AppUnderTest) -> None:
    """And the explanation names the tool and the message."""
    messages, first = searched(app)
    messages = found(messages, "TaskCreate")
    second = ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
    messages = [*messages, {"role": "assistant", "content": second["content"]}, user({"type": "text", "text": WORDS})]
    edited = copy.deepcopy(BEHIND)
    edited[0]["description"] = "makes another task"
    third = ask(app, messages, tools=edited, thinking=OFF, session_id="s")
    reused = third["usage"]["cache_read_input_tokens"]
    assert num_prompt_tokens(first) - 1 <= reused < num_prompt_tokens(second)
    explanation = last(app)
    assert explanation["cause"] == "tools changed"
    difference = explanation["first_difference"]
    assert (difference["tool"], difference["message_index"], difference["role"]) == ("TaskCreate", 2, "tool")


@sampled_cells(lambda family, **_: family == "qwen3_5")
def test_tools_that_a_message_adds_and_removes(app: AppUnderTest, family: str) -> None:
    """Neither costs what was read before; an added tool can be called, a definition within the message is one too."""
    app.clear_cache()
    sent = [user({"type": "text", "text": WORDS})]
    first = ask(app, sent, tools=BEFORE, thinking=OFF, session_id="s")
    definition = {
        "type": "tool_definition",
        "definition": {key: CREATE[key] for key in CREATE if key != "defer_loading"},
    }
    sent += [
        {"role": "assistant", "content": first["content"]},
        user({"type": "text", "text": "Go on."}),
        {"role": "system", "content": [{"type": "tool_addition", "tool": definition}]},
    ]
    with writing(app, CALL[family]) as fields:
        second = ask(app, sent, tools=BEFORE, thinking=OFF, session_id="s", max_tokens=200, **fields)
    assert second["content"][-1]["name"] == "TaskCreate" and last(app)["cause"] == "nothing lost"
    result = {"type": "tool_result", "tool_use_id": second["content"][-1]["id"], "content": "made"}
    sent += [
        {"role": "assistant", "content": second["content"]},
        user(result),
        {"role": "system", "content": [REMOVAL]},
    ]
    third = ask(app, sent, tools=BEFORE, thinking=OFF, session_id="s")
    assert third["usage"]["cache_read_input_tokens"] >= num_prompt_tokens(second)
    assert last(app)["cause"] == "nothing lost"


def test_a_restart_knows_the_tools_that_came_later(tmp_path: Path) -> None:
    """The records bring the conversation back, the definition in it too."""
    with serving_app(tmp_path, "qwen3", max_kv_size=16384) as app:
        messages, _ = searched(app)
        messages = found(messages, "TaskCreate")
        second = ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
    with serving_app(tmp_path, "qwen3", max_kv_size=16384) as app:
        messages = [
            *messages,
            {"role": "assistant", "content": second["content"]},
            user({"type": "text", "text": "On."}),
        ]
        third = ask(app, messages, tools=BEHIND, thinking=OFF, session_id="s")
        assert third["usage"]["cache_read_input_tokens"] >= num_prompt_tokens(second) - 1
        assert last(app)["before"] is not None


# --- tools that nobody runs here -------------------------------------------------------------------------------------

WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FORCED = {"type": "tool", "name": "web_search"}


@pytest.mark.parametrize("fields", [{"tools": [WEB]}, {"tools": [WEB, SEARCH], "tool_choice": FORCED}])
def test_a_search_of_the_web_is_answered_in_words_without_the_model(app: AppUnderTest, fields: dict[str, Any]) -> None:
    """A complete message, streamed and not, in which nothing was read or written by the model."""
    num_before = app.num_forward_calls
    response = app.post(MESSAGES_PATH, messages_body("Perform a web search for the query: x", stream=True, **fields))
    events = events_of(response)
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    plain = ask(app, "Perform a web search for the query: x", **fields)
    for message in (whole_message(events), plain):
        assert "cannot run the tool `web_search`" in text_of(message)
        assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 0)
        assert num_prompt_tokens(message) == 0 and message["model"] == app.served.name
    assert app.num_forward_calls == num_before
    assert "answered in words" in app.line_of(plain["id"].removeprefix("msg_"))


def test_beside_other_tools_it_is_not_offered_and_the_request_is_served(app: AppUnderTest) -> None:
    """The prompt is that without it, and the request's notes say so."""
    with writing(app, "Hello.") as fields:
        assert text_of(ask(app, "hi", tools=[WEB, SEARCH], thinking=OFF, **fields)) == "Hello."
    assert count(app, "hi", tools=[WEB, SEARCH]) == count(app, "hi", tools=[SEARCH])
    assert "not offered" in app.screen.getvalue() or _noted(app)


def _noted(app: AppUnderTest) -> bool:
    return any("not offered" in path.read_text("utf-8") for path in app.log_root.rglob("*") if path.is_file())
