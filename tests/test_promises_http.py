"""What a request promises of its answer, over HTTP on real models: strict tools, schemas as far as they can be held,
limits of thinking, JSON behind what the prompt has already.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from kvserve.engine import decode_group
from tests.laws import sampled, sampled_cells
from tests.requests.test_serve import CALLS, OPENED, SCHEMA, TOOLS, fits, without_space
from tests.serving import CHAT_PATH, COMPLETION_PATH, SCRIPT_SEED, AppUnderTest, chat_body, serving_app, whole

MESSAGES_PATH, RESPONSES_PATH = "/v1/messages", "/v1/responses"
STRICT_TOOLS = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "boolean"}}}
"""Nobody can enforce it whole."""


@pytest.fixture(scope="module", params=sampled(CALLS, ("qwen3", "qwen3_5", "gpt_oss")))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def app(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp(family), family, max_kv_size=768) as app:
        yield app


one_family = pytest.mark.parametrize("family", ["qwen3"], indirect=True)
thinking_family = pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)


@contextlib.contextmanager
def wishing(app: AppUnderTest, text: str) -> Iterator[Mapping[str, Any]]:
    """Make the model want to write `text` and then its stop token, in requests that carry the yielded fields: whatever
    else the request promises comes first. A wish that could not be met is passed over."""
    tokenizer = app.served.tokenizer
    wishes = [*tokenizer.encode(text), min(tokenizer.stop_token_ids)]
    real = decode_group.processors_for

    def processors_for(params: Any, num_prompt_tokens: int) -> list[Any]:
        def wish(tokens: mx.array, logits: mx.array) -> mx.array:
            position = min(len(tokens) - num_prompt_tokens, len(wishes) - 1)
            return logits + 1000 * (mx.arange(logits.shape[-1]) == wishes[position])

        return [wish] if params.seed == SCRIPT_SEED else real(params, num_prompt_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_group, "processors_for", processors_for)
        yield {"seed": SCRIPT_SEED}


def reasoning_tokens(usage: Mapping[str, Any] | None) -> int:
    assert usage is not None
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


# --- strict tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", ["on", "off"])
@sampled_cells(lambda family, thinking: (family, thinking) == ("qwen3_5", "on"))
def test_a_strict_tool_is_held_where_the_model_may_call(app: AppUnderTest, family: str, thinking: str) -> None:
    """What the model says before its call is its own; the call then obeys the schema, though it wanted another."""
    bad = CALLS[family].replace("Oslo", "Paris")
    said = "<|channel|>commentary<|message|>Look:<|end|><|start|>assistant" if family == "gpt_oss" else "Look:\n"
    thought = "" if family == "gpt_oss" or thinking == "off" else "hm\n</think>\n\n"
    opened = "<think>\n" if thought and family not in OPENED else ""
    fields = {"thinking": thinking, "max_tokens": 300, "parallel_tool_calls": False}
    with wishing(app, opened + thought + said + bad) as wish:
        free = app.chat(tools=TOOLS, **fields, **wish)
        held = app.both(tools=STRICT_TOOLS, **fields, **wish)
    assert json.loads(free.calls[0][1])["city"] == "Paris", "the control: that is what the model wants"
    assert held.content == free.content and held.reasoning == free.reasoning
    [(name, arguments)] = held.calls
    assert name == "get_weather" and fits(json.loads(arguments)) and held.finish_reason == "tool_calls"


@one_family
@pytest.mark.parametrize("path", [MESSAGES_PATH, RESPONSES_PATH])
def test_a_strict_tool_is_held_in_every_protocol(app: AppUnderTest, path: str) -> None:
    """As in chat, where the protocol has a field of its own for it."""
    [function] = [tool["function"] for tool in TOOLS if tool["function"]["name"] == "get_weather"]
    name, schema, asked = function["name"], function["parameters"], chat_body(max_tokens=300)["messages"]
    cities = []
    for strict in (False, True):
        body: dict[str, Any] = {"max_tokens": 300, "messages": asked}
        body["tools"] = [{"name": name, "input_schema": schema, "strict": strict}]
        if path == RESPONSES_PATH:
            body = {"max_output_tokens": 300, "input": asked, "reasoning": {"effort": "none"}}
            body["tools"] = [{"type": "function", "name": name, "parameters": schema, "strict": strict}]
        with wishing(app, CALLS["qwen3"].replace("Oslo", "Paris")) as wish:
            answer: Any = app.post(path, {**body, **wish}).json
        if path == RESPONSES_PATH:
            [called] = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
        else:
            [called] = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
        cities.append(called["city"])
        assert fits(called) == strict, "the control: without it the model says what it wants"
    assert cities[0] == "Paris" != cities[1]


@pytest.mark.parametrize("family", ["gpt_oss"], indirect=True)
def test_a_messages_effort_is_read_by_the_model(app: AppUnderTest) -> None:
    """This template says at its very beginning how much to think: with another effort the prompt parts there."""

    def num_cached(effort: str) -> int:
        message = {"role": "user", "content": "Hello there. " * 20, "output_config": {"effort": effort}}
        body = {"max_tokens": 2, "messages": [message], "thinking": {"type": "adaptive"}}
        answer: Any = app.post(MESSAGES_PATH, body).json
        return int(answer["usage"]["cache_read_input_tokens"])

    num_cached("low")
    same, other = num_cached("low"), num_cached("high")
    assert same > other + 50


@sampled_cells(lambda family: family == "qwen3_5")
def test_text_beside_strict_tools_is_what_the_model_wants(app: AppUnderTest, family: str) -> None:
    """Without a call nothing is changed by them, thinking and markup that is none included."""
    said = "Use <b> or {}: 5 < 6.\n"
    text = f"<|channel|>final<|message|>{said}" if family == "gpt_oss" else said
    with wishing(app, text) as wish:
        free = app.chat(tools=TOOLS, thinking="off", max_tokens=100, **wish)
        held = app.both(tools=STRICT_TOOLS, thinking="off", max_tokens=100, **wish)
    assert replace(held, usage=free.usage) == free  # the prompt shows `strict`, where the template writes tools as JSON
    assert free.content == said.rstrip("\n") or free.content == said


# --- schemas as far as they can be held -------------------------------------------------------------------------------


@one_family
def test_a_schema_that_cannot_be_enforced_refuses_only_a_strict_request(app: AppUnderTest) -> None:
    """One odd keyword of one tool costs no request its answer: the request line says what was left out. `strict: true`
    is refused, in the names of the request."""
    odd = {"name": "odd", "parameters": ODD}
    fields = {"thinking": "off", "max_tokens": 200, "parallel_tool_calls": False, **without_space(app)}
    wanted = {"tools": [*TOOLS, {"type": "function", "function": odd}], "tool_choice": "required"}
    response = app.post(CHAT_PATH, chat_body(**wanted, **fields))
    assert response.status == 200, response.body
    assert "not enforced of tool odd: uniqueItems" in app.line_of(str(response.json["id"]))
    strict = {"type": "function", "function": {**odd, "strict": True}}
    for choice in ("required", "auto"):
        refused = app.post(CHAT_PATH, chat_body(tools=[TOOLS[0], strict], tool_choice=choice))
        assert refused.status == 400 and refused.error["param"] == "tools[1].function.parameters"
        assert "uniqueItems" in str(refused.error["message"])
    form = {"type": "json_schema", "json_schema": {"name": "odd", "schema": ODD}}
    assert app.post(CHAT_PATH, chat_body(response_format=form, thinking="off")).status == 200
    form["json_schema"]["strict"] = True  # type: ignore[index]
    refused = app.post(CHAT_PATH, chat_body(response_format=form, thinking="off"))
    assert refused.status == 400 and refused.error["param"] == "response_format.json_schema.schema"


@one_family
def test_legacy_functions_are_named_by_their_own_path(app: AppUnderTest) -> None:
    """Not by that of the `tools` that they mean."""
    functions = [TOOLS[1]["function"], {"name": "odd", "parameters": ODD, "strict": True}]
    for body in (
        chat_body(functions=functions, function_call={"name": "odd"}),
        chat_body(extra_body={"functions": functions}, function_call={"name": "odd"}),
    ):
        refused = app.post(CHAT_PATH, body)
        param = "functions[1].parameters"
        assert refused.status == 400 and refused.error["param"] in (param, f"extra_body.{param}")
        assert str(refused.error["message"]).startswith(str(refused.error["param"]))


# --- limits of thinking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promised", [False, True], ids=["text", "a form"])
@sampled_cells(lambda family, promised: (family == "qwen3_5") is promised and family != "qwen3")
def test_thinking_has_as_many_tokens_as_its_budget(app: AppUnderTest, family: str, promised: bool) -> None:
    """Whoever opened it, its end is forced then, and the answer follows; the usage counts it."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}
    fields = {"max_tokens": 200, **(form | without_space(app) if promised else {})}
    opening = {"gpt_oss": "<|channel|>analysis<|message|>"}.get(family, "" if family in OPENED else "<think>\n")
    answer = "<|start|>assistant<|channel|>final<|message|>Done." if family == "gpt_oss" else "\n\nDone."
    with wishing(app, opening + "a " * 18 + answer) as wish:
        limited = app.both(thinking={"type": "enabled", "budget_tokens": 7}, **fields, **wish)
        free = app.chat(thinking="on", **fields, **wish)
    assert reasoning_tokens(limited.usage) == 7
    assert reasoning_tokens(free.usage) > 14
    assert free.reasoning.startswith(limited.reasoning) and limited.reasoning
    assert limited.content
    if promised:
        assert fits(json.loads(limited.content)) and limited.finish_reason == "stop"


@thinking_family
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT_PATH, {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        (CHAT_PATH, {"reasoning": {"max_tokens": 7}}),
        (CHAT_PATH, {"extra_body": {"thinking_budget": 7}}),
        (CHAT_PATH, {"chat_template_kwargs": {"thinking_token_budget": 7}}),
        (MESSAGES_PATH, {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        (RESPONSES_PATH, {"reasoning": {"max_tokens": 7}}),
    ],
    ids=str,
)
def test_every_protocol_takes_a_budget(app: AppUnderTest, path: str, fields: dict[str, Any]) -> None:
    """All ways to say it limit the thinking; what is no count is a 400 that names it."""
    body = chat_body(**{"max_tokens": 12, **fields})
    if path == RESPONSES_PATH:
        body = {"input": body.pop("messages"), "max_output_tokens": body.pop("max_tokens"), **body}
    response = app.post(path, body)
    assert response.status == 200, response.body
    if path == CHAT_PATH:
        assert reasoning_tokens(whole(response.json).usage) == 7
    elif path == RESPONSES_PATH:
        usage: Any = response.json["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == 7
    else:
        [thought] = [block for block in response.json["content"] if block["type"] == "thinking"]  # type: ignore[union-attr, index]
        assert 0 < len(app.served.tokenizer.encode(thought["thinking"])) <= 8  # type: ignore[index]
    [(name, value)] = fields.items()
    for bad in (-1, "many", 1.5):
        inner = {key: bad if known == 7 else known for key, known in value.items()}
        refused = app.post(path, {**body, name: inner})
        assert refused.status == 400 and name in str(refused.json), refused.body


@thinking_family
def test_a_budget_as_long_as_the_answer_leaves_room_for_one(app: AppUnderTest) -> None:
    """It is clamped, not refused; nothing is limited where nobody asked for it."""
    answer = app.both(thinking={"type": "enabled", "budget_tokens": 5000}, max_tokens=12)
    assert reasoning_tokens(answer.usage) == 10 and answer.num_completion_tokens == 12
    assert reasoning_tokens(app.chat(thinking="on", max_tokens=12).usage) == 12


@pytest.mark.parametrize("family", ["glm4_moe_lite"], indirect=True)
def test_a_limited_answer_is_replayed_as_it_was_written(app: AppUnderTest) -> None:
    """The tokens that were forced are tokens of the answer: the next turn reuses them as it does where the model ended
    its thinking there itself."""
    text, answers = " ".join("a" * 9) + "</think>\n\nDone.", []
    for thinking in ({"type": "enabled", "budget_tokens": 9}, "on"):
        app.clear_cache()
        wanted = text if thinking == "on" else text.replace("</think>", " a")
        with wishing(app, wanted) as wish:
            first = app.chat("One.", thinking=thinking, max_tokens=30, **wish)
        said = {"role": "assistant", "content": "Done.", "reasoning_content": first.reasoning}
        history = [{"role": "user", "content": "One."}, said, {"role": "user", "content": "Two."}]
        answers.append((first, app.chat(history, thinking="on", max_tokens=1).num_cached_tokens))
    assert answers[0] == answers[1]
    first, num_cached_tokens = answers[0]
    assert first.usage is not None and num_cached_tokens is not None
    assert num_cached_tokens > first.usage["prompt_tokens"] + 9


# --- what the prompt has already --------------------------------------------------------------------------------------


@sampled_cells(lambda family, begun: family == "qwen3_5")
@pytest.mark.parametrize(
    "begun", ['{"city": "Os', '{\n  "city": "Rome",\n  "days":', '{"city": "Oslo", "days": 3}', "  {"]
)
def test_json_goes_on_from_a_prefilled_message(app: AppUnderTest, begun: str) -> None:
    """The answer is the rest of the JSON that the last message begins."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    said = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": begun}]
    for thinking in ("off", "on"):
        answer = app.both(said, response_format=form, thinking=thinking, max_tokens=120, **without_space(app))
        assert fits(json.loads(begun + answer.content)) and answer.finish_reason == "stop"
        assert answer.reasoning == ""


def test_json_behind_what_cannot_begin_it_is_refused(app: AppUnderTest) -> None:
    """A second object behind it would be no answer either."""
    form = {"type": "json_object"}
    for begun in ("Here you are:\n", "[1", '{"a": 1} and'):
        said = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": begun}]
        refused = app.post(CHAT_PATH, chat_body(said, response_format=form))
        assert refused.status == 400 and refused.error["param"] == "messages", (begun, refused.body)


@sampled_cells(lambda family: family == "qwen3_5")
def test_a_call_follows_prefilled_text(app: AppUnderTest) -> None:
    """What stands before a forced call is text, and the call is whole."""
    said = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "I will look it up."}]
    fields = {"parallel_tool_calls": False, "thinking": "off", "max_tokens": 140, **without_space(app)}
    answer = app.both(said, tools=TOOLS[:1], tool_choice="required", **fields)
    [(name, arguments)] = answer.calls
    assert answer.content.strip() == "" and name == "get_weather" and fits(json.loads(arguments))


@pytest.mark.parametrize("thinking", ["prefilled", "tags"])
@thinking_family
def test_json_behind_prefilled_thinking(app: AppUnderTest, thinking: str) -> None:
    """Unfinished thinking is gone on with, finished thinking is done; the JSON comes whole, or its rest."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}
    fields = {"thinking": "on", "max_tokens": 90, **form, **without_space(app)}
    user = {"role": "user", "content": "Weather?"}
    if thinking == "prefilled":
        answer = app.both([user, {"role": "assistant", "content": "<think>\nI see"}], **fields)
        assert answer.reasoning and fits(json.loads(answer.content))
    else:
        begun = '<think>\nI see\n</think>\n\n{"city": "O'
        answer = app.both([user, {"role": "assistant", "content": begun}], **fields)
        assert fits(json.loads('{"city": "O' + answer.content))


def test_a_raw_prompt_may_ask_for_json(app: AppUnderTest) -> None:
    """`/v1/completions` takes `response_format` as chat does: the text is the JSON and nothing else."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    body = {"prompt": "Weather: ", "max_tokens": 120, "temperature": 0, "response_format": form, **without_space(app)}
    response = app.post(COMPLETION_PATH, body)
    assert response.status == 200, response.body
    [choice] = response.json["choices"]  # type: ignore[misc]
    assert fits(json.loads(choice["text"])) and choice["finish_reason"] == "stop"  # type: ignore[index]
    form["json_schema"]["schema"] = ODD  # type: ignore[index]
    refused = app.post(COMPLETION_PATH, body)
    assert refused.status == 400 and refused.error["param"] == "response_format.json_schema.schema"
