"""Tools that an OpenAI client adds to its list in the middle of a conversation, on the whole server: what stood before
them keeps its KV, they can be called, and nobody else reads of them."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.requests.prompt_of_turn import SharedBeginning
from kvserve.warming import next_turn_predictor
from kvserve.warming.next_turn_predictor import guessed
from tests.agents import TELLING, seen_prompts
from tests.laws import IS_FULL, num_examples, sampled_cells
from tests.protocols.responses_wire import as_responses
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, eventually, serving_app, writing

RESPONSES_PATH = "/v1/responses"
APIS = (CHAT_PATH, RESPONSES_PATH)
SYSTEM = "You look after a house and say what is to be done. " * 4
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}, "required": ["a"]}
CALL = {
    "qwen3": '<tool_call>\n{{"name": "{}", "arguments": {{"a": 2}}}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function={}>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
}


def tool(name: str, says: str = "") -> dict[str, Any]:
    says = says or f"what {name} does is known"
    return {"type": "function", "function": {"name": name, "description": says, "parameters": PARAMETERS}}


READ, WRITE, DEPLOY, SIGN = (tool(name) for name in ("read", "write", "deploy", "sign"))
NUM_TAIL = 16
"""More than the tokens with which a prompt asks for an answer; a hybrid has its last state before them."""

SAID = "It is well looked after, and nothing is to be done."
"""An answer of a client that names its session need not show whose it is."""

BEFORE, BEHIND = [READ, WRITE], [READ, WRITE, DEPLOY]
NUM_TURNS = 6 if IS_FULL else 3


@dataclass(frozen=True)
class Told:
    """What one request came to: its prompt's tokens, how many of them were reused and how many were written, the whole
    prompt, the answer's message and the explanation."""

    num_prompt: int
    num_cached: int
    num_written: int
    prompt: str
    message: dict[str, Any]
    explanation: dict[str, Any]
    prompt_ids: tuple[int, ...] = ()

    @property
    def num_known(self) -> int:
        """Tokens that the next request can find: the last one that was written was never read."""
        return self.num_prompt + self.num_written - 1


@dataclass
class Client:
    """A client with its history, which it sends whole every time."""

    app: AppUnderTest
    api: str
    fields: dict[str, Any] = field(default_factory=lambda: {"session_id": "one"})
    headers: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    def post(self, tools: list[dict[str, Any]], **fields: Any) -> Any:
        thinks = {"chat_template_kwargs": {"enable_thinking": False}}
        body = chat_body(self.messages, tools=tools, **{"max_tokens": 200, **thinks, **self.fields, **fields})
        if self.api == RESPONSES_PATH:
            body = as_responses(body)
        return self.app.post(self.api, body, self.headers)

    def ask(self, tools: list[dict[str, Any]], answer: str | None = SAID, **fields: Any) -> Told:
        """One request, answered with this text; None: with whatever the model writes."""
        with writing(self.app, answer or "") as script, seen_prompts() as prompts:
            response = self.post(tools, **(script if answer is not None else {}), **fields)
        assert response.status == 200, response.body
        explanation = dict(self.app.get("/v1/cache/explain?last", self.headers).json)
        usage = response.json["usage"]
        written = usage.get("completion_tokens", usage.get("output_tokens"))
        prompt = self.app.served.tokenizer.decode(prompts[-1])
        message = self._message(response.json)
        self.messages.append(message)
        num_cached = explanation["cached_tokens"]
        return Told(len(prompts[-1]), num_cached, written, prompt, message, explanation, prompts[-1])

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer_call(self, text: str) -> None:
        call = self.messages[-1]["tool_calls"][0]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def rewound(self, num_messages: int) -> "Client":
        return replace(self, messages=self.messages[:num_messages])

    def _message(self, response: dict[str, Any]) -> dict[str, Any]:
        if self.api == CHAT_PATH:
            return {name: value for name, value in response["choices"][0]["message"].items() if value}
        text = "".join(
            part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
        )
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        return {"role": "assistant", **({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served_app(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A dense model and a hybrid."""
    with serving_app(tmp_path_factory.mktemp(family), family, max_kv_size=16384) as app:
        yield app


@pytest.fixture
def app(served_app: AppUnderTest) -> AppUnderTest:
    served_app.clear_cache()
    return served_app


@pytest.fixture(params=APIS)
def client(app: AppUnderTest, request: pytest.FixtureRequest) -> Client:
    return Client(app, request.param)


ONE_API_PER_FAMILY = sampled_cells(lambda family, client, **_: (family == "qwen3") is (client == RESPONSES_PATH))
"""What each protocol and each kind of layers shows once; the other cells are left to `make full`."""

ON_HYBRID = sampled_cells(lambda family, client=CHAT_PATH, **_: family == "qwen3_5" and client == CHAT_PATH)
"""Where it is about tokens that are found again, or about identity alone: layers that cannot be cut make it hardest."""


def after_two(client: Client) -> list[Told]:
    """Two turns with the first tools."""
    told = []
    for turn in (1, 2):
        client.say(f"What of room {turn}?")
        told.append(client.ask(BEFORE))
    return told


def go_on(client: Client, turns: range, tools: list[dict[str, Any]], last: Told) -> list[Told]:
    """Turns of which each finds all that was read and written before it."""
    told = []
    for turn in turns:
        client.say(f"What of room {turn}?")
        told.append(client.ask(tools))
        reuses_all(told[-1], last)
        last = told[-1]
    return told


def reuses_all(now: Told, last: Told) -> None:
    assert now.num_cached >= last.num_known, now.explanation
    assert now.explanation["cause"] == "nothing lost"


# --- reuse -----------------------------------------------------------------------------------------------------------


@sampled_cells(lambda family, client: (family == "qwen3_5") is (client == CHAT_PATH))
def test_a_tool_that_is_added_costs_the_conversation_nothing(client: Client) -> None:
    """Turn 3 adds one: it is read there, whole, once, and from then on; that is told with its name."""
    two = after_two(client)
    reuses_all(two[1], two[0])
    third, *later = go_on(client, range(3, NUM_TURNS + 1), BEHIND, two[1])
    for told in (third, *later):
        assert "tools_added" in told.explanation["rules"]
        assert told.prompt.count("what deploy does is known") == 1
        assert told.prompt.index("room 2") < told.prompt.index("what deploy does is known")
        assert told.prompt.index("what deploy does is known") < told.prompt.index("room 3")
        assert told.prompt.index("what read does is known") < told.prompt.index("room 1")
    assert third.num_prompt - two[1].num_known < 150
    assert "tools_added" not in two[1].explanation["rules"]
    assert "tools added where the conversation is: deploy" in client.app.screen.getvalue()


@pytest.mark.long
@ON_HYBRID
def test_tools_are_added_again_and_in_any_place_of_the_list(client: Client) -> None:
    """A second one stands where it came, whatever the order in which the client lists them."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), [DEPLOY, READ, WRITE], two[1])
    fourth, fifth = go_on(client, range(4, 6), [SIGN, WRITE, DEPLOY, READ], third)
    places = [fifth.prompt.index(f"what {name} does is known") for name in ("read", "write", "deploy", "sign")]
    assert places == sorted(places)
    assert fourth.prompt.index("room 3") < fourth.prompt.index("what sign does is known")


@sampled_cells(lambda family, **_: family == "qwen3")
@ONE_API_PER_FAMILY
def test_a_tool_that_comes_with_a_result_stands_in_it(client: Client, family: str) -> None:
    """The call and its result stay together."""
    client.say("Begin.")
    first = client.ask(BEFORE, CALL[family].format("read"))
    client.answer_call("the door is open")
    second = client.ask(BEHIND)
    reuses_all(second, first)
    assert second.prompt.index("the door is open") < second.prompt.index("what deploy does is known")
    client.say("On.")
    reuses_all(client.ask(BEHIND), second)


@ON_HYBRID
def test_a_restart_knows_where_tools_came_in(family: str, tmp_path: Path) -> None:
    """Also where another request with other tools has gone the same way meanwhile."""
    with serving_app(tmp_path, family, max_kv_size=16384) as app:
        client = Client(app, CHAT_PATH)
        two = after_two(client)
        [third] = go_on(client, range(3, 4), BEHIND, two[1])
        aside = client.rewound(len(client.messages))
        aside.say("Find a title.")
        aside.ask([])
    with serving_app(tmp_path, family, max_kv_size=16384) as app:
        client.app = app
        client.say("And now?")
        fourth = client.ask(BEHIND)  # what it is compared with is the request for a title
        assert fourth.num_cached >= third.num_known and "tools_added" in fourth.explanation["rules"]
        go_on(client, range(5, 7 if IS_FULL else 6), BEHIND, fourth)


@pytest.mark.long
@ON_HYBRID
def test_a_request_with_other_tools_in_between_changes_nothing(client: Client) -> None:
    """A title is asked for with no tools, and with another set, on the same messages."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    for tools in ([], [SIGN]):
        aside = client.rewound(len(client.messages))
        aside.say("Find a title.")
        assert "what deploy does" not in aside.ask(tools).prompt
    client.say("On.")
    fourth = client.ask(BEHIND)
    assert fourth.num_cached >= third.num_known


@pytest.mark.long
@ON_HYBRID
def test_tools_that_come_and_go_cost_no_more_than_their_turns(client: Client) -> None:
    """A client with two modes: back in the smaller one what came behind the tool is computed again, and in the larger
    one nothing."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    client.say("Without.")
    fourth = client.ask(BEFORE)
    assert two[1].num_known <= fourth.num_cached < third.num_prompt
    fifth, _ = go_on(client, range(5, 7), BEHIND, fourth)
    assert fifth.prompt.index("Without.") < fifth.prompt.index("what deploy does is known")


@pytest.mark.long
@ON_HYBRID
def test_a_rewind_without_the_tool_knows_nothing_of_it(client: Client) -> None:
    """Back to turn 2 with the first tools: what stood before it is reused."""
    two = after_two(client)
    go_on(client, range(3, 5), BEHIND, two[1])
    back = client.rewound(3)
    back.say("What of the garden?")
    told = back.ask(BEFORE)
    assert told.num_cached >= two[0].num_known and "deploy" not in told.prompt
    assert told.explanation["cause"] in ("nothing lost", "message changed")


@pytest.mark.long
@ON_HYBRID
def test_a_rewind_with_the_tool_has_it_there(client: Client) -> None:
    """Back to turn 2 with all tools: it comes in there, and stays there; the turns of the other branch keep theirs."""
    two = after_two(client)
    third, fourth = go_on(client, range(3, 5), BEHIND, two[1])
    back = client.rewound(3)
    back.say("What of the garden?")
    told = back.ask(BEHIND)
    assert told.num_cached >= two[0].num_known
    assert told.prompt.index("what deploy does is known") < told.prompt.index("garden")
    go_on(back, range(3, 4), BEHIND, told)
    go_on(client, range(5, 6), BEHIND, fourth)
    assert third.num_known < fourth.num_known


@pytest.mark.long
@ON_HYBRID
def test_the_same_turn_again_has_the_tool_at_the_same_place(client: Client) -> None:
    """A retry reuses the whole prompt, and one with a tool more all but the newest message."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    again = client.rewound(6).ask(BEHIND)
    assert again.prompt == third.prompt and again.num_cached >= third.num_prompt - NUM_TAIL
    more = client.rewound(6).ask([*BEHIND, SIGN])
    assert more.num_cached >= two[1].num_known
    assert more.prompt.index("what sign does is known") < more.prompt.index("room 3")


# --- honest prefill --------------------------------------------------------------------------------------------------


@sampled_cells(lambda is_added, **_: is_added)
@ON_HYBRID
@pytest.mark.parametrize(("changed", "is_added"), [(0, False), (2, True)])
def test_a_changed_tool_is_computed_again_with_its_cause(client: Client, changed: int, is_added: bool) -> None:
    """One in front changes all; one that was added, all from there on."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    tools = copy.deepcopy(BEHIND)
    tools[changed]["function"]["description"] = "does another thing"
    client.say("On.")
    told = client.ask(tools)
    assert told.num_cached < third.num_prompt and (told.num_cached >= two[1].num_known) is is_added
    assert told.prompt.count("does another thing") == 1
    assert f"what {tools[changed]['function']['name']} does" not in told.prompt
    assert told.explanation["cause"] == "tools changed", told.explanation
    assert told.explanation["first_difference"]["tool"] == tools[changed]["function"]["name"]
    go_on(client, range(5, 6), tools, told)


@pytest.mark.long
@ON_HYBRID
@pytest.mark.parametrize(("tools", "name"), [([READ, DEPLOY], "write"), (BEFORE, "deploy")])
def test_a_removed_tool_is_gone(client: Client, tools: list[dict[str, Any]], name: str) -> None:
    """One that was added costs what came behind it, one in front everything; the cause names it."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    client.say("On.")
    told = client.ask(tools)
    assert told.num_cached < third.num_prompt and (told.num_cached >= two[1].num_known) is (name == "deploy")
    assert f"what {name} does is known" not in told.prompt
    assert told.explanation["cause"] == "tools changed", told.explanation
    assert told.explanation["first_difference"]["tool"] == name
    go_on(client, range(5, 6), tools, told)


@pytest.mark.long
@sampled_cells(lambda fields, **_: "cache_mode" not in fields)
@ON_HYBRID
@pytest.mark.parametrize("fields", [{"cache_mode": "prefix"}, {"ttl": 0}])
def test_a_request_that_leaves_no_record_uses_none(client: Client, fields: dict[str, Any]) -> None:
    """Its tools stand in front, and where it put them is not remembered."""
    two = after_two(client)
    aside = client.rewound(len(client.messages))
    aside.say("Aside.")
    told = aside.ask(BEHIND, **fields)
    assert told.prompt.index("what deploy does is known") < told.prompt.index("room 1")
    assert "tools_added" not in told.explanation["rules"]
    go_on(client, range(3, 5), BEHIND, two[1])


@pytest.mark.long
@ONE_API_PER_FAMILY
def test_tools_of_the_first_turn_stand_in_front(client: Client) -> None:
    """So do those of another conversation of the session, and those of a client that had none before."""
    after_two(client)
    other = client.rewound(1)
    other.say("Something else.")
    told = other.ask(BEHIND)
    assert told.prompt.index("what deploy does is known") < told.prompt.index("Something else.")
    assert "tools_added" not in told.explanation["rules"]
    bare = replace(client.rewound(1), fields={"session_id": "two"})
    bare.say("Hello.")
    bare.ask([])
    bare.say("On.")
    told = bare.ask(BEFORE)
    assert told.prompt.index("what read does is known") < told.prompt.index("Hello.")
    assert told.explanation["cause"] == "tools changed"


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@sampled_cells(lambda family, **_: family == "qwen3_5")
@ONE_API_PER_FAMILY
def test_the_added_tool_can_be_called_and_demanded(client: Client, family: str) -> None:
    """A call comes back as one, and one that is demanded is written by a model that writes at random."""
    two = after_two(client)
    client.say("Deploy.")
    third = client.ask(BEHIND, CALL[family].format("deploy"))
    reuses_all(third, two[1])
    assert third.message["tool_calls"][0]["function"]["name"] == "deploy"
    client.answer_call("it is out")
    reuses_all(client.ask(BEHIND), third)
    forced: Any = {"type": "function", "name": "deploy"}
    if client.api == CHAT_PATH:
        forced = {"type": "function", "function": {"name": "deploy"}}
    choices = [forced]
    if client.api == RESPONSES_PATH:
        choices.append({"type": "allowed_tools", "mode": "required", "tools": [forced]})
    for choice in choices:
        again = client.rewound(5)
        again.say("Deploy.")
        told = again.ask(BEHIND, None, tool_choice=choice, max_tokens=400)
        assert {call["function"]["name"] for call in told.message["tool_calls"]} == {"deploy"}
        assert told.num_cached >= two[1].num_known


@pytest.mark.long
@ONE_API_PER_FAMILY
def test_where_no_call_is_wanted_no_tool_is_told_of(client: Client) -> None:
    """`tool_choice: none` in between: afterwards they stand where they stood."""
    two = after_two(client)
    [third] = go_on(client, range(3, 4), BEHIND, two[1])
    aside = client.rewound(len(client.messages))
    aside.say("On.")
    told = aside.ask(BEHIND, tool_choice="none")
    assert "does is known" not in told.prompt
    client.say("On.")
    assert client.ask(BEHIND).num_cached >= third.num_known


# --- others ----------------------------------------------------------------------------------------------------------

WHO = st.tuples(
    st.sampled_from(APIS),
    st.sampled_from(["", "k1", "k2"]),
    st.sampled_from([{}, {"prompt_cache_key": "app"}, {"session_id": "s1"}, {"session_id": "s2"}]),
)
ACTS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([TELLING, "ok"])), min_size=4, max_size=7)


@ON_HYBRID
@given(WHO, WHO, ACTS, st.integers(1, 3))
@settings(max_examples=num_examples(2), deadline=None)
def test_nobody_reads_of_anothers_tools(served_app: AppUnderTest, one: Any, other: Any, acts: Any, add_at: int) -> None:
    """Two clients with the same words, one of which adds a tool: whoever they are, each prompt has the tools of its own
    request, each of them once."""
    served_app.clear_cache()
    clients = [
        Client(served_app, api, dict(ids), {"authorization": f"Bearer {key}"} if key else {})
        for api, key, ids in (one, other)
    ]
    for who, answer in acts:
        client = clients[who]
        client.say("And?")
        num_turns = len(client.messages) // 2
        tools = BEHIND if who == 0 and num_turns > add_at else [*BEFORE, SIGN] if who and num_turns > 2 else BEFORE
        prompt = client.ask(tools, answer).prompt
        for each in (READ, WRITE, DEPLOY, SIGN):
            assert prompt.count(each["function"]["description"]) == (each in tools)


@ON_HYBRID
def test_who_shows_nothing_has_its_tools_in_front(app: AppUnderTest) -> None:
    """Without a session, a short answer that is sent back proves nothing; a long one does."""
    for answer, is_shown in (("ok", False), (TELLING, True)):
        app.clear_cache()
        client = Client(app, CHAT_PATH, {})
        client.say("Hello.")
        client.ask(BEFORE, answer)
        client.say("On.")
        told = client.ask(BEHIND, answer)
        assert (told.prompt.index("what deploy does") > told.prompt.index("Hello.")) is is_shown
        assert ("tools_added" in told.explanation["rules"]) is is_shown


@pytest.mark.long
@ON_HYBRID
def test_another_principal_with_the_same_words_finds_no_place(app: AppUnderTest) -> None:
    """The session's name and all words are the same, the key is another one."""
    mine = Client(app, CHAT_PATH, headers={"authorization": "Bearer k1"})
    two = after_two(mine)
    go_on(mine, range(3, 4), BEHIND, two[1])
    other = replace(mine.rewound(6), headers={"authorization": "Bearer k2"})
    told = other.ask(BEHIND)
    assert told.prompt.index("what deploy does is known") < told.prompt.index("room 1")
    assert "tools_added" not in told.explanation["rules"]
    other = replace(mine.rewound(6), headers={"authorization": "Bearer k3"})
    assert "deploy" not in other.ask(BEFORE).prompt


# --- what is to come -------------------------------------------------------------------------------------------------


@ON_HYBRID
def test_the_next_turn_is_guessed_with_the_tools_where_they_stand(family: str, tmp_path: Path) -> None:
    """What an idle engine would compute ahead is what the next prompt begins with."""
    guesses: list[SharedBeginning] = []

    def noted(*arguments: Any) -> SharedBeginning | None:
        guess = guessed(*arguments)
        guesses.extend([guess] if guess is not None else [])
        return guess

    with pytest.MonkeyPatch.context() as patch, serving_app(tmp_path, family, warm_next_turn=True) as app:
        patch.setattr(next_turn_predictor, "guessed", noted)
        client = Client(app, CHAT_PATH)
        after_two(client)
        for turn in (3, 4):
            client.say(f"What of room {turn}?")
            told = client.ask(BEHIND)
        assert eventually(lambda: max((len(guess.tokens) for guess in guesses), default=0) > told.num_known, 60)
        client.say("What of room 5?")
        guess, told = max((guess.tokens.ids for guess in guesses), key=len), client.ask(BEHIND)
    assert "what deploy does is known" in told.prompt
    assert told.prompt_ids[: len(guess)] == guess
