"""What a client changes reaches the model, whatever the server remembers: every attempt here tries to hide a change.

The prompt that the model gets is compared with that of a server which has never seen the conversation. They are equal
from the first changed message on; before it they differ at most in tokens, never in what they say.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.agents import TOOL, Asked, send
from tests.laws import IS_FULL, TWO_KINDS, sampled, sampled_cells
from tests.serving import AppUnderTest, serving_app

REMINDER = (
    "<system-reminder>\nAs you answer, use this:\nContents of /work/NOTES.md (project instructions):\n\n"
    "Never delete files.\n\nToday's date is 2026-11-20.\n</system-reminder>\n"
)
CLOCK = "Current time is 10:15."

type Body = dict[str, Any]


def conversation() -> Body:
    """A tool loop with everything in it that rules know."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place": "a.txt"}'}}]
    more = [{"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"place": "b.txt"}'}}]
    return {
        "messages": [
            {"role": "system", "content": "You look at files. " * 3},
            {"role": "user", "content": f"{REMINDER}\nRead both files. {CLOCK}"},
            {"role": "assistant", "content": "First one.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "alpha = 1\nbeta = 2 # message_id 77\n"},
            {"role": "assistant", "content": "Second one.", "tool_calls": more},
            {"role": "tool", "tool_call_id": "c2", "content": "gamma = 3"},
            {"role": "user", "content": "Thank you. And what is beta?"},
        ],
        "tools": [TOOL],
        "session_id": "one",  # all that may come back does
        "max_tokens": 12 if IS_FULL else 4,
        "temperature": 0,
        "repetition_penalty": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def _replaced(index: int, old: str, new: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        content = body["messages"][index]["content"]
        assert old in content
        body["messages"][index]["content"] = content.replace(old, new, 1)

    return change


def _swapped(body: Body) -> None:
    messages = body["messages"]
    messages[3]["content"], messages[5]["content"] = messages[5]["content"], messages[3]["content"]


def _other_argument(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"place": "c.txt"}'


def _other_schema(body: Body) -> None:
    body["tools"] = copy.deepcopy(body["tools"])
    body["tools"][0]["function"]["parameters"]["properties"]["depth"]["type"] = "string"


def _thinking_on(body: Body) -> None:
    body["chat_template_kwargs"] = {"enable_thinking": True}


CHANGES: dict[str, Callable[[Body], None]] = {
    "one character of an old tool result": _replaced(3, "beta = 2", "beta = 5"),
    "an id in a file's content": _replaced(3, "message_id 77", "message_id 78"),
    "two results swapped": _swapped,
    "a date in the reminder": _replaced(1, "2026-11-20", "2026-11-21"),
    "one character of the project's instructions": _replaced(1, "Never delete", "Never delets"),
    "the clock in an old message": _replaced(1, "10:15", "10:16"),
    "an argument": _other_argument,
    "an answer's word": _replaced(2, "First", "Third"),
    "a tool's schema": _other_schema,
    "the thinking switch": _thinking_on,
    "the system prompt": _replaced(0, "files", "pipes"),
}


@pytest.fixture(scope="module", params=TWO_KINDS)
def apps(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AppUnderTest, AppUnderTest]]:
    """Two servers of one model: one that remembers, one whose memory is emptied before each question."""
    family = str(request.param)
    settings: dict[str, Any] = {"prompt_cache_max_entries_global": 1000, "prompt_cache_max_entries_per_session": 100}
    with (
        serving_app(tmp_path_factory.mktemp("old"), family, **settings) as old,
        serving_app(tmp_path_factory.mktemp("new"), family, **settings) as new,
    ):
        yield old, new


def asked_of_both(apps: tuple[AppUnderTest, AppUnderTest], body: Body) -> tuple[Asked, Asked]:
    """The same request to the server that remembers and to one that does not."""
    old, new = apps
    new.clear_cache()
    return send(old, body), send(new, body)


IN_EVERY_RUN = (
    ("qwen3_5", "one character of an old tool result"),
    ("qwen3_5", "a date in the reminder"),
    ("qwen3_5", "a tool's schema"),
    ("qwen3", "an argument"),
)
"""What a rule could hide, and one of each part of a prompt; `test_never_blinded_written.py` has all of them."""

on_recurrent_states = pytest.mark.parametrize("apps", sampled(TWO_KINDS, ("qwen3_5",)), indirect=True)
"""What is explained does not depend on the kind of layers."""


@pytest.mark.parametrize("change", CHANGES)
@sampled_cells(lambda apps, change: (apps, change) in IN_EVERY_RUN)
def test_a_change_reaches_the_model(apps: tuple[AppUnderTest, AppUnderTest], change: str) -> None:
    """Prompt and greedy answer are those of a server without a memory, and the prompt is not the one before."""
    apps[0].clear_cache()
    before = send(apps[0], conversation())
    body = conversation()
    CHANGES[change](body)
    remembering, fresh = asked_of_both(apps, body)
    assert remembering.prompt_ids == fresh.prompt_ids
    assert remembering.prompt_ids != before.prompt_ids
    assert _said(remembering) == _said(fresh)
    assert remembering.explanation["cause"] != "nothing lost" or change == "the thinking switch"


def test_the_unchanged_conversation_is_reused(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The control: asked again as it was, nothing but the end is computed, and nothing is said to be lost."""
    apps[0].clear_cache()
    before, again = send(apps[0], conversation()), send(apps[0], conversation())
    assert again.prompt_ids == before.prompt_ids
    assert again.num_cached_tokens >= len(again.prompt_ids) - 16
    assert again.explanation["cause"] == "nothing lost"


@on_recurrent_states
def test_a_clock_arrives_fresh_in_the_newest_message(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The same question a minute later: the model reads the new time."""
    body = conversation()
    body["messages"][-1]["content"] = f"What time is it? {CLOCK}"
    send(apps[0], body)
    body["messages"][-1]["content"] = "What time is it? Current time is 10:19."
    asked = send(apps[0], body)
    assert "10:19." in apps[0].served.tokenizer.decode(asked.prompt_ids)
    assert asked.explanation["rules"] == ["current_time"] or "current_time" in asked.explanation["rules"]


@on_recurrent_states
def test_an_old_clock_is_prefilled_again_and_the_rule_is_named(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """A clock that moved in history is rendered as sent; the explanation says which rule let it count as the same."""
    apps[0].clear_cache()
    send(apps[0], conversation())
    body = conversation()
    CHANGES["the clock in an old message"](body)
    explanation = send(apps[0], body).explanation
    assert explanation["cause"] == "volatile value" and "current_time" in explanation["rules"]
    assert explanation["first_difference"]["message_index"] == 1


@on_recurrent_states
def test_an_edit_is_explained_by_its_place(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The first difference: message, role, character, before and after."""
    apps[0].clear_cache()
    send(apps[0], conversation())
    body = conversation()
    CHANGES["one character of an old tool result"](body)
    explanation = send(apps[0], body).explanation
    difference = explanation["first_difference"]
    assert explanation["cause"] == "message changed"
    assert (difference["message_index"], difference["role"]) == (3, "tool")
    assert "beta = 2" in difference["before"] and "beta = 5" in difference["after"]


def _said(asked: Asked) -> Any:
    [choice] = asked.body["choices"]
    return {name: value for name, value in choice["message"].items() if name != "tool_calls"}, choice["finish_reason"]
