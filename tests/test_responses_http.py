"""`/v1/responses` on the whole server and a real model: forms, reuse across protocols and restarts, bad input."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.laws import sampled_cells
from tests.protocols.responses_wire import as_responses, put_together
from tests.protocols.test_responses_items import MISTAKES
from tests.protocols.test_responses_request import REFUSED
from tests.serving import CHAT_PATH, AppUnderTest, Response, is_error_form, serves, serving_app, writing
from tests.web.test_responses import events_of

PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. "
GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
TOOLS = [
    LOOK,
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{**LOOK, "name": "stop"}]},
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A server that names any model."""
    with serving_app(tmp_path_factory.mktemp("app"), max_kv_size=4096) as app:
        yield app


def ask(app: AppUnderTest, said: object, **fields: Any) -> dict[str, Any]:
    """The response to a greedy request of 16 tokens; streamed, its pieces must make its items."""
    body = {"input": said, **GREEDY, "max_output_tokens": 16, **fields}
    answer = app.post(PATH, body)
    assert answer.status == 200, answer.body
    if not fields.get("stream"):
        return dict(answer.json)
    events = events_of(answer.body)
    response: dict[str, Any] = events[-1]["response"]
    assert put_together(events) == response["output"]
    return response


def items(response: dict[str, Any]) -> list[Any]:
    """What the items say, without their ids."""
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]


def call_text(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# --- forms -----------------------------------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[str, list[str]]] = {
    "text": ("Hello there.", ["message"]),
    "thoughts and text": ("<think>\nhm\n</think>\n\nHello.", ["reasoning", "message"]),
    "thoughts and a call": ("<think>\nhm\n</think>\n\n" + call_text("look", at="x"), ["reasoning", "function_call"]),
    "two calls": (call_text("look", at="é") + "\n" + call_text("agents__stop", at="b"), ["function_call"] * 2),
    "text and a custom call": ("Now.\n" + call_text("patch", input='*** "x"\n'), ["message", "custom_tool_call"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_its_stream_and_its_echo_say_the_same(app: AppUnderTest, name: str) -> None:
    """Either way the same items; sent back they are what the model wrote, of which nothing is computed again."""
    text, kinds = WRITTEN[name]
    with writing(app, text) as script:
        fields = {**script, "tools": TOOLS, "max_output_tokens": 200}
        whole = ask(app, "Begin.", **fields)
        streamed = ask(app, "Begin.", stream=True, **fields)
    assert [item["type"] for item in whole["output"]] == kinds
    assert items(streamed) == items(whole)
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
        for item in whole["output"]
        if "call_id" in item
    ]
    following = results or [{"role": "user", "content": "And now?"}]
    history = [{"role": "user", "content": "Begin."}, *whole["output"], *following]
    second = ask(app, history, tools=TOOLS, max_output_tokens=2)
    known: int = whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"] - 1
    if "reasoning" in kinds and not results:
        known = whole["usage"]["input_tokens"] - 8  # a user's words take away the thoughts before them
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= known


def test_an_answer_that_a_limit_cuts_is_incomplete(app: AppUnderTest) -> None:
    """So is the item that was open."""
    response = ask(app, "Begin.", max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 3


def test_a_json_form_is_kept(app: AppUnderTest) -> None:
    """`text.format` leaves the model no other choice."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    response = ask(app, "Say it.", text=form, reasoning={"effort": "none"}, max_output_tokens=60)
    [message] = response["output"]
    assert json.loads(message["content"][0]["text"]) == {"a": "x"}


def test_a_forced_call_names_its_tool(app: AppUnderTest) -> None:
    """A tool of a namespace, too."""
    choice = {"type": "function", "name": "stop", "namespace": "agents"}
    closed = {**LOOK, "name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    tools = [{"type": "namespace", "name": "agents", "tools": [closed]}]
    response = ask(app, "Stop.", tools=tools, tool_choice=choice, reasoning={"effort": "none"}, max_output_tokens=80)
    [call] = response["output"]
    assert (call["type"], call["name"], call["namespace"], call["arguments"]) == (
        "function_call",
        "stop",
        "agents",
        "{}",
    )


def test_a_response_can_be_explained(app: AppUnderTest) -> None:
    """By its own id."""
    response = ask(app, "Explain this.")
    explained = app.get(f"/v1/cache/explain/{response['id']}")
    assert explained.status == 200, explained.body
    assert response["id"].endswith(str(explained.json["request_id"]))


# --- the same conversation through other protocols -------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation that goes on through whichever protocol a turn takes: texts only."""

    app: AppUnderTest
    session: str | None
    said: list[tuple[str, str]] = field(default_factory=list)
    system: str = WORDS * 60

    def turn(self, path: str, words: str) -> float:
        """One more turn; returns the share of its prompt that was known."""
        self.said.append(("user", words))
        share, answer = _SPEAK[path](self)
        self.said.append(("assistant", answer))
        return share

    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in self.said]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer: Response = self.app.post(
            path, {**body, "temperature": 0, "model": "m", **({"session_id": self.session} if self.session else {})}
        )
        assert answer.status == 200, answer.body
        return answer.json


def _chat(talk: Talk) -> tuple[float, str]:
    messages = [{"role": "system", "content": talk.system}, *talk.messages()]
    answer = talk.post(CHAT_PATH, {"messages": messages, "max_tokens": 12, "enable_thinking": False})
    usage = answer["usage"]
    share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    return share, answer["choices"][0]["message"]["content"]


def _responses(talk: Talk) -> tuple[float, str]:
    body = {
        "instructions": talk.system,
        "input": talk.messages(),
        "max_output_tokens": 12,
        "reasoning": {"effort": "none"},
    }
    answer = talk.post(PATH, body)
    usage = answer["usage"]
    share = usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"]
    return share, "".join(part["text"] for item in answer["output"] for part in item["content"])


def _messages(talk: Talk) -> tuple[float, str]:
    body = {"system": talk.system, "messages": talk.messages(), "max_tokens": 12, "thinking": {"type": "disabled"}}
    answer = talk.post(MESSAGES_PATH, body)
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    share = cached / (usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0))
    return share, "".join(block["text"] for block in answer["content"])


_SPEAK: dict[str, Callable[[Talk], tuple[float, str]]] = {CHAT_PATH: _chat, PATH: _responses, MESSAGES_PATH: _messages}


@sampled_cells(lambda family, session, **_: family == "qwen3_5" and session is None)
@pytest.mark.parametrize(
    ("family", "session", "least"), [("qwen3", "one", 0.98), ("qwen3_5", "one", 0.98), ("qwen3_5", None, 0.97)]
)
def test_a_conversation_keeps_its_kv_through_every_change_of_protocol(
    tmp_path: Path, family: str, session: str | None, least: float
) -> None:
    """chat -> messages -> responses -> chat -> responses -> messages -> chat: 98 % at each change. Without a session
    such short answers show nobody's conversation, and are read as they are sent."""
    with serving_app(tmp_path, family=family) as app:
        talk = Talk(app, session)
        talk.turn(CHAT_PATH, "Begin.")
        paths = [MESSAGES_PATH, PATH, CHAT_PATH, PATH, MESSAGES_PATH, CHAT_PATH]
        shares = [talk.turn(path, f"Go on with {number}.") for number, path in enumerate(paths)]
        print(family, [f"{share:.4f}" for share in shares])
        assert min(shares) >= least


def test_the_same_request_in_both_protocols_is_the_same_prompt(app: AppUnderTest) -> None:
    """Tools, thoughts, calls and results: all of it but the last token is known from the other protocol."""
    function = {"name": "look", "description": "Looks.", "parameters": LOOK["parameters"]}
    call = {"id": "call1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    body = {
        "messages": [
            {"role": "developer", "content": WORDS},
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call1", "content": "a fox"},
            {"role": "assistant", "content": "A fox."},
            {"role": "user", "content": "Again."},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 2,
        **GREEDY,
    }
    chat = app.post(CHAT_PATH, body).json
    response = app.post(PATH, as_responses(body)).json
    usage = response["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_by_name_also_after_a_restart(tmp_path: Path) -> None:
    """Only the new message is sent; what was said is known to the next process."""
    with serving_app(tmp_path) as app:
        first = ask(app, WORDS * 4, instructions="Be brief.")
        second = ask(app, "And then?", previous_response_id=first["id"], stream=True)
        history = [{"role": "user", "content": WORDS * 4}, *first["output"], {"role": "user", "content": "And then?"}]
        same = ask(app, history, store=False)
        assert items(same) == items(second)
        assert same["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    with serving_app(tmp_path) as app:
        third = ask(app, "And?", previous_response_id=second["id"])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
        assert app.get(f"{PATH}/{first['id']}").json == first


def test_what_nobody_runs_here_is_answered_in_words(app: AppUnderTest) -> None:
    """A complete response, streamed and not, which is kept like any other; the model computes nothing."""
    before = app.num_forward_calls
    body = {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    plain = app.post(PATH, body).json
    events = events_of(app.post(PATH, {**body, "stream": True}).body)
    assert put_together(events) == events[-1]["response"]["output"]
    for response in (plain, events[-1]["response"]):
        [message] = response["output"]
        assert "cannot run the tool `web_search`" in message["content"][0]["text"]
        assert response["status"] == "completed" and response["usage"]["total_tokens"] == 0
        assert app.get(f"{PATH}/{response['id']}").json == response
    assert app.num_forward_calls == before


# --- bad input -------------------------------------------------------------------------------------------------------

UNENFORCEABLE = {
    "parameters": {"type": "object", "properties": {"at": {"enum": []}}, "required": ["at"]},
    "strict": True,
}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [LOOK, {**LOOK, "name": "stop", **UNENFORCEABLE}]}
STOP = {"type": "function", "namespace": "agents", "name": "stop"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": "x", "tools": [{**LOOK, **UNENFORCEABLE}], "tool_choice": "required"}, "tools[0].parameters"),
    (
        {"input": "x", "tools": [{"type": "web_search"}, LOOK, NAMESPACE], "tool_choice": STOP},
        "tools[2].tools[1].parameters",
    ),
    *(({name: value}, name) for name, value in REFUSED),
    *(({"input": [item]}, param) for item, param in MISTAKES),
    ({"input": "x", "tools": [{"type": "local_shell"}]}, "tools[0].type"),
    ({"input": "x", "tools": [LOOK, LOOK]}, "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"enum": []}, "strict": True}}},
        "text.format.schema",
    ),
    ({"input": WORDS * 2000}, "input"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_named_and_costs_no_step(app: AppUnderTest, stream: bool) -> None:
    """Each is a 400 in OpenAI's form that names its field, streamed or not, and the model computes nothing."""
    serves(app)
    before, wrong = app.num_forward_calls, []
    with app.connect() as client:
        for fields, param in BAD:
            if stream and "stream" in fields:
                continue
            body = {"input": "x", **({"stream": True} if stream else {}), **fields}
            response = client.request("POST", PATH, body)
            named = str(response.error["param"] if response.status >= 400 else None)
            is_called_so = not param.endswith((".parameters", ".schema")) or param in str(response.error["message"])
            if response.status != 400 or not is_error_form(response) or not (named.startswith(param) and is_called_so):
                wrong.append((fields if len(str(fields)) < 200 else param, response.status, named))
    assert not wrong
    assert app.num_forward_calls == before
    serves(app)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"input": NaN}', b"\xff", b"[" * 20_000])
def test_a_body_that_is_no_object_is_a_400(app: AppUnderTest, raw: bytes) -> None:
    """In the same form, and the server serves on."""
    with app.connect() as client:
        response = client.request("POST", PATH, raw)
    assert response.status == 400 and is_error_form(response)
    serves(app)


@pytest.mark.parametrize(
    "fields", [{"previous_response_id": "resp_x"}, {"input": [{"type": "item_reference", "id": "x"}]}]
)
def test_what_is_not_kept_is_a_404(app: AppUnderTest, fields: dict[str, Any]) -> None:
    """In OpenAI's form, before anything computes."""
    before = app.num_forward_calls
    response = app.post(PATH, {"input": "x", **fields})
    assert response.status == 404 and is_error_form(response)
    assert app.num_forward_calls == before
