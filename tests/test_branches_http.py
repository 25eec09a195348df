"""Several agents in one session, and a client that goes back: over HTTP everybody gets a fresh server's answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents import Asked, Conversation, EchoStyle, send
from tests.laws import IS_FULL, TWO_KINDS, sampled, sampled_cells
from tests.serving import CHAT_PATH, AppUnderTest, encode_request, eventually, serving_app

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 2}
STYLE = EchoStyle("stripped", None, own_ids=True, compact=True)
SESSION = {"session_id": "one"}
SLACK_TOKENS = 8

SHORT: dict[str, Any] = {"max_tokens": 12 if IS_FULL else 6, "temperature": 0, "repetition_penalty": 1}
"""Enough of an answer to see that two are the same."""

on_recurrent_states = pytest.mark.parametrize("apps", sampled(TWO_KINDS, ("qwen3_5",)), indirect=True)
"""What is remembered does not depend on the kind of layers, and states are the harder ones to keep."""


@pytest.fixture(scope="module", params=TWO_KINDS)
def apps(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AppUnderTest, AppUnderTest]]:
    """Two servers of one model: one that remembers, one that knows nothing of a conversation when it is asked."""
    family = str(request.param)
    with (
        serving_app(tmp_path_factory.mktemp("old"), family) as old,
        serving_app(tmp_path_factory.mktemp("new"), family) as new,
    ):
        old.family = new.family = family  # type: ignore[attr-defined]
        yield old, new


def begin(app: AppUnderTest, words: str) -> Conversation:
    """A conversation of the session that all share, with the same system prompt."""
    user = {"role": "user", "content": words}
    return Conversation(app, app.family, STYLE, False, [dict(SYSTEM), user], SESSION)  # type: ignore[attr-defined]


def turn(talk: Conversation, number: int) -> Asked:
    """A call, its result, and the answer to it."""
    talk.ask("", f"I look at {number}.", f"hill {number}")
    talk.answer_calls(f"a tree {number}")
    asked = talk.ask("", f"There is a tree, {number}.")
    talk.say(f"And behind it, {number}?")
    return asked


def check_fresh(apps: tuple[AppUnderTest, AppUnderTest], talk: Conversation) -> Asked:
    """What the server that remembers answers now. Its prompt says what that of a server without a memory says, though
    the tokens of old answers are those that the model drew; and from these very tokens the other one answers the same.
    """
    old, new = apps
    new.clear_cache()
    body: dict[str, Any] = {**talk.request(), **SHORT}
    remembering, fresh = send(old, body), send(new, body)
    assert _text(old, remembering) == _text(new, fresh)
    new.clear_cache()
    again = new.post("/v1/completions", {"prompt": list(remembering.prompt_ids), **SHORT})
    assert again.status == 200, again.body
    message = remembering.body["choices"][0]["message"]
    said = (message.get("reasoning_content") or "") + (message.get("content") or "")
    assert said and said.strip() == again.json["choices"][0]["text"].strip()
    assert remembering.explanation["exact_key_rejected_by_model_lcp"] == 0
    return remembering


def _text(app: AppUnderTest, asked: Asked) -> str:
    """A prompt's text without what says nothing: white space, and the empty thinking that a prompt ended with."""
    return "".join(app.served.tokenizer.decode(asked.prompt_ids).split()).replace("<think></think>", "")


@on_recurrent_states
def test_sub_agents_between_a_parents_turns(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """Helpers take turns with their parent in its session: each goes on where it was, and nobody reads another. Of two
    helpers the default run takes one."""
    apps[0].clear_cache()
    words = ("Plan it.", "You are the left one.", "You are the right one.")[: 3 if IS_FULL else 2]
    talks = [begin(apps[0], first) for first in words]
    last = [turn(talk, place) for place, talk in enumerate(talks)]
    for place, (talk, before) in enumerate(zip(talks, last, strict=True)):
        asked = check_fresh(apps, talk)
        assert asked.num_cached_tokens >= before.num_tokens - SLACK_TOKENS
        text = apps[0].served.tokenizer.decode(asked.prompt_ids)
        assert [f"hill {number}" in text for number in range(3)] == [number == place for number in range(3)]
    assert apps[0].get("/v1/cache").json["counters"]["exact_key_rejected_by_model_lcp"] == 0


@pytest.mark.long
@on_recurrent_states
def test_two_clients_on_one_session_id(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The same answers to other words, in turns: neither's thinking, calls or results reach the other's prompt."""
    apps[0].clear_cache()
    ann, bob = begin(apps[0], "I am Ann."), begin(apps[0], "I am Bob.")
    turn(ann, 0)
    turn(bob, 0)
    for talk, own, other in ((ann, "Ann", "Bob"), (bob, "Bob", "Ann")):
        text = apps[0].served.tokenizer.decode(check_fresh(apps, talk).prompt_ids)
        assert own in text and other not in text


@pytest.mark.long
@sampled_cells(lambda apps, **_: apps == "qwen3_5")
def test_a_rewound_conversation(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """Back to an older turn and on in another way, then on with the first one: both are whole."""
    apps[0].clear_cache()
    talk = begin(apps[0], "Begin.")
    first = turn(talk, 0)
    rewound = begin(apps[0], "Begin.")
    rewound.messages[:] = [dict(message) for message in talk.messages]
    second = turn(talk, 1)
    rewound.messages[-1] = {"role": "user", "content": "No, look at the lake."}
    assert check_fresh(apps, rewound).num_cached_tokens >= first.num_tokens - SLACK_TOKENS
    turn(rewound, 2)
    assert check_fresh(apps, talk).num_cached_tokens >= second.num_tokens - SLACK_TOKENS


@pytest.mark.long
@on_recurrent_states
def test_an_edited_old_message(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The edit is read, what stood there is not, and the unedited conversation is known as before."""
    apps[0].clear_cache()
    talk = begin(apps[0], "Begin.")
    turn(talk, 0)
    last = turn(talk, 1)
    edited = begin(apps[0], "Begin.")
    edited.messages[:] = [dict(message) for message in talk.messages]
    place = next(index for index, message in enumerate(edited.messages) if message["role"] == "tool")
    edited.messages[place] = {**edited.messages[place], "content": "a lake 0"}
    text = apps[0].served.tokenizer.decode(check_fresh(apps, edited).prompt_ids)
    assert "a lake 0" in text and "a tree 0" not in text
    assert check_fresh(apps, talk).num_cached_tokens >= last.num_tokens - SLACK_TOKENS


@sampled_cells(lambda apps, **_: apps == "qwen3")
def test_an_aborted_turn_that_is_sent_again(apps: tuple[AppUnderTest, AppUnderTest]) -> None:
    """The client leaves while the answer comes, and asks again: a whole answer, and nothing of the half one."""
    apps[0].clear_cache()
    talk = begin(apps[0], "Begin.")
    turn(talk, 0)
    with apps[0].connect() as client:
        client.send(encode_request("POST", CHAT_PATH, {**talk.request(), "max_tokens": 4_000, "stream": True}))
        client.read_head()
        client.read_chunk()
    assert eventually(lambda: any("cancelled" in line for line in apps[0].lines()))
    assert eventually(apps[0].is_idle)
    asked = check_fresh(apps, talk)
    assert asked.num_cached_tokens >= talk.turns[-1].num_tokens - SLACK_TOKENS
