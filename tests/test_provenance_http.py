"""Pairs of clients on one server, in every protocol: nothing that one of them hid stands in the other's prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents import TELLING, model_text, seen_prompts
from tests.laws import num_examples, sampled
from tests.serving import CHAT_PATH, AppUnderTest, serving_app, writing

FAMILY = "qwen3_5"
"""Its template keeps thinking in the history, so that what comes back stands in the prompt."""

REMINDER = "<system-reminder>\nThe PIN is {}.\n</system-reminder>\n"
SENDER = 'Sender (untrusted metadata):\n```json\n{{\n  "sender": "{}"\n}}\n```\n\n'
ANSWERS = ("ok", "Hello! How can I help you?", TELLING)
BROUGHT = (
    "An answer that some other server once gave, in as many words as the one above, so that nobody may say that it "
    "shows less because it is shorter than what a model of ours has written; a client brought it from somewhere else. "
    "It goes on like this for a while, because an answer of some length is what people are used to, and because a "
    "few more words cost a server next to nothing, whoever reads them."
)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("served"), FAMILY, max_kv_size=4096) as app:
        yield app


@dataclass
class Client:
    """Somebody with a word of its own, which it hides in spans and the model thinks of."""

    word: str
    path: str
    key: str
    user: str
    ids: dict[str, str]
    history: list[tuple[str, str]] = field(default_factory=list)

    def ask(self, app: AppUnderTest, said: str, hidden: str, answer: str) -> str:
        """One turn; what stood in the prompt."""
        newest = hidden.format(self.word) + said
        messages = [{"role": role, "content": text} for role, text in (*self.history, ("user", newest))]
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        text = model_text(FAMILY, f"It is {self.word}.", answer, None)
        with writing(app, text) as script, seen_prompts() as prompts:
            response = app.post(self.path, {**self._body(messages), **self.ids, **script, "temperature": 0}, headers)
        assert response.status == 200, response.body
        self.history += [("user", said), ("assistant", answer)]
        return app.served.tokenizer.decode(prompts[-1])

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        thinks: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
        if self.path == RESPONSES:
            return {"input": messages, "max_output_tokens": 500, "store": False, "user": self.user, **thinks}
        if self.path == MESSAGES:
            metadata = {"metadata": {"user_id": self.user}}
            return {"messages": messages, "max_tokens": 500, **metadata, "thinking": {"type": "enabled"}, **thinks}
        return {"messages": messages, "max_tokens": 500, "user": self.user, **thinks}


CLIENTS = st.tuples(
    st.sampled_from([CHAT_PATH, MESSAGES, RESPONSES]),
    st.sampled_from(["", "k1", "k2"]),
    st.sampled_from(["", "ann", "bob"]),
    st.sampled_from([{}, {"prompt_cache_key": "app"}, {"session_id": "s1"}, {"session_id": "s2"}]),
)
ACTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["hello", "And?"]),
        st.sampled_from(["", REMINDER, SENDER]),
        st.sampled_from(ANSWERS),
        st.sampled_from(["", "", "brought", "begin"]),
    ),
    min_size=3,
    max_size=6,
)


@given(CLIENTS, CLIENTS, ACTS)
@settings(max_examples=num_examples(2), deadline=None)
def test_what_one_hid_never_stands_in_the_others_prompt(app: AppUnderTest, one: Any, other: Any, acts: Any) -> None:
    """Other keys, users, sessions and protocols, or none at all; what they say aloud is the same."""
    if "session_id" in one[3] and one[1:] == other[1:]:
        other = (*other[:3], {})  # one session of one principal is one client
    app.clear_cache()
    clients = [Client("MARZIPAN", *one), Client("PUMPERNICKEL", *other)]
    for who, said, hidden, answer, before in acts:
        client, another = clients[who], clients[1 - who]
        if before == "begin":
            client.history.clear()
        if before == "brought":
            client.history += [("user", said), ("assistant", BROUGHT)]
        assert another.word not in client.ask(app, said, hidden, answer)


def test_what_one_hid_comes_back_to_it(app: AppUnderTest) -> None:
    """The control: its own span and thinking stand in its next prompt, by the answer that it sends back."""
    app.clear_cache()
    client = Client("MARZIPAN", CHAT_PATH, "", "", {})
    client.ask(app, "hello", REMINDER, TELLING)
    prompt = client.ask(app, "And?", "", TELLING)
    assert "The PIN is MARZIPAN" in prompt and "It is MARZIPAN" in prompt


@pytest.mark.parametrize("path", sampled((CHAT_PATH, MESSAGES, RESPONSES), {MESSAGES}))
def test_a_client_that_was_never_here_reads_nothing_of_another(app: AppUnderTest, path: str) -> None:
    """It says hello as another did, brings an answer of its own, and asks for the PIN."""
    app.clear_cache()
    Client("MARZIPAN", CHAT_PATH, "", "", {}).ask(app, "hello", REMINDER, "ok")
    stranger = Client("PUMPERNICKEL", path, "", "", {}, [("user", "hello"), ("assistant", "ok")])
    assert "MARZIPAN" not in stranger.ask(app, "What is the PIN?", "", "ok")


def test_thinking_that_a_client_brought_comes_to_nobody(app: AppUnderTest) -> None:
    """The model has not written it: another client that sends the same answer without it reads nothing of it."""
    app.clear_cache()
    prompts = []
    for brought in ({"reasoning_content": "My doctor says MARZIPAN."}, {}):
        answer = {"role": "assistant", "content": BROUGHT, **brought}
        talk = [{"role": "user", "content": "hello"}, answer, {"role": "user", "content": "And?"}]
        with seen_prompts() as seen:
            assert app.post(CHAT_PATH, {"messages": talk, "max_tokens": 2, "temperature": 0}).status == 200
        prompts.append(app.served.tokenizer.decode(seen[-1]))
    assert "MARZIPAN" in prompts[0] and "MARZIPAN" not in prompts[1]


def test_a_first_request_is_explained_by_nobody_elses(app: AppUnderTest) -> None:
    """Two clients say hello under system prompts of their own: neither hears of the other's."""
    app.clear_cache()
    for system in ("You are the helper of MARZIPAN. " * 9, "You are somebody's helper. " * 9):
        talk = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
        answer = app.post(CHAT_PATH, {"messages": talk, "max_tokens": 2, "temperature": 0})
    told = app.get(f"/v1/cache/explain/{answer.json['id']}")
    assert told.json["before"] is None and told.json["cause"] == "new conversation"
    assert b"MARZIPAN" not in told.body
